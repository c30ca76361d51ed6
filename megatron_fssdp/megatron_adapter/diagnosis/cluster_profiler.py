"""Measures the links and devices of the cluster on which torchrun started this rank, and describes them."""

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from typing import get_args

import torch
import torch.distributed as dist

from megatron_fssdp.collectives.probes.collective_probe import measure_collective
from megatron_fssdp.config.cluster_description import (
    ClusterDescription,
    CollectiveName,
    FittedLink,
    LinkClass,
    LinkDescription,
)
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.run.run_config import RunConfig
from megatron_fssdp.megatron_adapter.support.node_detection import check_declared_nodes
from megatron_fssdp.planning.cost.cost_model import LinkFit
from megatron_fssdp.runtime.experts.compute_probe import (
    LayerShape,
    attention_flops_per_s,
    device_memory_bytes,
    expert_flops_per_s,
)
from megatron_fssdp.runtime.experts.grouped_kernel import expert_path

_NAMES: tuple[CollectiveName, ...] = get_args(CollectiveName)
_EXCHANGES: tuple[CollectiveName, ...] = ("row_exchange", "all_to_all")
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_CPU_SHAPE = LayerShape(512, 2048, 2, 512, False, 8, 256, 1, torch.float32)
_GPU_SHAPE = LayerShape(4096, 14336, 8, 8192, True, 32, 4096, 1, torch.bfloat16)


@dataclass(frozen=True)
class ProfileSettings:
    """What is measured, and how often.

    Attributes:
        name: Name of the cluster in its description.
        num_nodes: Number of equal nodes into which the ranks are divided, in rank order; ``None`` treats
            each of torchrun's machines as a node.
        backend: ``gloo`` (communication and compute on CPUs) or ``nccl``; ``None`` takes ``nccl`` if there
            are GPUs.
        model: Run whose layers are computed; ``None`` takes layer sizes that suit the device.
        least_bytes: Smallest message in bytes, at least 4.
        most_bytes: Largest message in bytes. Each message size is four times the previous one.
        num_repetitions: Number of repetitions of each measurement; the median counts.

    Raises:
        ConfigurationError: A setting is outside its range.
    """

    name: str
    num_nodes: int | None = None
    backend: str | None = None
    model: RunConfig | None = None
    least_bytes: int = 1 << 10
    most_bytes: int = 1 << 24
    num_repetitions: int = 7

    def __post_init__(self) -> None:
        if self.backend not in (None, "gloo", "nccl"):
            raise ConfigurationError(
                f"--backend {self.backend}: wanted gloo or nccl; leave it out to take nccl if there are GPUs"
            )
        if self.num_nodes is not None and self.num_nodes < 1:
            raise ConfigurationError(
                f"--nodes {self.num_nodes}: wanted 1 or more; leave it out to take torchrun's machines"
            )
        if not 4 <= self.least_bytes < self.most_bytes:
            raise ConfigurationError(
                f"--least-bytes {self.least_bytes} and --most-bytes {self.most_bytes}: wanted at least 4 "
                "bytes and a larger second number, because a line is fitted through at least two sizes"
            )
        if self.num_repetitions < 1:
            raise ConfigurationError(f"--repetitions {self.num_repetitions}: wanted 1 or more")

    def message_bytes(self) -> list[int]:
        """Return the message sizes in bytes. Each is four times the previous one; the last is the largest."""
        sizes = []
        size = self.least_bytes
        while size < self.most_bytes:
            sizes.append(size)
            size *= 4
        return [*sizes, self.most_bytes]

    def check_ranks(self, world_size: int) -> None:
        """Raise unless that many ranks can be measured.

        Args:
            world_size: Number of ranks.

        Raises:
            ConfigurationError: There are fewer than two ranks, or they cannot form equal nodes.
        """
        if world_size < 2:
            raise ConfigurationError(
                f"number of ranks: got {world_size}, wanted at least 2, because a link connects two ranks; "
                "start more with --nproc or torchrun's --nproc-per-node"
            )
        if self.num_nodes is not None:
            check_declared_nodes(self.num_nodes, world_size)


