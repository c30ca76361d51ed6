"""Collects loss, loads and times of an iteration from all ranks, for a run's files and for Megatron's boards.

Shape letters: D devices, E experts, L layers, N nodes, Z micro-batches.
"""

import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_fssdp.collectives.all_ranks import of_all_ranks
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.run.described_run import described_config
from megatron_fssdp.config.run.run_config import RunConfig
from megatron_fssdp.files import run_lock
from megatron_fssdp.megatron_adapter.iterations.host_settings import HostModel, HostSettings
from megatron_fssdp.megatron_adapter.iterations.record_folder import record_folder
from megatron_fssdp.megatron_adapter.iterations.stage_records import (
    IterationFacts,
    RankRecord,
    by_stage,
    firsts,
    gathered,
)
from megatron_fssdp.megatron_adapter.layer.model_layers import trained_layers
from megatron_fssdp.megatron_adapter.support.node_detection import ranks_of_node
from megatron_fssdp.planning.loads import balance_ratio, load_similarity, max_over_mean
from megatron_fssdp.records.loads import LoadsWriter, MicroBatchLoadsWriter
from megatron_fssdp.records.metrics import (
    IterationMetrics,
    LayerMetrics,
    MetricsWriter,
    PassMetrics,
    RunSession,
    SelectionMetrics,
)
from megatron_fssdp.records.placements import PlacementsWriter
from megatron_fssdp.records.run_settings import write_recorded_settings
from megatron_fssdp.runtime.clocks.pass_timer import PassSeconds
from megatron_fssdp.runtime.layers.layer_load import LayerLoad

logger = logging.getLogger(__name__)

MOST_SENT_BYTES = 4 * 2**20
"""Most bytes of single micro-batches that a rank sends in an iteration; rank 0 gets them from each."""

_EQUAL_FIELDS = (
    *("layer", "num_replicas", "spag_bytes", "sprs_bytes", "cross_node_tokens", "schedule", "strategy"),
    *("spag_s", "spag_exposed_s", "sprs_s", "sprs_exposed_s"),
)  # of a layer's load and of its metrics


def check_layers(chunks: Sequence[torch.nn.Module]) -> None:
    """Refuse layers that arrays of all layers cannot describe. Collective over all ranks.

    Raises:
        ConfigurationError: Layers of a rank share a number, or layers have other numbers of experts.
    """
    layers = (of for chunk in chunks for of in trained_layers(chunk))
    own = [(number, layer.config.num_moe_experts) for layer, number, _ in layers]
    of_ranks = of_all_ranks(own)
    sizes = {size for layers in of_ranks for _, size in layers}
    for layers in of_ranks:
        numbers = [number for number, _ in layers]
        if len(set(numbers)) < len(numbers) or len(sizes) > 1:
            of_experts = " and ".join(map(str, sorted(sizes)))
            raise ConfigurationError(
                f"record_dir: got MoE layers {numbers} of {of_experts} experts, wanted another number for "
                "each layer, and equally many experts in all; remove record_dir"
            )


def describe_run(asked: Path, model: HostModel) -> Path:
    """Write ``config.yaml`` from a host's settings, and return the folder that also gets the records."""
    is_bert = any(
        type(module).__name__ == "BertModel" for chunk in model.chunks for module in chunk.modules()
    )
    settings = model.settings.model_dump(mode="json", exclude_defaults=True, exclude={"record_dir"})
    strategy = {"name": model.name, "settings": settings}
    world_size = dist.get_world_size()
    where = world_size, ranks_of_node(world_size), not torch.cuda.is_available()
    run: RunConfig | None = None
    try:
        run = described_config(model.host, "bert" if is_bert else "gpt", *where, strategy)
    except ConfigurationError as error:
        logger.info(f"[fssdp] config.yaml has only the strategy, so simulate needs --model: {error}")
    folder = record_folder(asked, run, resumes=model.host.resumes())
    run_lock.hold(folder, "record_dir")
    write_recorded_settings(folder, run, strategy)
    return folder


