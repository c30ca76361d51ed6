"""Checks of back ends and GPUs, of the topology, and of a run's ranks on this machine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_fssdp.megatron_adapter.diagnosis.devices import DEVICE_VARIABLE, Backends, Devices
from megatron_fssdp.megatron_adapter.diagnosis.finding import Finding, Verdict

if TYPE_CHECKING:
    from megatron_fssdp.config.run.parallelism_settings import ParallelismSettings

_MOST_PAIRS_SHOWN = 4


@dataclass(frozen=True)
class Launch:
    """The ranks that torchrun started.

    Attributes:
        world_size: Number of all ranks; ``None`` without torchrun.
        local_world_size: Number of ranks on this machine; ``None`` without torchrun.
    """

    world_size: int | None = None
    local_world_size: int | None = None


def check_gloo(backends: Backends) -> Finding:
    """Check that torch has gloo, the back end between CPUs. Megatron needs it on GPU machines too.

    Args:
        backends: Back ends of the installed torch.
    """
    if backends.has_gloo:
        return Finding("gloo", "built into torch", Verdict.OK)
    advice = "install a torch that is built with gloo, for example a wheel from pytorch.org"
    return Finding("gloo", "not built into torch", Verdict.PROBLEM, advice)


def check_nccl(backends: Backends, has_gpus: bool) -> Finding:
    """Check that torch has NCCL, the back end between GPUs.

    Args:
        backends: Back ends of the installed torch.
        has_gpus: Whether this machine has GPUs that torch can use.
    """
    unused = "" if has_gpus else "; not used without GPUs"
    if backends.has_nccl:
        return Finding("NCCL", f"{backends.nccl_version or 'built into torch'}{unused}", Verdict.OK)
    if not has_gpus:
        return Finding("NCCL", f"not built into torch{unused}", Verdict.OK)
    advice = "install a torch that is built with NCCL, for example a CUDA wheel from pytorch.org"
    return Finding("NCCL", "not built into torch", Verdict.PROBLEM, advice)


def check_gpus(devices: Devices) -> Finding:
    """Check which devices the ranks use by default.

    Args:
        devices: Devices of this machine.
    """
    name, host = "GPUs", f"{devices.num_cores} CPU cores, {devices.memory_bytes / 2**30:,.1f} GiB"
    if devices.asked not in ("", "cpu", "cuda"):
        found = f"{DEVICE_VARIABLE} is {devices.asked!r}"
        return Finding(name, found, Verdict.PROBLEM, f"set {DEVICE_VARIABLE} to cpu or cuda, or unset it")
    if devices.gpu_error:
        advice = "fix the cause that the message names; nvidia-smi shows whether the driver works"
        return Finding(name, f"torch fails to use them: {devices.gpu_error}", Verdict.PROBLEM, advice)
    if devices.gpus:
        if devices.asked == "cpu":
            found = f"{_described(devices)}; not used, because {DEVICE_VARIABLE}=cpu selects the CPU ({host})"
            return Finding(name, found, Verdict.NOTE)
        return Finding(name, _described(devices), Verdict.OK)
    found = f"none; ranks run on the CPU ({host})"
    if devices.asked == "cuda":
        advice = f"unset {DEVICE_VARIABLE} to run on the CPU, or use a machine with GPUs"
        return Finding(name, f"none, but {DEVICE_VARIABLE}=cuda asks for them", Verdict.PROBLEM, advice)
    if not devices.has_nvidia_driver or devices.asked == "cpu":
        return Finding(name, found, Verdict.NOTE)
    if devices.visible is not None and devices.visible.strip() in ("", "-1"):
        return Finding(name, f"hidden by CUDA_VISIBLE_DEVICES={devices.visible!r}; {found}", Verdict.NOTE)
    if devices.cuda_build is None:
        found = "an NVIDIA driver is installed, but torch is built without CUDA"
        advice = "install torch's CUDA wheel from pytorch.org"
    else:
        found = f"an NVIDIA driver is installed, but torch (built for CUDA {devices.cuda_build}) finds no GPU"
        advice = (
            "compare with the CUDA version that nvidia-smi shows, and install a newer driver or a torch for "
            "that version"
        )
    return Finding(name, found, Verdict.PROBLEM, f"{advice}; or set {DEVICE_VARIABLE}=cpu to use the CPU")


def check_expert_path(devices: Devices) -> Sequence[Finding]:
    """Check by which kernels the GPUs compute several bf16 experts; without GPUs, nothing is reported.

    Args:
        devices: Devices of this machine.
    """
    name = "experts' matrix products"
    without = dict.fromkeys(gpu.described for gpu in devices.gpus if not gpu.has_grouped_kernel)
    if without:
        found = f"one product for each expert on {', '.join(without)}"
        advice = (
            "torch's grouped_mm has a bf16 kernel only on capabilities 9.x and 10.x; results are the same, "
            "and small experts compute more slowly"
        )
        return [Finding(name, found, Verdict.NOTE, advice)]
    if devices.gpus:
        return [Finding(name, "one grouped kernel for several bf16 experts (torch's grouped_mm)", Verdict.OK)]
    return []


def check_topology(devices: Devices, launch: Launch, parallelism: "ParallelismSettings | None") -> Finding:
    """Check which nodes the strategies plan for.

    Args:
        devices: Devices of this machine.
        launch: Ranks that torchrun started.
        parallelism: Parallel sizes of the run to check; ``None`` if no run was given.
    """
    name = "topology"
    if launch.world_size is not None:
        local = launch.local_world_size or launch.world_size
        found, even = _nodes(launch.world_size, local, "from torchrun")
        if not even:
            advice = "start torchrun with the same --nproc-per-node on every machine: nodes must be equal"
            return Finding(name, found, Verdict.PROBLEM, advice)
    elif parallelism is not None:
        found, _ = _nodes(parallelism.world_size, parallelism.nproc_per_node, "from the run's file")
    else:
        members = _count(len(devices.gpus), "GPU") if devices.gpus else "CPU ranks"
        found = f"1 node (this machine) of {members}"
    if parallelism is not None and parallelism.declared_nodes is not None:
        found += f"; strategies plan for {_count(parallelism.declared_nodes, 'node')} (declared_nodes)"
    if devices.pairs_without_peer_access:
        pairs = devices.pairs_without_peer_access
        shown = ", ".join(f"{first}-{second}" for first, second in pairs[:_MOST_PAIRS_SHOWN])
        more = " …" if len(pairs) > _MOST_PAIRS_SHOWN else ""
        return Finding(
            name,
            f"{found}; no peer access between GPUs {shown}{more}",
            Verdict.NOTE,
            "the links inside this node are not equally fast: nvidia-smi topo -m shows them, and "
            "megatron-fssdp profile measures them",
        )
    return Finding(name, found, Verdict.OK)


def check_ranks(devices: Devices, launch: Launch, parallelism: "ParallelismSettings", wanted: str) -> Finding:
    """Check whether a run's ranks fit on this machine.

    Args:
        devices: Devices of this machine.
        launch: Ranks that torchrun started.
        parallelism: Parallel sizes of the run.
        wanted: The run's ``training.device``.
    """
    name, num_ranks, num_gpus = "ranks", parallelism.nproc_per_node, len(devices.gpus)
    if launch.world_size is not None and launch.world_size != parallelism.world_size:
        return Finding(
            name,
            f"torchrun started {launch.world_size}, but the run has {parallelism.world_size}",
            Verdict.PROBLEM,
            f"start torchrun with --nnodes={parallelism.num_nodes} "
            f"--nproc-per-node={parallelism.nproc_per_node}, or change parallelism.num_nodes and "
            "parallelism.nproc_per_node",
        )
    others = parallelism.num_nodes - 1
    elsewhere = f"; the ranks on {_count(others, 'other machine')} were not checked" if others else ""
    if devices.runs_on_cpu(wanted):
        found = f"{num_ranks} on {_count(devices.num_cores, 'CPU core')}{elsewhere}"
        if num_ranks <= devices.num_cores:
            return Finding(name, found, Verdict.OK)
        advice = (
            "the training works and its results are correct, but ranks share CPU cores and wait for each "
            "other, so measured times mean little"
        )
        return Finding(name, found, Verdict.NOTE, advice)
    found = f"{num_ranks} on {_count(num_gpus, 'GPU')}{elsewhere}"
    if num_ranks > num_gpus:
        fewer = f"--nproc {num_gpus} with parallel sizes that divide it, or " if num_gpus else ""
        advice = (
            f"every rank needs its own GPU: use {fewer}--set training.device=cpu, or a machine with more GPUs"
        )
        return Finding(name, found, Verdict.PROBLEM, advice)
    if num_ranks < num_gpus:
        advice = f"{_count(num_gpus - num_ranks, 'GPU')} not used: --nproc {num_gpus} uses all GPUs"
        return Finding(name, found, Verdict.NOTE, advice)
    return Finding(name, found, Verdict.OK)


def check_context(devices: Devices, has_engine: bool, context: int, wanted: str) -> Finding:
    """Check whether a run can use context parallelism.

    Args:
        devices: Devices of this machine.
        has_engine: Whether Transformer Engine is installed and works.
        context: The run's context-parallel size, 2 or more.
        wanted: The run's ``training.device``.
    """
    name, found = "context parallelism", f"parallelism.context {context}"
    if devices.runs_on_cpu(wanted):
        advice = (
            "set parallelism.context to 1, or train on GPUs: context parallelism uses Transformer Engine's "
            "attention, which needs a GPU"
        )
        return Finding(name, f"{found} on the CPU", Verdict.PROBLEM, advice)
    if not has_engine:
        advice = "install Transformer Engine, whose attention is needed, or set parallelism.context to 1"
        return Finding(name, f"{found} without Transformer Engine", Verdict.PROBLEM, advice)
    return Finding(name, found, Verdict.OK)


def _nodes(world_size: int, per_node: int, source: str) -> tuple[str, bool]:
    """Describe the nodes as a run would form them, and return whether all have the same number of ranks."""
    # The import is late because it needs numpy, which may be broken on this machine.
    from megatron_fssdp.planning.placement.topology import Topology

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