def profile_cluster(settings: ProfileSettings, progress: Callable[[str], None]) -> ClusterDescription:
    """Measure the cluster. All ranks that torchrun started call this before a process group exists.

    Args:
        settings: What is measured, and how often.
        progress: Function that gets one line of text for each step, on rank 0.

    Returns:
        Description of the cluster, equal on all ranks.

    Raises:
        ConfigurationError: These ranks cannot be measured. It is raised before any collective.
    """
    world_size = int(os.environ["WORLD_SIZE"])
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    settings.check_ranks(world_size)
    if settings.num_nodes is None and world_size % local_world_size:
        raise ConfigurationError(
            f"ranks: got {world_size} ranks with {local_world_size} on this machine, wanted the same number "
            "on every machine; start torchrun with the same --nproc-per-node on every machine"
        )
    num_nodes = settings.num_nodes or world_size // local_world_size
    backend = settings.backend or ("nccl" if torch.cuda.is_available() else "gloo")
    if backend == "nccl" and not torch.cuda.is_available():
        raise ConfigurationError(
            "--backend nccl: got no visible CUDA device, wanted one for each rank; use --backend gloo, or a "
            "machine with GPUs"
        )
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    try:
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
    """Measure the cluster like :func:`profile_cluster`, by the ranks of the existing default process group.

    Args:
        settings: What is measured, and how often.
        num_nodes: Number of equal nodes into which the ranks are divided.
        device: Torch device of this rank.
        local_world_size: Number of ranks on this machine.
        progress: Function that gets one line of text for each step, on rank 0.
    """
    quiet = dist.get_rank() > 0
    return _Measurement(settings, num_nodes, device, local_world_size, _ignore if quiet else progress)()


def _ignore(line: str) -> None:
    """Ignore a line of progress. Only rank 0 prints progress."""