class RunRecorder:
    """Writes a run's records while Megatron trains: files in ``record_dir``, if there is one, and boards.

    The devices of all expert-data-parallel ranks are put side by side, so D counts all devices of a pipeline
    stage. Expert-tensor-parallel peers count as one device, because they have the same loads. Seconds of
    transfers and of re-shards are those of device 0 of every expert-parallel group.
    """

    def __init__(self, record_dir: Path | None, strategy: str, host: HostSettings) -> None:
        self.record_dir, self._strategy, self._host = record_dir, strategy, host
        self._to_boards, self._has_begun = host.has_boards, False
        self._last_load_E: dict[int, np.ndarray] = {}
        self._firsts: Any = None  # a group; who is not in it gets what torch or the host returns
        # Global rank 0 writes files. Those of arrays are opened with the first iteration that has MoE layers.
        self._metrics: MetricsWriter | None = None
        self._arrays: tuple[LoadsWriter, PlacementsWriter, MicroBatchLoadsWriter] | None = None
        if record_dir is not None and dist.get_rank() == 0:
            self._metrics = MetricsWriter(record_dir)

    def wants_iteration(self, number: int) -> bool:
        """Whether an iteration is recorded; equal on all ranks."""
        return self.record_dir is not None or (self._to_boards and self._is_logged(number))

    def _is_logged(self, number: int) -> bool:
        return number % (self._host.log_interval or 1) == 0

    def record(self, iteration: int, facts: IterationFacts, loads: list[LayerLoad]) -> None:
        """Record one iteration. Collective: all ranks call it if :meth:`wants_iteration` says so.

        Of the iteration's wall time on this rank, ``passes_s`` of the facts are in forward passes, backward
        passes and the reduction of gradients.
        """
        is_logged = self._is_logged(iteration)
        single_bytes = sum(4 * len(load.micro_batches) * load.counts_DE.size for load in loads)
        keeps = single_bytes <= MOST_SENT_BYTES and self.record_dir is not None
        if not self._has_begun:
            self._firsts = firsts()
        records = gathered(facts, loads, self._firsts, of_micro_batches=keeps)
        stages = by_stage(records)
        # Peaks are also recorded in the first and the last iteration, so that a short run has them.
        has_peaks = is_logged or iteration in (1, self._host.train_iters)
        session = None if self._has_begun else _session(self._strategy, records, self._host)
        self._has_begun = True
        metrics: IterationMetrics | None = None
        all_loads = sorted((load for stage in stages for load in stage.loads), key=lambda load: load.layer)
        if dist.get_rank() == 0:
            numbers, lengths = zip(*(record.sequences for record in records), strict=True)
            # All ranks of a model have the same sequences.
            batch_size = sum(numbers) * parallel_state.get_data_parallel_world_size() // len(records)
            memory = "allocated" if torch.cuda.is_available() else "resident"
            metrics = IterationMetrics(
                iteration=iteration,
                lm_loss=next((of.loss[0] / of.loss[1] for of in reversed(stages) if of.loss), math.nan),
                grad_norm=None if facts.grad_norm is None else float(facts.grad_norm),
                iteration_s=facts.iteration_s,
                tokens_per_s=batch_size * max(lengths) / facts.iteration_s,
                layers=tuple(_layer_metrics(load, self._last_load_E.get(load.layer)) for load in all_loads),
                resharded_experts=sum(stage.reshard.experts_moved for stage in stages),
                reshard_bytes=sum(stage.reshard.bytes_moved for stage in stages),
                reshard_s=max(stage.reshard.seconds for stage in stages),
                passes_s=facts.passes_s,
                rank_peak_bytes=tuple(record.peak_bytes for record in records) if has_peaks else (),
                rank_memory=memory if has_peaks else None,
                flops=self._host.flops(batch_size),
                session=session,
                selections=tuple(
                    SelectionMetrics(stage.stage, stage.selection.changes, stage.selection.saving_s)
                    for stage in stages
                    if stage.selection
                ),
            )
            self._last_load_E = {load.layer: load.counts_DE.sum(axis=0) for load in all_loads}
            self._write_or_stop(metrics, all_loads)
        if self._to_boards and is_logged:
            _write_to_boards(metrics, all_loads, self._host.boards())

    def _write_or_stop(self, metrics: IterationMetrics, loads: list[LayerLoad]) -> None:
        """Write an iteration. A folder that later cannot be written ends the records, not the training."""
        try:
            self._write(metrics, loads)
        except ConfigurationError as error:
            if metrics.session is not None:
                raise
            self._metrics = None
            logger.warning(
                f"[fssdp] iteration {metrics.iteration}: records end here, training goes on: {error}"
            )

    def _write(self, metrics: IterationMetrics, loads: list[LayerLoad]) -> None:
        if self._metrics is None or self.record_dir is None:
            return
        self._metrics.append(metrics)
        if not loads:
            return
        if self._arrays is None:
            numbers = [load.layer for load in loads]
            folder = self.record_dir
            placed, single = PlacementsWriter(folder, numbers), MicroBatchLoadsWriter(folder, numbers)
            self._arrays = LoadsWriter(folder, numbers), placed, single
        counts, placements, micro_batches = self._arrays
        counts.append(
            metrics.iteration,
            np.stack([load.counts_DE for load in loads]),
            np.stack([load.by_nodes_N for load in loads]),
            np.stack([load.by_devices_D for load in loads]),
        )
        placements.append(
            metrics.iteration,
            owned_LED=np.stack([load.owned_ED() for load in loads]),
            present_LED=np.stack([load.present_ED() for load in loads]),
            ep_tokens_LD=np.stack([load.owner_D for load in loads]),
            tokens_LD=np.stack([load.device_D for load in loads]),
        )
        known = [load.counts_ZDE for load in loads if load.counts_ZDE is not None]
        micro_batches.append(metrics.iteration, known if len(known) == len(loads) else [])


