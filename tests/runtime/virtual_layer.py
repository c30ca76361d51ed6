"""Runs layers on a virtual CUDA device, and compares them with the same layers on the CPU."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megatron_fssdp.planning.cost.tensor_schedules import Schedule
from megatron_fssdp.planning.cost.transfer_split import TransferSplit
from megatron_fssdp.testing.virtual_cuda import virtual_cuda

from .execution.test_split_transfer_execution import run_stack
from .layer_case import LayerCase
from .parm_layer import parm_groups, run_parm_layer
from .rank_layer import run_case, transfer_group


@dataclass
class VirtualResult:
    """One rank's run on the virtual device.

    Attributes:
        difference: Largest difference from the run on the CPU, relative to the largest value of each tensor.
        num_tensors: Number of tensors that were compared.
        findings: Findings of the device, as text.
        host_syncs: Host synchronizations inside the plugin: what and where.
        operators: Names of the operators and collectives that were executed.
    """

    difference: float = 0.0
    num_tensors: int = 0
    findings: list[str] = field(default_factory=list)
    host_syncs: list[str] = field(default_factory=list)
    operators: set[str] = field(default_factory=set)


def compare_devices(run: Callable[[str], Sequence[Tensor | None]]) -> VirtualResult:
    """Call a function that returns CPU tensors with the devices ``cpu`` and ``cuda``."""
    on_cpu = run("cpu")
    with virtual_cuda() as device:
        virtual = run("cuda")
        # Iterations leave nothing behind that the device still works on.
        torch.cuda.synchronize()
    ours = [event for event in device.host_syncs if not event.place.startswith("tests/")]
    pairs = list(zip(virtual, on_cpu, strict=True))
    return VirtualResult(
        max(_difference(got, wanted) for got, wanted in pairs),
        len(pairs),
        [str(finding) for finding in device.findings],
        [f"{event.what} at [{event.place}]" for event in ours],
        {event.what for event in device.events},
    )


def run_layers(rank: int, world_size: int, cases: Sequence[LayerCase]) -> dict[str, VirtualResult]:
    """Run one layer for each case; return the results by name of the case."""
    transfer_group()

    def values(case: LayerCase, device: str) -> Sequence[Tensor | None]:
        return run_case(rank, world_size, replace(case, device=device)).values

    return {case.name: compare_devices(lambda device, case=case: values(case, device)) for case in cases}


def run_stacks(
    rank: int, world_size: int, cases: Sequence[tuple[LayerCase, TransferSplit]]
) -> dict[str, VirtualResult]:
    """Run three layers with split transfers for each case; return the results by name of the case."""
    transfer_group()

    def values(case: LayerCase, split: TransferSplit, device: str) -> Sequence[Tensor | None]:
        return run_stack(rank, world_size, replace(case, device=device), split).tensors

    return {
        case.name: compare_devices(lambda device, case=case, split=split: values(case, split, device))
        for case, split in cases
    }


def run_schedules(
    rank: int, world_size: int, cases: Sequence[tuple[Schedule, torch.dtype]]
) -> dict[str, VirtualResult]:
    """Run a layer under Parm's orders of collectives; return the results by name of order and data type."""
    groups = parm_groups(rank, world_size)
    return {
        f"{schedule}-{dtype}".replace("torch.", ""): compare_devices(
            lambda device, schedule=schedule, dtype=dtype: run_parm_layer(
                rank, schedule, groups, dtype, device
            )
        )
        for schedule, dtype in cases
    }


def _difference(got: Tensor | None, wanted: Tensor | None) -> float:
    if got is None or wanted is None:
        return 0.0 if got is wanted else float("inf")
    if not wanted.numel():
        return 0.0
    scale = max(float(wanted.abs().max()), 1e-6)
    error = float((got.double() - wanted.double()).abs().max()) / scale
    return error if error == error else float("inf")
