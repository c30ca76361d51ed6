"""Which accelerators, cores and back ends of torch.distributed there are."""

import itertools
import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from megatron_fssdp.megatron_adapter.diagnosis.installed_packages import one_line

DEVICE_VARIABLE = "MEGATRON_FSSDP_DEVICE"

_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Gpu:
    """One accelerator that torch can use.

    Attributes:
        name: As its driver calls it.
        memory_bytes: All of its memory.
    """

    name: str
    memory_bytes: int


@dataclass(frozen=True)
class Devices:
    """What ranks on this machine may run on.

    Attributes:
        asked: ``MEGATRON_FSSDP_DEVICE``: ``cpu``, ``cuda``, empty, or a mistake.
        gpus: Accelerators that torch can use.
        pairs_without_peer_access: GPUs that cannot read each other's memory.
        gpu_error: Why torch could not tell; empty if it could.
        cuda_build: CUDA (or ROCm) version that torch was built for; ``None`` for a build without.
        has_nvidia_driver: Whether the kernel has NVIDIA's driver.
        visible: ``CUDA_VISIBLE_DEVICES``; ``None`` if it is not set.
        num_cores: CPU cores that this process may use.
        memory_bytes: Memory of the machine.
    """

    num_cores: int
    memory_bytes: int
    asked: str = ""
    gpus: tuple[Gpu, ...] = ()
    pairs_without_peer_access: tuple[tuple[int, int], ...] = ()
    gpu_error: str = ""
    cuda_build: str | None = None
    has_nvidia_driver: bool = False
    visible: str | None = None

    def runs_on_cpu(self, wanted: str = "auto") -> bool:
        """Whether ranks run without accelerators.

        Args:
            wanted: ``training.device`` of a run.
        """
        if wanted != "auto":
            return wanted == "cpu"
        return self.asked == "cpu" or (self.asked != "cuda" and not self.gpus)


@dataclass(frozen=True)
class Backends:
    """What torch.distributed was built with.

    Attributes:
        has_gloo: Whether it has gloo.
        has_nccl: Whether it has NCCL.
        nccl_version: Its version; empty if torch does not say.
    """

    has_gloo: bool
    has_nccl: bool
    nccl_version: str = ""


def look_at_devices() -> Devices:
    """Ask torch and the system; torch has to be importable."""
    import torch

    gpus: tuple[Gpu, ...] = ()
    apart: tuple[tuple[int, int], ...] = ()
    error = ""
    try:
        if torch.cuda.is_available():
            count = torch.cuda.device_count()
            properties = [torch.cuda.get_device_properties(index) for index in range(count)]
            gpus = tuple(Gpu(each.name, int(each.total_memory)) for each in properties)
            apart = tuple(
                (first, second)
                for first, second in itertools.combinations(range(count), 2)
                if not torch.cuda.can_device_access_peer(first, second)
            )
    except Exception as raised:  # drivers fail in many ways
        error = one_line(raised)
    return Devices(
        num_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=int(psutil.virtual_memory().total),
        asked=os.environ.get(DEVICE_VARIABLE, "").lower(),
        gpus=gpus,
        pairs_without_peer_access=apart,
        gpu_error=error,
        cuda_build=torch.version.cuda or torch.version.hip,
        has_nvidia_driver=_NVIDIA_DRIVER.exists(),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )


def look_at_backends() -> Backends:
    """Ask torch; it has to be importable."""
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        return Backends(has_gloo=False, has_nccl=False)
    version = ""
    if dist.is_nccl_available():
        try:
            version = ".".join(str(number) for number in torch.cuda.nccl.version())
        except Exception:  # a build without the symbol; the version is only shown
            version = ""
    return Backends(dist.is_gloo_available(), dist.is_nccl_available(), version)
