"""Back ends, GPUs, the topology and whether a run's ranks fit."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_fssdp.megatron_adapter.diagnosis.devices import DEVICE_VARIABLE, Backends, Devices
from megatron_fssdp.megatron_adapter.diagnosis.finding import Finding, Verdict

if TYPE_CHECKING:
    from megatron_fssdp.config.parallelism_settings import ParallelismSettings

_MOST_PAIRS_SHOWN = 4


@dataclass(frozen=True)
class Launch:
    """The ranks that torchrun started; both ``None`` without it.

    Attributes:
        world_size: All of them.
        local_world_size: Those on this machine.
    """

    world_size: int | None = None
    local_world_size: int | None = None


def check_gloo(backends: Backends) -> Finding:
    """Whether ranks on CPUs can talk; Megatron has groups of such ranks beside NCCL's, too."""
    if backends.has_gloo:
        return Finding("gloo", "built into torch", Verdict.OK)
    advice = "install a torch whose torch.distributed has gloo, as the wheels of pytorch.org have"
    return Finding("gloo", "not built into torch", Verdict.PROBLEM, advice)


def check_nccl(backends: Backends, has_gpus: bool) -> Finding:
    """Whether GPUs can talk.

    Args:
        backends: What torch has.
        has_gpus: Whether there are any.
    """
    unused = "" if has_gpus else "; unused without GPUs"
    if backends.has_nccl:
        return Finding("NCCL", f"{backends.nccl_version or 'built into torch'}{unused}", Verdict.OK)
    if not has_gpus:
        return Finding("NCCL", f"not built into torch{unused}", Verdict.OK)
    advice = "install a torch that is built with NCCL, as the CUDA wheels of pytorch.org are"
    return Finding("NCCL", "not built into torch", Verdict.PROBLEM, advice)


def check_gpus(devices: Devices) -> Finding:
    """Which devices ranks get by default."""
    name, host = "GPUs", f"{devices.num_cores} CPU cores, {devices.memory_bytes / 2**30:,.1f} GiB"
    if devices.asked not in ("", "cpu", "cuda"):
        found = f"{DEVICE_VARIABLE} is {devices.asked!r}"
        return Finding(name, found, Verdict.PROBLEM, f"set {DEVICE_VARIABLE} to cpu or cuda, or unset it")
    if devices.gpu_error:
        advice = "put right what the message names; nvidia-smi tells whether the driver works"
        return Finding(name, f"torch fails on them: {devices.gpu_error}", Verdict.PROBLEM, advice)
    if devices.gpus:
        if devices.asked == "cpu":
            found = f"{_described(devices)}; left alone, {DEVICE_VARIABLE}=cpu asks for the CPU ({host})"
            return Finding(name, found, Verdict.NOTE)
        return Finding(name, _described(devices), Verdict.OK)
    found = f"none; ranks run on the CPU ({host})"
    if devices.asked == "cuda":
        advice = f"unset {DEVICE_VARIABLE} to run on the CPU, or go to a machine with GPUs"
        return Finding(name, f"none, but {DEVICE_VARIABLE}=cuda asks for them", Verdict.PROBLEM, advice)
    if not devices.has_nvidia_driver or devices.asked == "cpu":
        return Finding(name, found, Verdict.NOTE)
    if devices.visible is not None and devices.visible.strip() in ("", "-1"):
        return Finding(name, f"hidden by CUDA_VISIBLE_DEVICES={devices.visible!r}; {found}", Verdict.NOTE)
    if devices.cuda_build is None:
        found = "an NVIDIA driver is here, but torch is built without CUDA"
        advice = "install torch's CUDA wheel from pytorch.org"
    else:
        found = f"an NVIDIA driver is here, but torch, built for CUDA {devices.cuda_build}, sees no GPU"
        advice = "see what CUDA nvidia-smi shows: a newer driver, or torch for that CUDA"
    return Finding(name, found, Verdict.PROBLEM, f"{advice}; {DEVICE_VARIABLE}=cpu runs without")


