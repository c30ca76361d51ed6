"""Measures the links and devices of the cluster on which torchrun started this rank, and describes them."""

import itertools
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from functools import partial
from typing import Any, get_args

import torch
import torch.distributed as dist

from megatron_fssdp.collectives.link_probes import Prepare, measure_collective
from megatron_fssdp.config.cluster_description import (
    ClusterDescription,
    CollectiveName,
    FittedLink,
    LinkClass,
    LinkDescription,
)
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.run.run_config import RunConfig
from megatron_fssdp.megatron_adapter.diagnosis.exchange_probe import prepare_exchange
from megatron_fssdp.megatron_adapter.support.node_detection import check_declared_nodes
from megatron_fssdp.planning.cost.layer_seconds import EXCHANGE_STARTS
from megatron_fssdp.runtime.experts.compute_probe import (
    LayerShape,
    attention_flops_per_s,
    device_memory_bytes,
    expert_flops_per_s,
)

_NAMES: tuple[CollectiveName, ...] = get_args(CollectiveName)
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_CPU_SHAPE = LayerShape(512, 2048, 2, 512, False, 8, 256, 1, torch.float32)
_GPU_SHAPE = LayerShape(4096, 14336, 8, 8192, True, 32, 4096, 1, torch.bfloat16)

_EXCHANGE_SIZES = 5
"""Number of the largest sizes at which a layer's all-to-alls are measured; smaller ones are all start-up."""

_Fits = dict[CollectiveName, dict[LinkClass, FittedLink]]


@dataclass(frozen=True)
class ProfileSettings:
    """What is measured, and how often. A setting outside its range raises a ConfigurationError."""

    name: str  # of the cluster in its description
    num_nodes: int | None = None  # equal nodes of ranks, in rank order; None: torchrun's machines
    backend: str | None = None  # gloo (also computes on CPUs) or nccl; None: nccl if there are GPUs
    model: RunConfig | None = None  # run whose layers are computed; None: sizes that suit the device
    least_bytes: int = 1 << 10  # of a message
    most_bytes: int = 1 << 24
    num_repetitions: int = 7  # of each measurement; the median counts

    def __post_init__(self) -> None:
        if self.backend not in (None, "gloo", "nccl"):
            raise ConfigurationError(
                f"--backend {self.backend}: wanted gloo or nccl; leave it out to take nccl if there are GPUs"
            )
        if not 4 <= self.least_bytes < self.most_bytes:
            raise ConfigurationError(
                f"--least-bytes {self.least_bytes} and --most-bytes {self.most_bytes}: wanted at least 4 "
                "bytes and a larger second number, because a line is fitted through at least two sizes"
            )

    def message_bytes(self) -> list[int]:
        """Return the sizes of messages: each is four times the one before, and the last is the largest."""
        sizes = (self.least_bytes * 4**power for power in itertools.count())
        return [*itertools.takewhile(lambda size: size < self.most_bytes, sizes), self.most_bytes]

    def check_ranks(self, world_size: int) -> None:
        """Raise a ConfigurationError unless there are two ranks or more, with devices, on equal nodes."""
        if self.backend == "nccl" and not torch.cuda.is_available():
            raise ConfigurationError(
                "--backend nccl: got no visible CUDA device, wanted one for each rank; use --backend gloo, "
                "or a machine with GPUs"
            )
        if world_size < 2:
            raise ConfigurationError(
                f"number of ranks: got {world_size}, wanted at least 2, because a link connects two ranks; "
                "start more with --nproc or torchrun's --nproc-per-node"
            )
        if self.num_nodes is not None:
            check_declared_nodes(self.num_nodes, world_size)