class _Measurement:
    def __init__(
        self,
        settings: ProfileSettings,
        num_nodes: int,
        device: torch.device,
        local_world_size: int,
        progress: Callable[[str], None],
    ) -> None:
        self._settings, self._num_nodes, self._device = settings, num_nodes, device
        self._local_world_size, self._progress = local_world_size, progress
        self._per_node = dist.get_world_size() // num_nodes
        num_links = (self._per_node > 1) * len(_NAMES) + (num_nodes > 1) * (len(_NAMES) + 1)
        self._num_steps, self._step = num_links + 2, 0

    def __call__(self) -> ClusterDescription:
        ranks = range(dist.get_world_size())
        per_node, sizes = self._per_node, self._settings.message_bytes()
        nodes = "1 node" if self._num_nodes == 1 else f"{self._num_nodes} nodes"
        self._progress(
            f"{len(ranks)} ranks on {nodes}, {dist.get_backend()}, "
            f"{sizes[0]:,} to {sizes[-1]:,} bytes, {self._settings.num_repetitions} repetitions"
        )
        # "inside" has the ranks of each node. "between" has the ranks with the same position in all nodes.
        inside = [ranks[node * per_node : (node + 1) * per_node] for node in range(self._num_nodes)]
        between = [ranks[place::per_node] for place in range(per_node)]
        fits: dict[CollectiveName, dict[LinkClass, LinkFit]] = {name: {} for name in _NAMES}
        whole_nic: LinkFit | None = None
        if per_node > 1:
            group = self._own_group(inside)
            for name in _NAMES:
                fits[name]["intra_node"] = self._links(f"{name} intra_node", name, group)
        if self._num_nodes > 1:
            group = self._own_group(between)
            whole_nic = self._links("point_to_point inter_node, all devices", "point_to_point", group)
            for name in _NAMES:
                label = f"{name} inter_node"
                if name in _EXCHANGES:
                    # As in a dispatch, messages inside the nodes are under way at the same time.
                    everyone = dist.group.WORLD
                    fits[name]["inter_node"] = self._links(label, name, everyone, num_near=per_node - 1)
                    continue
                alone = name == "point_to_point" and dist.get_rank() % per_node
                fits[name]["inter_node"] = self._links(label, name, None if alone else group)
        expert, attention = self._compute()
        return self._described(fits, whole_nic, expert, attention)

    def _own_group(self, partition: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        groups = [dist.new_group(list(part)) for part in partition]  # Every rank must take part in each call.
        own = groups[[dist.get_rank() in part for part in partition].index(True)]
        assert isinstance(own, dist.ProcessGroup)
        return own

    def _links(self, label: str, name: str, group: dist.ProcessGroup | None, *, num_near: int = 0) -> LinkFit:
        everyone = dist.group.WORLD
        assert everyone is not None
        fit = measure_collective(
            name,
            group,
            everyone,
            self._device,
            message_bytes=self._settings.message_bytes(),
            num_repetitions=self._settings.num_repetitions,
            num_near=num_near,
        )
        self._say(
            f"{label}: {fit.cost.alpha_s * 1e6:.1f} us + {1e-9 / fit.cost.beta_s_per_byte:.3f} GB/s, "
            f"R2 {fit.r_squared:.4f}, worst error {fit.worst_relative_error:.0%}"
        )
        return fit

    def _compute(self) -> tuple[float, float]:
        shape = _layer_shape(self._settings.model, self._device)
        reached = []
        experts = f"experts ({expert_path(self._device, shape.dtype)})"
        for label, measure in ((experts, expert_flops_per_s), ("attention", attention_flops_per_s)):
            # Ranks may share cores, so all of them compute at the same time, as they do in a training.
            dist.barrier()
            slowest = torch.tensor(
                measure(shape, self._device, self._settings.num_repetitions),
                dtype=torch.float64,
                device=self._device,
            )
            dist.all_reduce(slowest, op=dist.ReduceOp.MIN)
            reached.append(float(slowest))
            self._say(f"{label}, forward and backward: {reached[-1] / 1e9:,.1f} GFLOP/s per device")
        return reached[0], reached[1]

    def _say(self, line: str) -> None:
        self._step += 1
        self._progress(f"[{self._step:2}/{self._num_steps}] {line}")

    def _described(
        self,
        fits: dict[CollectiveName, dict[LinkClass, LinkFit]],
        whole_nic: LinkFit | None,
        expert: float,
        attention: float,
    ) -> ClusterDescription:
        inside = fits["point_to_point"].get("intra_node")
        measured = f"measured {date.today()} on {self._machine()}"
        sources = dict.fromkeys(("collectives", "intra_node", "inter_node"), measured)
        sources["inter_node"] += ", all devices of a node at once"
        if inside is None:
            sources["intra_node"] = f"same as inter_node, because each node has one device; {measured}"
        if whole_nic is None:
            sources["inter_node"] = f"same as intra_node, because there is one node; {measured}"
        sources |= dict.fromkeys(
            ("expert_flops_per_s", "non_expert_flops_per_s"), self._compute_source(measured)
        )
        sources["memory_bytes"] = measured
        intra = _link(inside or whole_nic)
        memory = torch.tensor(device_memory_bytes(self._device, self._local_world_size), device=self._device)
        dist.all_reduce(memory, op=dist.ReduceOp.MIN)
        return ClusterDescription(
            name=self._settings.name,
            num_nodes=self._num_nodes,
            devices_per_node=self._per_node,
            intra_node=intra,
            inter_node=_link(whole_nic, self._per_node) if whole_nic is not None else intra,
            expert_flops_per_s=expert,
            non_expert_flops_per_s=attention,
            memory_bytes=int(memory),
            collectives={
                name: {
                    link_class: FittedLink(
                        **_link(fit).model_dump(),
                        r_squared=fit.r_squared,
                        worst_relative_error=fit.worst_relative_error,
                    )
                    for link_class, fit in classes.items()
                }
                for name, classes in fits.items()
            },
            sources=sources,
        )

    def _machine(self) -> str:
        on_gpu = self._device.type == "cuda"
        name = torch.cuda.get_device_name(self._device) if on_gpu else f"{platform.machine()} CPU ranks"
        return (
            f"{dist.get_world_size()} × {name}, {dist.get_backend()}, torch {torch.__version__}, "
            f"{self._settings.num_repetitions} repetitions"
        )

    def _compute_source(self, measured: str) -> str:
        shape = _layer_shape(self._settings.model, self._device)
        dtype = str(shape.dtype).removeprefix("torch.")
        return (
            f"{measured}; hidden size {shape.model_dim}, expert {shape.ffn_dim}, {shape.num_experts} experts,"
            f" {shape.num_rows} rows, sequence {shape.seq_length}, {dtype}; "
            f"experts by {expert_path(self._device, shape.dtype)}"
        )


def _link(fit: LinkFit | None, num_sharers: int = 1) -> LinkDescription:
    assert fit is not None  # With two ranks or more, there is a link inside a node or between nodes.
    return LinkDescription(
        alpha_s=fit.cost.alpha_s, bandwidth_bytes_per_s=num_sharers / fit.cost.beta_s_per_byte
    )


def _layer_shape(run: RunConfig | None, device: torch.device) -> LayerShape:
    """Return the sizes of a run's MoE layer as one rank computes it under balanced load."""
    if run is None:
        return _GPU_SHAPE if device.type == "cuda" else _CPU_SHAPE
    model, parallelism = run.model, run.parallelism
    num_samples = run.training.micro_batch_size
    return LayerShape(
        model_dim=model.hidden_size,
        ffn_dim=model.expert_ffn_size,
        num_experts=max(1, (model.num_experts or 1) // parallelism.expert),
        num_rows=num_samples * model.seq_length * (model.moe_top_k if model.num_experts else 1),
        gated=model.is_gated,
        num_heads=model.num_attention_heads,
        seq_length=model.seq_length,
        num_samples=num_samples,
        dtype=_DTYPES[run.training.precision],
    )
