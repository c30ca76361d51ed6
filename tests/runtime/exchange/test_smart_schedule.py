"""The smart schedule gives the numbers of the reference, like the exchange with all devices at once."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES
from megatron_fssdp.planning.placement.group_ring import GroupRing
from megatron_fssdp.runtime.exchange import smart_schedule
from megatron_fssdp.runtime.exchange.smart_schedule import SmartSchedule
from megatron_fssdp.testing import run_ranks

from ..layer_case import CaseResult, LayerCase
from ..rank_layer import compare_with_reference
from ..replicas.test_materialization import CASES, TOLERANCE

SMART = [
    replace(case, name=f"{case.name}-by-{group_size}", group_size=group_size, changes=group_size == 2)
    for case, group_size in zip(CASES, [1, 2, 4] * len(CASES), strict=False)
]


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(SMART[::2], id="some"),
        pytest.param(SMART[1::2], id="others", marks=pytest.mark.slow),
    ],
)
def test_equals_the_reference(cases: list[LayerCase]) -> None:
    results = run_ranks(count_exchanges, 4, cases, timeout_s=180)
    for case in cases:
        for result, num_exchanges in (of_rank[case.name] for of_rank in results):
            worst = max(result.errors.values())
            assert worst <= TOLERANCE[case.dtype], (case.name, result.errors)
            passes = case.schedule + "F" * (case.recompute is not None) * case.schedule.count("F")
            changes = case.changes and case.placement not in STRATEGIES
            num_stepped = case.num_iterations // 2 if changes else case.num_iterations
            assert num_exchanges == num_stepped * len(passes), case.name


def count_exchanges(rank: int, world_size: int, cases: list[LayerCase]) -> dict[str, tuple[CaseResult, int]]:
    """For each case, what one rank finds, and the number of its exchanges in steps."""
    calls: list[object] = []
    exchange = smart_schedule.exchange_in_steps

    def counted(*arguments: Any) -> None:
        calls.append(None)
        exchange(*arguments)

    smart_schedule.exchange_in_steps = counted
    found = {}
    for case in cases:
        calls.clear()
        result = compare_with_reference(rank, world_size, [case])[case.name]
        found[case.name] = result, len(calls)
    return found


def test_weights_are_awaited_where_rows_need_them() -> None:
    """Four groups of one rank; expert 1 of two present ones can still be in transfer."""
    received_SG = np.array([[0, 5], [3, 0], [2, 1], [4, 0]])  # from ranks 0 to 3

    def steps_that_wait(travels_G: tuple[bool, ...], own_last: bool) -> list[int]:
        ring = GroupRing(0, 4, 1, own_last)
        record = SimpleNamespace(received_SG=received_SG)
        schedule = SmartSchedule(record, ring, None, None, travels_G=travels_G)  # type: ignore[arg-type]
        return [step for step in range(4) if schedule.needs_weights(step)]

    assert steps_that_wait((False, True), own_last=False) == [0, 2, 3]
    # A rank's own rows come last, so rank 1's rows are computed before any wait.
    assert steps_that_wait((False, True), own_last=True) == [1, 3]
    assert steps_that_wait((False, False), own_last=True) == [3]


def test_experts_without_rows_take_no_part_in_a_step() -> None:
    received_SG = np.array([[2, 0, 1], [0, 0, 0], [0, 3, 0], [0, 0, 0]])  # from ranks 0 to 3
    calls: list[tuple[list[int], list[str]]] = []

    def compute(rows: Any, probs: Any, rows_per_expert: list[int], experts: list[str]) -> Any:
        calls.append((rows_per_expert, experts))
        return rows

    schedule = SmartSchedule(
        SimpleNamespace(received_SG=received_SG),  # type: ignore[arg-type]
        GroupRing(0, 4, 1),
        None,  # type: ignore[arg-type]
        compute,
    )
    for step, num_rows in enumerate([3, 0, 3, 0]):
        rows = torch.arange(num_rows)
        assert torch.equal(schedule.of_step(step, rows, rows, ["a", "b", "c"]), rows)  # type: ignore[list-item]
    assert calls == [([2, 1], ["a", "c"]), ([], []), ([3], ["b"]), ([], [])]
