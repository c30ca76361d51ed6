"""Parm's schedules are measured at toy size, and the table shows given seconds."""

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.testbed.schedule_bench import (
    VARIANTS,
    Plan,
    Shape,
    measure_schedule_grid,
    schedule_table,
)
from megatron_fssdp.testing import run_ranks


def measured(rank: int, world_size: int, plan: Plan) -> dict[str, Any]:
    """Run on every rank."""
    return measure_schedule_grid(plan)


@pytest.mark.slow
def test_all_schedules_run_and_agree_on_four_ranks() -> None:
    shapes = (Shape(32, 8, 1.0), Shape(32, 8, 0.5))
    plan = Plan(2, 2, 2, shapes, num_experts=4, flops_per_s=1e12, repetitions=1, warm_up=0, seed=0)
    found = run_ranks(measured, 4, plan)[0]
    assert found["worst_difference"] < 1e-5
    for shape, row in zip(shapes, found["shapes"], strict=True):
        assert (row["tokens"], row["hidden"], row["rows_per_token"]) == (32, 8, shape.share)
        assert set(row["seconds"]) == set(VARIANTS)
        assert set(row["predicted_s"]) == {"s1", "s2", "megatron"}
    assert schedule_table(found).count("| 32 | 8 |") == 2


def test_the_table_has_the_requested_measurements() -> None:
    row = {"tokens": 1, "hidden": 1, "rows_per_token": 1.0}
    fast = {"baseline": [3.0], "s1": [1.0], "s2": [1.01], "s2 in turn": [1.0], "megatron": [2.0]}
    slow = {"baseline": [1.0], "s1": [1.0], "s2": [0.5], "s2 in turn": [0.5], "megatron": [0.4]}
    shapes = [
        {**row, "seconds": fast, "auto_of_s1_s2": "s2", "auto": "megatron"},
        {**row, "seconds": slow, "auto_of_s1_s2": "s1", "auto": "megatron"},
    ]
    text = schedule_table({"shapes": shapes})
    assert "s1 at least 1.5 times as fast as the baseline: 1 of 2 shapes" in text
    assert "s2 at least 1.5 times as fast as the baseline: 2 of 2 shapes" in text
    assert "auto of s1 and s2 within 2 % of the better one: 1 of 2 shapes" in text
    assert "or faster: 1 of 2 shapes" in text
    assert "s2 not slower than in turn: 1 of 2 shapes" in text
