"""Runs the cases of ``rank_layer`` on a virtual CUDA device and on the CPU."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from megatron_fssdp.testing.virtual_cuda import virtual_cuda

from .rank_layer import CaseResult, LayerCase, run_case, transfer_group


@dataclass
class VirtualResult:
    """One rank's run of a case on the virtual device.

    Attributes:
        case: The comparison with the reference layer.
        difference: Largest difference from the run on the CPU, relative to the largest value of each tensor.
        findings: Findings of the device, as text.
        host_syncs: Host synchronizations inside the plugin: what and where.
        counts: Counts of the device.
    """

    case: CaseResult
    difference: float = 0.0
    findings: list[str] = field(default_factory=list)
    host_syncs: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)


def run_virtual_case(rank: int, world_size: int, case: LayerCase) -> VirtualResult:
    """Run a case on the CPU and then on the virtual device."""
    transfer_group()
    on_cpu = run_case(rank, world_size, case)
    with virtual_cuda() as device:
        virtual = run_case(rank, world_size, replace(case, device="cuda"))
    assert virtual.digests == on_cpu.digests
    pairs = zip(virtual.values, on_cpu.values, strict=True)
    ours = [event for event in device.host_syncs if not event.place.startswith("tests/")]
    return VirtualResult(
        virtual,
        max((_difference(got, wanted) for got, wanted in pairs), default=0.0),
        [str(finding) for finding in device.findings],
        [f"{event.what} at [{event.place}]" for event in ours],
        dict(device.counts),
    )


def run_virtual_cases(rank: int, world_size: int, cases: Sequence[LayerCase]) -> dict[str, VirtualResult]:
    """Run every case; return the results by name of the case."""
    return {case.name: run_virtual_case(rank, world_size, case) for case in cases}


def _difference(got: torch.Tensor | None, wanted: torch.Tensor | None) -> float:
    if got is None or wanted is None:
        return 0.0 if got is wanted else float("inf")
    if not wanted.numel():
        return 0.0
    scale = max(float(wanted.abs().max()), 1e-6)
    return float((got.double() - wanted.double()).abs().max()) / scale
