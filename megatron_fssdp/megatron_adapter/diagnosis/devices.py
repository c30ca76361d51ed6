"""Gathers facts about accelerators, CPU cores and the back ends of torch.distributed."""

import itertools
import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from megatron_fssdp.megatron_adapter.diagnosis.installed_packages import one_line
from megatron_fssdp.megatron_adapter.support.host_cores import usable_cores

DEVICE_VARIABLE = "MEGATRON_FSSDP_DEVICE"

_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Gpu:
    """One accelerator that torch can use.

    Attributes:
        name: Name of the accelerator from its driver.
        memory_bytes: Total memory in bytes.
        capability: Major and minor number of the compute capability.
        has_grouped_kernel: Whether torch computes several bf16 experts by one kernel on it.
    """

    name: str
    memory_bytes: int
    capability: tuple[int, int]
    has_grouped_kernel: bool

    @property
    def described(self) -> str:
        """Name and compute capability."""
        return f"{self.name} (capability {self.capability[0]}.{self.capability[1]})"


@dataclass(frozen=True)
class Devices:
    """Devices on which ranks of this machine can run.

    Attributes:
        num_cores: Number of CPU cores that this process may use.
        memory_bytes: Memory of the machine in bytes.
        asked: Value of ``MEGATRON_FSSDP_DEVICE``: ``cpu``, ``cuda``, empty, or an invalid value.
        gpus: Accelerators that torch can use.
        pairs_without_peer_access: Pairs of GPUs that cannot read each other's memory.
        gpu_error: Error from asking torch for accelerators; empty if there was none.
        cuda_build: CUDA (or ROCm) version for which torch was built; ``None`` for a build without either.
        has_nvidia_driver: Whether NVIDIA's driver is loaded in the kernel.
        visible: Value of ``CUDA_VISIBLE_DEVICES``; ``None`` if it is not set.
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
        """Whether ranks run on the CPU.

        Args:
            wanted: ``training.device`` of a run: ``auto``, ``cpu`` or ``cuda``.
        """
        if wanted != "auto":
            return wanted == "cpu"
        return self.asked == "cpu" or (self.asked != "cuda" and not self.gpus)


@dataclass(frozen=True)
class Backends:
    """Back ends with which torch.distributed was built.

    Attributes:
        has_gloo: Whether torch has gloo.
        has_nccl: Whether torch has NCCL.
        nccl_version: Version of NCCL; empty if torch does not tell.
    """

    has_gloo: bool
    has_nccl: bool
    nccl_version: str = ""


def look_at_devices() -> Devices:
    """Gather the devices of this machine from torch and the system. Torch must be importable."""
    import torch

    from megatron_fssdp.runtime.experts.grouped_kernel import has_grouped_kernel

    gpus: tuple[Gpu, ...] = ()
    apart: tuple[tuple[int, int], ...] = ()
    error = ""
    try:
        if torch.cuda.is_available():
            count = torch.cuda.device_count()
            properties = [torch.cuda.get_device_properties(index) for index in range(count)]
            gpus = tuple(
                Gpu(each.name, int(each.total_memory), capability, has_grouped_kernel(capability))
                for each in properties
                for capability in [(int(each.major), int(each.minor))]
            )
            apart = tuple(
                (first, second)
                for first, second in itertools.combinations(range(count), 2)
                if not torch.cuda.can_device_access_peer(first, second)
            )
    except Exception as raised:  # Broken drivers raise many kinds of errors.
        error = one_line(raised)
    return Devices(
        num_cores=usable_cores(),
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
    """Gather the back ends of torch.distributed. Torch must be importable."""
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        return Backends(has_gloo=False, has_nccl=False)
    version = ""
    if dist.is_nccl_available():
        try:
            version = ".".join(str(number) for number in torch.cuda.nccl.version())
        except Exception:  # Some builds have no version number of NCCL, and the report only shows it.
            version = ""
    return Backends(dist.is_gloo_available(), dist.is_nccl_available(), version)
