"""Tells on which devices torch's ``grouped_mm`` is one kernel that never makes the host wait.

``torch._grouped_mm`` runs on every CUDA device of capability 8.0 and above. It launches one CUTLASS kernel
only if all operands are bf16 and the capability is 9.x (Hopper) or 10.x (Blackwell's data-center GPUs). On
all other devices it copies the offsets to the host, which waits for the device, and loops over the groups.
Capabilities 11.x and 12.x take the loop, although they are newer. On ROCm the loop is the default.

The condition is ``scaled_mm_arch_allowed(sm90_only, sm100_only)`` in ``_grouped_mm_cuda`` of ATen's
``native/cuda/GroupedBlas.cpp``. The loop is ``_grouped_mm_fallback`` in ``native/GroupedMMUtils.h``. Both
were read in torch's sources of 2025 and 2026 and in the machine code of torch 2.15.
"""

from functools import cache

import torch
from torch.nn import functional

_MAJORS_WITH_KERNEL = (9, 10)

KERNEL = "one grouped kernel (torch's grouped_mm)"
LOOP = "one matrix product for each expert"


def has_grouped_kernel(capability: tuple[int, int]) -> bool:
    """Whether the installed torch has a grouped kernel for bf16 on devices of a compute capability.

    Args:
        capability: Major and minor number of the device's compute capability, for example ``(9, 0)``.
    """
    return (
        hasattr(functional, "grouped_mm")
        and torch.version.hip is None
        and capability[0] in _MAJORS_WITH_KERNEL
    )


@cache
def device_has_grouped_kernel(device: torch.device) -> bool:
    """Whether the installed torch has a grouped kernel for bf16 on a device; a CPU has none.

    The answer is kept for each device, because every layer pass asks.

    Args:
        device: The device.
    """
    return device.type == "cuda" and has_grouped_kernel(torch.cuda.get_device_capability(device))


def expert_path(device: torch.device, dtype: torch.dtype) -> str:
    """Describe how several experts of a device are computed, for reports.

    Args:
        device: The device that computes the experts.
        dtype: Data type of the experts' weights and rows.
    """
    return KERNEL if dtype is torch.bfloat16 and device_has_grouped_kernel(device) else LOOP
