"""How a run divides its model among ranks: layers of the pipeline stages, and what is computed again.

Shape letters: L MoE layers, D devices, E experts.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

from megatron_fssdp.config.cluster_description import ClusterDescription
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.run.run_config import RunConfig
from megatron_fssdp.planning.replica_life import PipelineStage


@dataclass(frozen=True)
class StageLayers:
    """Transformer layers of each model chunk of a pipeline stage, from 0, in their order.

    ``pipeline`` has the numbers of the chunks' MoE layers.

    The first ``recomputed_of_chunk`` layers of a chunk are recomputed in the backward pass, which keeps the
    inputs of each ``recomputed_at_once`` of them.
    """

    chunks: tuple[tuple[int, ...], ...]
    pipeline: PipelineStage
    recomputed_of_chunk: int = 0
    recomputed_at_once: int = 1

    @property
    def layers(self) -> list[tuple[int, bool]]:
        """Each layer, and whether it is recomputed."""
        most = self.recomputed_of_chunk
        return [(layer, place < most) for chunk in self.chunks for place, layer in enumerate(chunk)]

    @property
    def is_last(self) -> bool:
        """Whether it has the output layer. The stage 0 has the embedding."""
        return self.pipeline.stage == self.pipeline.num_stages - 1


def stages_of(run: RunConfig, *, as_one: bool = False) -> list[StageLayers]:
    """The pipeline stages of a run by Megatron's rules, or all layers ``as_one`` stage.

    Raises:
        ConfigurationError: The options give no stages of a Megatron model, or are none that is simulated.
    """
    values, num_layers = run.megatron_values(), run.model.num_layers
    num_stages = 1 if as_one else run.parallelism.pipeline_model_parallel_size
    rows: list[list[int]] = [[*range(num_layers)]]
    if num_stages > 1:
        layout = values.get("pipeline_model_parallel_layout")
        rows = _even_rows(values, num_layers, num_stages) if layout is None else _layout_rows(layout)
        num_given = sum(map(len, rows))
        if num_given != num_layers or len(rows) % num_stages:
            raise ConfigurationError(
                f"simulate: parallelism.pipeline_model_parallel_layout has {num_given} layers in {len(rows)} "
                f"parts, wanted {num_layers} in a multiple of {num_stages}; change it"
            )
    most, at_once = 0, 1
    if run.training.recompute_granularity == "full":
        method, at_once = values.get("recompute_method"), values.get("recompute_num_layers") or 1
        if method not in ("uniform", "block"):
            raise ConfigurationError(
                f"simulate: training.recompute_method is {method or 'null'}, wanted uniform or block, which "
                "Megatron needs with recompute_granularity full; set it"
            )
        # Of each chunk, block recomputes only so many layers, one at a time.
        most, at_once = (num_layers, at_once) if method == "uniform" else (at_once, 1)
    group_size = values.get("microbatch_group_size_per_virtual_pipeline_stage")
    stages = []
    for stage in range(num_stages):
        chunks = tuple(map(tuple, rows[stage::num_stages]))
        counts = tuple(sum(run.model.moe_layers[layer] for layer in chunk) for chunk in chunks)
        pipeline = PipelineStage(counts, num_stages, stage, group_size)
        stages.append(StageLayers(chunks, pipeline, most, at_once))
    return stages


def _layout_rows(layout: str) -> list[list[int]]:
    """Layers of each part of a layout in Megatron's notation, such as ``Et|(tt|)*2tL``."""
    layout = layout.replace(",", "")
    for repeated in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        layout = re.sub(repeated, lambda match: match[1] * int(match[2]), layout)
    layers = count()
    return [[*islice(layers, part.count("t"))] for part in layout.split("|")]


def _even_rows(values: Mapping[str, Any], num_layers: int, num_stages: int) -> list[list[int]]:
    """Layers of each chunk of each stage, all stages' first chunks first."""
    # Embedding and output layer can count as layers.
    items = [-1] * bool(values.get("account_for_embedding_in_pipeline_split")) + [*range(num_layers)]
    items += [-1] * bool(values.get("account_for_loss_in_pipeline_split"))
    given = {
        place: values[f"decoder_{end}_pipeline_num_layers"]
        for place, end in ((0, "first"), (num_stages - 1, "last"))
        if values.get(f"decoder_{end}_pipeline_num_layers") is not None
    }
    others = max(num_stages - len(given), 1)
    share = (len(items) - sum(given.values())) // others
    of_chunk = values.get("num_layers_per_virtual_pipeline_stage")
    num_chunks = share // of_chunk if of_chunk else values.get("num_virtual_stages_per_pipeline_rank") or 1
    sizes = [given.get(stage, share) for stage in range(num_stages)]
    if sum(sizes) != len(items) or min(sizes) < 0 or any(size % num_chunks for size in sizes):
        chunks = f" of {num_chunks} chunks each" if num_chunks > 1 else ""
        raise ConfigurationError(
            f"simulate: {len(items)} layers do not fill {num_stages} pipeline stages{chunks}, wanted equal "
            "parts; change model.num_layers or parallelism.decoder_last_pipeline_num_layers"
        )
    left = iter(items)
    rows = [islice(left, size // num_chunks) for size in sizes * num_chunks]
    return [[layer for layer in row if layer >= 0] for row in rows]


def cluster_of_devices(cluster: ClusterDescription, num_peers: int) -> ClusterDescription:
    """The cluster with groups of ``num_peers`` ranks, which hold parts of each expert, as its devices.

    The ranks of a group send at the same time, so each has a part of its node's NICs.

    Raises:
        ConfigurationError: Such a group does not fit into a node.
    """
    if num_peers == 1:
        return cluster
    if cluster.devices_per_node % num_peers:
        raise ConfigurationError(
            f"simulate: parallelism.expert_tensor_parallel_size is {num_peers}, wanted a divisor of the "
            f"{cluster.devices_per_node} devices of a node of {cluster.name}; change it"
        )
    far = cluster.inter_node.bandwidth_bytes_per_s / num_peers
    changes: dict[str, Any] = {
        "devices_per_node": cluster.devices_per_node // num_peers,
        "inter_node": cluster.inter_node.model_copy(update={"bandwidth_bytes_per_s": far}),
    }
    return cluster.model_copy(update=changes)