def profile_cluster(settings: ProfileSettings, progress: Callable[[str], None]) -> ClusterDescription:
    """Measure the cluster. All ranks that torchrun started call this before a process group exists.

    ``progress`` gets a line for each step, on rank 0. A ConfigurationError is raised before any collective.
    """
    world_size = int(os.environ["WORLD_SIZE"])
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    settings.check_ranks(world_size)
    if settings.num_nodes is None and world_size % local_world_size:
        raise ConfigurationError(
            f"ranks: got {world_size} ranks with {local_world_size} on this machine, wanted the same number "
            "on every machine; start torchrun with the same --nproc-per-node on every machine"
        )
    backend = settings.backend or ("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    try:
        num_nodes = settings.num_nodes or world_size // local_world_size
        return measure_cluster(settings, num_nodes, device, local_world_size, progress)
    finally:
        dist.destroy_process_group()


def measure_cluster(
    settings: ProfileSettings,
    num_nodes: int,
    device: torch.device,
    local_world_size: int,
    progress: Callable[[str], None],
) -> ClusterDescription:
    """Measure like :func:`profile_cluster`, by the ranks of the existing default process group."""
    world_size, sizes, repetitions = dist.get_world_size(), settings.message_bytes(), settings.num_repetitions
    per_node = world_size // num_nodes
    num_links = (per_node > 1) * len(_NAMES) + (num_nodes > 1) * (len(_NAMES) + 1)
    steps = itertools.count(1)

    def say(line: str) -> None:
        if dist.get_rank() == 0:
            progress(f"[{next(steps):2}/{num_links + 2}] {line}")

    def measured_compute(label: str, measure: Callable[..., float]) -> float:
        # Ranks may share cores, so all of them compute at the same time, as they do in a training.
        dist.barrier()
        flops_per_s = _lowest(measure(shape, device, repetitions), device)
        say(f"{label}, forward and backward: {flops_per_s / 1e9:,.1f} GFLOP/s per device")
        return flops_per_s

    if dist.get_rank() == 0:
        progress(
            f"{world_size} ranks, nodes: {num_nodes}, {dist.get_backend()}, {sizes[0]:,} to {sizes[-1]:,} "
            f"bytes, {repetitions} repetitions"
        )
    shape = _layer_shape(settings.model, device)
    fits, alone = _measure_links(settings, num_nodes, device, shape, say)
    expert = measured_compute("experts", expert_flops_per_s)
    attention = measured_compute("attention", attention_flops_per_s)
    messages = fits["point_to_point"]
    inside, between = messages.get("intra_node"), messages.get("inter_node")
    near = inside or between
    assert near is not None  # two ranks have a link

    def link(fit: FittedLink | None, num_sharing: int = 1) -> LinkDescription:
        fit, num_sharing = (near, 1) if fit is None else (fit, num_sharing)
        bytes_per_s = fit.bandwidth_bytes_per_s * num_sharing
        return LinkDescription(alpha_s=fit.alpha_s, bandwidth_bytes_per_s=bytes_per_s)

    return ClusterDescription(
        name=settings.name,
        num_nodes=num_nodes,
        devices_per_node=per_node,
        intra_node=link(near),
        inter_node=link(between, per_node),
        inter_device=link(alone),
        expert_flops_per_s=expert,
        non_expert_flops_per_s=attention,
        memory_bytes=int(_lowest(device_memory_bytes(device, local_world_size), device)),
        collectives=fits,
        sources=_sources(device, repetitions, shape, inside is not None, between is not None),
    )


def _measure_links(
    settings: ProfileSettings,
    num_nodes: int,
    device: torch.device,
    shape: LayerShape,
    say: Callable[[str], None],
) -> tuple[_Fits, FittedLink | None]:
    """Return fits of all collectives by class of link, and of a device that sends alone between nodes."""
    everyone: Any = dist.group.WORLD
    ranks, per_node = range(dist.get_world_size()), dist.get_world_size() // num_nodes
    fits: _Fits = {name: {} for name in _NAMES}
    alone: FittedLink | None = None

    def measured(label: str, name: str, group: Any, num_near: int = 0) -> FittedLink:
        prepare: Prepare | None = None
        num_starts, sizes = 1, settings.message_bytes()
        if name == "all_to_all":
            prepare = partial(
                prepare_exchange, num_near=num_near, model_dim=shape.model_dim, dtype=shape.dtype
            )
            num_starts = EXCHANGE_STARTS
            sizes = sizes[-_EXCHANGE_SIZES:]
        how: Any = {"message_bytes": sizes, "num_repetitions": settings.num_repetitions, "prepare": prepare}
        fit = measure_collective(name, group, everyone, device, **how)
        alpha_s = fit.cost.alpha_s / num_starts
        say(
            f"{label}: {alpha_s * 1e6:.1f} us + {1e-9 / fit.cost.beta_s_per_byte:.3f} GB/s, "
            f"R2 {fit.r_squared:.4f}, worst error {fit.worst_relative_error:.0%}"
        )
        return FittedLink(
            alpha_s=alpha_s,
            bandwidth_bytes_per_s=1 / fit.cost.beta_s_per_byte,
            r_squared=fit.r_squared,
            worst_relative_error=fit.worst_relative_error,
        )

    if per_node > 1:
        nodes = [list(ranks[first : first + per_node]) for first in ranks[::per_node]]
        inside, _ = dist.new_subgroups_by_enumeration(nodes)
        for name in _NAMES:
            fits[name]["intra_node"] = measured(f"{name} intra_node", name, inside)
    if num_nodes > 1:
        # Each group has the ranks with the same position in all nodes.
        between, _ = dist.new_subgroups_by_enumeration([list(ranks[at::per_node]) for at in range(per_node)])
        first = None if dist.get_rank() % per_node else between
        alone = measured("point_to_point inter_node, one device of each node", "point_to_point", first)
        for name in _NAMES:
            # In a dispatch, messages inside the nodes are under way at the same time.
            group, num_near = (everyone, per_node - 1) if name == "all_to_all" else (between, 0)
            fits[name]["inter_node"] = measured(f"{name} inter_node", name, group, num_near)
    return fits, alone


def _sources(
    device: torch.device, repetitions: int, shape: LayerShape, has_intra: bool, has_inter: bool
) -> dict[str, str]:
    on_gpu = device.type == "cuda"
    processor = torch.cuda.get_device_name(device) if on_gpu else f"{platform.machine()} CPU ranks"
    measured = (
        f"measured {date.today()} on {dist.get_world_size()} × {processor}, {dist.get_backend()}, torch "
        f"{torch.__version__}, {repetitions} repetitions"
    )
    between = f"{measured}, all devices of a node at once"
    return {
        **dict.fromkeys(("collectives", "memory_bytes"), measured),
        **dict.fromkeys(("expert_flops_per_s", "non_expert_flops_per_s"), f"{measured}; {shape}"),
        "intra_node": measured if has_intra else f"same as inter_node, each node has one device; {measured}",
        "inter_node": between if has_inter else f"same as intra_node, there is one node; {measured}",
        "inter_device": f"{measured}, one device of each node at once"
        if has_inter
        else f"same as intra_node, there is one node; {measured}",
    }


def _lowest(value: float, device: torch.device) -> float:
    lowest = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
    return float(lowest)


def _layer_shape(run: RunConfig | None, device: torch.device) -> LayerShape:
    # The sizes are those that one rank computes under balanced load.
    if run is None:
        return _GPU_SHAPE if device.type == "cuda" else _CPU_SHAPE
    model, num_samples = run.model, run.training.micro_batch_size
    return LayerShape(
        model_dim=model.hidden_size,
        ffn_dim=model.expert_ffn_size,
        num_experts=max(1, (model.num_experts or 1) // run.parallelism.expert_model_parallel_size),
        num_rows=num_samples * model.seq_length * (model.moe_router_topk if model.num_experts else 1),
        gated=model.is_gated,
        num_heads=model.num_attention_heads,
        seq_length=model.seq_length,
        num_samples=num_samples,
        dtype=_DTYPES[run.training.precision],
    )