def _session(strategy: str, records: list[RankRecord], host_settings: HostSettings) -> RunSession | None:
    """Return this start of the training, on global rank 0, which has records; None elsewhere."""
    if not records:
        return None
    ranks_of = Counter(record.host for record in records)
    host, cores = min(
        ((record.host, record.cores) for record in records), key=lambda of: of[1] / ranks_of[of[0]]
    )
    return RunSession(
        strategy,
        int(host_settings.train_iters or 0),
        ranks_of[host],
        0 if torch.cuda.is_available() else cores,
        devices=dist.get_world_size(),
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        precision="bf16" if host_settings.bf16 else "fp16" if host_settings.fp16 else "fp32",
    )


def _layer_metrics(load: LayerLoad, before_E: np.ndarray | None) -> LayerMetrics:
    return LayerMetrics(
        **{name: getattr(load, name) for name in _EQUAL_FIELDS},
        ep_load_max_over_mean=max_over_mean(load.owner_D),
        load_max_over_mean=max_over_mean(load.device_D),
        load_similarity=None if before_E is None else load_similarity(load.counts_DE.sum(axis=0), before_E),
        balance_ratio=balance_ratio(load.owner_D, load.device_D),
        schedule_predicted_s=load.schedule_predicted_s or None,
        forward=_pass_metrics(load.forward),
        backward=_pass_metrics(load.backward),
    )


def _pass_metrics(seconds: PassSeconds) -> PassMetrics | None:
    return PassMetrics(**asdict(seconds)) if seconds.is_measured else None


def _write_to_boards(
    metrics: IterationMetrics | None, loads: Sequence[LayerLoad], boards: Sequence[Any]
) -> None:
    """Send an iteration's metrics and loads from global rank 0, which alone has them, to the last rank.

    Megatron has opened TensorBoard and Weights & Biases there. Figures are ``fssdp/KEY`` of an iteration and
    ``fssdp KEY/layer N`` of a layer; the loads of experts are a histogram. All ranks call this function.
    """
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    entry: list[Any] = [metrics and (metrics, [load.counts_DE.sum(axis=0) for load in loads])]
    if last > 0 and rank == 0:
        dist.send_object_list(entry, dst=last)
    elif last > 0 and rank == last:
        dist.recv_object_list(entry, src=0)
    if rank != last or entry[0] is None:
        return
    metrics, load_of_layer_E = entry[0]
    step, scalars, histograms = metrics.iteration, _scalars(metrics, "fssdp/", ""), {}
    for layer, load_E in zip(metrics.layers, load_of_layer_E, strict=True):
        scalars |= _scalars(layer, "fssdp ", f"/layer {layer.layer}")
        histograms[f"fssdp tokens of an expert/layer {layer.layer}"] = load_E
    tensorboard, wandb = boards
    if tensorboard is not None:
        for name, value in scalars.items():
            tensorboard.add_scalar(name, value, step)
        for name, load_E in histograms.items():
            tensorboard.add_histogram(name, load_E, step)
    if wandb is not None:
        wandb.log({**scalars, **{name: wandb.Histogram(load_E) for name, load_E in histograms.items()}}, step)


def _scalars(record: IterationMetrics | LayerMetrics, prefix: str, suffix: str) -> dict[str, float]:
    return {
        f"{prefix}{key}{suffix}": float(value)
        for key, value in asdict(record).items()
        if isinstance(value, int | float) and key not in ("iteration", "layer")
    }
