"""Seconds of one layer under Parm's schedules, worked out by hand."""

from typing import get_args

import pytest

from megatron_fssdp.planning.cost.cost_model import LinkCost
from megatron_fssdp.planning.cost.tensor_schedules import (
    SCHEDULES,
    Group,
    Kind,
    Schedule,
    ScheduleCosts,
    ScheduledLayer,
)
from megatron_fssdp.simulation.timeline.tensor_schedule_timeline import ScheduledSeconds, scheduled_seconds

LAYER = ScheduledLayer(num_tokens=8, hidden_size=16, num_rows=10, n_mp=2, n_esp=2, n_ep=2, element_bytes=4)
COSTS: ScheduleCosts = {
    (kind, group): LinkCost(1.0, 0.25) for kind in get_args(Kind) for group in get_args(Group)
}
FLOPS_PER_ROW, FLOPS_PER_S = 100.0, 50.0


@pytest.mark.parametrize(
    ("schedule", "sizes", "rows"),
    [
        # x = 8·16·4 = 512 bytes, rows 10·16·4 = 640, y = 1280.
        ("baseline", (1024, 1280, 1280, 1280), 20),
        ("s1", (640, 640, 512), 10),
        ("s2", (640, 640, 640), 10),
        ("megatron", (320, 640, 640, 320, 512), 10),
    ],
)
def test_both_passes_equal_those_worked_out_by_hand(
    schedule: Schedule, sizes: tuple[int, ...], rows: int
) -> None:
    found = scheduled_seconds(schedule, LAYER, COSTS, FLOPS_PER_ROW, FLOPS_PER_S)
    assert found.communication_s == pytest.approx(2 * sum(1 + size / 4 for size in sizes))
    assert found.compute_s == pytest.approx(3 * rows * 2)
    assert found.total_s == found.communication_s + found.compute_s
    assert found.communication_share == pytest.approx(found.communication_s / found.total_s)


def test_a_single_rank_only_computes() -> None:
    alone = ScheduledLayer(num_tokens=8, hidden_size=16, num_rows=10)
    for schedule in SCHEDULES:
        assert scheduled_seconds(schedule, alone, {}, FLOPS_PER_ROW, FLOPS_PER_S) == ScheduledSeconds(
            0.0, 60.0
        )
