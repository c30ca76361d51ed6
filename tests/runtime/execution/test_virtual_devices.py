"""Layers on virtual CUDA devices: the numbers of the CPU, and no finding.

A few cases run by default. ``pytest -m slow`` runs every strategy and every kind of transfer, with and
without recompute, in fp32 and in bf16 with ``grouped_mm``.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES
from megatron_fssdp.planning.cost.tensor_schedules import SCHEDULES, Schedule
from megatron_fssdp.planning.cost.transfer_split import TransferSplit
from megatron_fssdp.testing import run_ranks

from ..layer_case import LayerCase
from ..virtual_layer import VirtualResult, run_layers, run_schedules, run_stacks

WORLD = 4
# Layers compute the same bits on the CPU and on the device, except for grouped_mm, which rounds the sum
# with the bias elsewhere.
TOLERANCE = {torch.float64: 0.0, torch.float32: 0.0, torch.bfloat16: 2e-2}
SIZES = (8, 16)  # grouped_mm needs multiples of 8
BF16 = LayerCase("bf16", dtype=torch.bfloat16, sizes=SIZES, transfers="once")

SOME_LAYERS = (
    LayerCase("once-in-flight", transfers="once", schedule="FFBB", num_nodes=2),
    LayerCase("rematerialized-reentrant", transfers="rematerialized", recompute="reentrant", num_nodes=2),
    LayerCase("each-micro-batch", transfers="each", schedule="FFBB", num_iterations=1),
    LayerCase("smart-schedule-calibrated", transfers="once", group_size=1, calibrated=True, num_iterations=1),
    LayerCase("resident", transfers="resident", num_iterations=1),
    LayerCase("deduplicated", transfers="once", schedule="FFBB", num_nodes=2, top_k=4, deduplicated="known"),
    replace(BF16, name="bf16-non-reentrant", biases=True, recompute="non_reentrant", num_iterations=1),
    LayerCase("fssdp", placement="fssdp", settings=(("slots", 4), ("overlap_degree", 4)), transfers="once"),
)
ALL_LAYERS: tuple[LayerCase, ...] = tuple(
    LayerCase(
        f"{name}-{transfers}-groups-of-{group_size}-{str(dtype).removeprefix('torch.')}-{recompute}"
        + ("-calibrated" if calibrated else ""),
        placement=name,
        transfers=transfers,
        group_size=group_size,
        dtype=dtype,
        recompute=recompute,
        calibrated=calibrated,
        sizes=SIZES,
        schedule="FFBB",
        num_nodes=2,
        num_iterations=2 if name == "random" else 3,
    )
    for dtype in (torch.float32, torch.bfloat16)
    for recompute in (None, "reentrant", "non_reentrant")
    for name, transfers, group_size, calibrated in (
        *((name, "once", None, False) for name in STRATEGIES if name != "none"),
        *(
            ("random", transfers, group_size, False)
            for transfers in ("once", "rematerialized", "each", "resident", "in_turn")
            for group_size in (None, 1)
        ),
        ("random", "once", None, True),
        ("random", "once", 2, True),
    )
)

DEDUPLICATED_LAYERS = tuple(
    LayerCase(
        f"deduplicated-{transfers}-{num_nodes}-nodes-{recompute}-{str(dtype).removeprefix('torch.')}",
        transfers=transfers,
        recompute=recompute,
        dtype=dtype,
        sizes=SIZES,
        schedule="FFBB",
        num_nodes=num_nodes,
        top_k=4,
        deduplicated="known",
    )
    for dtype in (torch.float32, torch.bfloat16)
    for transfers, recompute in (("once", None), ("rematerialized", "kept"), ("each", "reentrant"))
    for num_nodes in (1, 2, 4)
)

SPLIT = TransferSplit(0.4, 0.7)
SOME_STACKS = (
    (LayerCase("split", transfers="once", schedule="FBFB", recompute="reentrant", biases=True), SPLIT),
)
ALL_STACKS = tuple(
    (
        LayerCase(
            f"{transfers}-{recompute}-{split.gather}-{split.reduce}",
            transfers=transfers,
            recompute=recompute,
            schedule="FFBFBB",
            num_nodes=2,
        ),
        split,
    )
    for transfers in ("once", "rematerialized")
    for recompute in (None, "reentrant")
    for split in (TransferSplit(), SPLIT, TransferSplit(gather=0.01), TransferSplit(reduce=0.999))
)
SOME_ORDERS = tuple((schedule, torch.float32) for schedule in SCHEDULES)
ALL_ORDERS = tuple((schedule, torch.bfloat16) for schedule in SCHEDULES)


@functools.cache
def layers(cases: Sequence[LayerCase]) -> list[dict[str, VirtualResult]]:
    """Results of all cases from one start of the ranks."""
    return run_ranks(run_layers, WORLD, cases, timeout_s=60 + 15 * len(cases))


@functools.cache
def stacks(
    cases: Sequence[tuple[LayerCase, TransferSplit]], connections: str
) -> list[dict[str, VirtualResult]]:
    """Results of all cases from one start of the ranks.

    With one connection, the runtime issues transfers in parts: see ``stream_lane.py``.
    """
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": connections}
    return run_ranks(run_stacks, WORLD, cases, env=env, timeout_s=60 + 30 * len(cases))


@functools.cache
def orders(cases: Sequence[tuple[Schedule, torch.dtype]]) -> list[dict[str, VirtualResult]]:
    """Results of all cases from one start of the ranks."""
    return run_ranks(run_schedules, WORLD, cases, timeout_s=180)


def check(results: list[dict[str, VirtualResult]], name: str, dtype: torch.dtype) -> None:
    """Compare numbers and findings of all ranks."""
    for rank, of_case in enumerate(results):
        result = of_case[name]
        assert not result.findings, f"rank {rank}: " + "\n".join(result.findings)
        assert result.num_tensors > 3
        assert result.difference <= TOLERANCE[dtype], f"rank {rank}"
    if dtype is torch.bfloat16:
        assert any("_grouped_mm" in of_case[name].operators for of_case in results)


def in_chunks(cases: tuple[LayerCase, ...], size: int = 24) -> list[tuple[LayerCase, tuple[LayerCase, ...]]]:
    """Each case with the cases that run in the same start of the ranks."""
    return [(case, cases[i - i % size : i - i % size + size]) for i, case in enumerate(cases)]


@pytest.mark.parametrize("case", SOME_LAYERS, ids=lambda case: case.name)
def test_a_layer_computes_the_same_without_a_finding(case: LayerCase) -> None:
    check(layers(SOME_LAYERS), case.name, case.dtype)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("case", "chunk"),
    in_chunks(ALL_LAYERS + DEDUPLICATED_LAYERS),
    ids=[case.name for case in ALL_LAYERS + DEDUPLICATED_LAYERS],
)
def test_every_layer_computes_the_same_without_a_finding(
    case: LayerCase, chunk: tuple[LayerCase, ...]
) -> None:
    check(layers(chunk), case.name, case.dtype)


@pytest.mark.parametrize("case", [case for case, _ in SOME_STACKS], ids=lambda case: case.name)
def test_split_transfers_compute_the_same_without_a_finding(case: LayerCase) -> None:
    check(stacks(SOME_STACKS, "1"), case.name, case.dtype)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("connections", ["1", "8"])
@pytest.mark.parametrize("case", [case for case, _ in ALL_STACKS], ids=lambda case: case.name)
def test_every_stack_computes_the_same_without_a_finding(case: LayerCase, connections: str) -> None:
    check(stacks(ALL_STACKS, connections), case.name, case.dtype)


@pytest.mark.parametrize(
    ("schedule", "dtype", "cases"),
    [(*case, SOME_ORDERS) for case in SOME_ORDERS]
    + [pytest.param(*case, ALL_ORDERS, marks=pytest.mark.slow) for case in ALL_ORDERS],
)
def test_parms_orders_compute_the_same_without_a_finding(
    schedule: Schedule, dtype: torch.dtype, cases: Sequence[tuple[Schedule, torch.dtype]]
) -> None:
    name = f"{schedule}-{dtype}".replace("torch.", "")
    check(orders(cases), name, dtype)