def check_topology(devices: Devices, launch: Launch, cut: "ParallelismSettings | None") -> Finding:
    """Which nodes the strategies plan for.

    Args:
        devices: Of this machine.
        launch: The ranks, if torchrun started any.
        cut: Parallel sizes of a run; ``None`` if none is given.
    """
    name = "topology"
    if launch.world_size is not None:
        local = launch.local_world_size or launch.world_size
        found, even = _nodes(launch.world_size, local, "from torchrun")
        if not even:
            advice = "start torchrun with the same --nproc-per-node on every machine: nodes are equal"
            return Finding(name, found, Verdict.PROBLEM, advice)
    elif cut is not None:
        found, _ = _nodes(cut.world_size, cut.nproc_per_node, "by the run's file")
    else:
        members = _count(len(devices.gpus), "GPU") if devices.gpus else "CPU ranks"
        found = f"1 node, this machine, of {members}"
    if cut is not None and cut.declared_nodes is not None:
        found += f"; declared_nodes: planned for as {_count(cut.declared_nodes, 'node')}"
    if devices.pairs_without_peer_access:
        pairs = devices.pairs_without_peer_access
        shown = ", ".join(f"{first}-{second}" for first, second in pairs[:_MOST_PAIRS_SHOWN])
        more = " …" if len(pairs) > _MOST_PAIRS_SHOWN else ""
        return Finding(
            name,
            f"{found}; no peer access between GPUs {shown}{more}",
            Verdict.NOTE,
            "links inside this node are not alike: nvidia-smi topo -m shows them, megatron-fssdp profile "
            "measures them",
        )
    return Finding(name, found, Verdict.OK)


def check_ranks(devices: Devices, launch: Launch, cut: "ParallelismSettings", wanted: str) -> Finding:
    """Whether a run's ranks fit this machine.

    Args:
        devices: Of this machine.
        launch: The ranks, if torchrun started any.
        cut: The run's parallel sizes.
        wanted: The run's ``training.device``.
    """
    name, num_ranks, num_gpus = "ranks", cut.nproc_per_node, len(devices.gpus)
    if launch.world_size is not None and launch.world_size != cut.world_size:
        return Finding(
            name,
            f"torchrun started {launch.world_size}, the run has {cut.world_size}",
            Verdict.PROBLEM,
            f"start torchrun with --nnodes={cut.num_nodes} --nproc-per-node={cut.nproc_per_node}, or change "
            "parallelism.num_nodes and nproc_per_node",
        )
    others = cut.num_nodes - 1
    elsewhere = f"; those of {_count(others, 'other machine')} were not looked at" if others else ""
    if devices.runs_on_cpu(wanted):
        found = f"{num_ranks} on {_count(devices.num_cores, 'CPU core')}{elsewhere}"
        if num_ranks <= devices.num_cores:
            return Finding(name, found, Verdict.OK)
        advice = "ranks that share a core wait for each other: results are right, times say little"
        return Finding(name, found, Verdict.NOTE, advice)
    found = f"{num_ranks} on {_count(num_gpus, 'GPU')}{elsewhere}"
    if num_ranks > num_gpus:
        fewer = f"--nproc {num_gpus} with parallel sizes that divide it, or " if num_gpus else ""
        advice = f"every rank needs a GPU of its own: {fewer}--set training.device=cpu, or another machine"
        return Finding(name, found, Verdict.PROBLEM, advice)
    if num_ranks < num_gpus:
        advice = f"{_count(num_gpus - num_ranks, 'GPU')} idle: --nproc {num_gpus} uses all"
        return Finding(name, found, Verdict.NOTE, advice)
    return Finding(name, found, Verdict.OK)


def check_context(devices: Devices, has_engine: bool, context: int, wanted: str) -> Finding:
    """Whether a run can split its sequences.

    Args:
        devices: Of this machine.
        has_engine: Whether Transformer Engine works.
        context: The run's context-parallel size, 2 or more.
        wanted: The run's ``training.device``.
    """
    name, found = "context parallelism", f"parallelism.context {context}"
    if devices.runs_on_cpu(wanted):
        advice = "set parallelism.context to 1, or train on GPUs: its attention is Transformer Engine's"
        return Finding(name, f"{found} on the CPU", Verdict.PROBLEM, advice)
    if not has_engine:
        advice = "install Transformer Engine, whose attention it is, or set parallelism.context to 1"
        return Finding(name, f"{found} without Transformer Engine", Verdict.PROBLEM, advice)
    return Finding(name, found, Verdict.OK)


def _nodes(world_size: int, per_node: int, source: str) -> tuple[str, bool]:
    """Nodes in words, by the rule of a run, and whether they are equal."""
    from megatron_fssdp.planning.placement.topology import Topology  # needs numpy, which may be broken, too

    topology = Topology.from_labels([rank // per_node for rank in range(world_size)])
    sizes = [len(devices) for devices in topology.devices_by_node]
    even = len(set(sizes)) == 1
    members = _count(sizes[0], "rank") if even else f"{'/'.join(map(str, sizes))} ranks"
    return f"{_count(topology.num_nodes, 'node')} of {members}, {source}", even


def _described(devices: Devices) -> str:
    kinds = list(dict.fromkeys(devices.gpus))
    return ", ".join(
        f"{devices.gpus.count(kind)} × {kind.name}, {kind.memory_bytes / 2**30:,.1f} GiB" for kind in kinds
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
