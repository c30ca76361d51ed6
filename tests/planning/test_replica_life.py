"""Passes in flight worked out by hand; `test_pipeline_schedules.py` compares with Megatron's schedules."""

import pytest

from megatron_fssdp.planning.replica_life import PipelineStage


@pytest.mark.parametrize(
    ("layers", "place", "num_micro_batches", "wanted"),
    [
        ((3,), {}, 8, 3),  # forward and backward in turn
        ((3,), {"num_stages": 4}, 8, 4 * 3),
        ((3,), {"num_stages": 4, "stage": 2}, 8, 2 * 3),
        ((3,), {"num_stages": 4, "stage": 3}, 8, 3),
        ((3,), {"num_stages": 4}, 2, 2 * 3),  # there are only two micro-batches
        # Two chunks in turn, stage 0: 0 0 1 1 first and two more, and one before the first backward pass.
        ((1, 1), {"num_stages": 2}, 8, 2 + 2 + 1),
        ((1, 1), {"num_stages": 2, "stage": 1}, 8, 2 + 1),
        ((1, 1), {"num_stages": 2, "group_size": 3}, 6, 2 + 3 + 1),
        ((1, 1), {"num_stages": 4}, 4, 8),  # all micro-batches of both chunks
        # 0 0 1 | 1, whose backward pass comes first: two passes of the first chunk, two of the second.
        ((0, 5), {"num_stages": 2, "stage": 1}, 2, 5),
        ((5, 0), {"num_stages": 2, "stage": 1}, 2, 10),
        ((0, 0), {"num_stages": 2}, 4, 0),
    ],
)
def test_layers_in_flight_equal_those_worked_out_by_hand(layers, place, num_micro_batches, wanted):
    assert PipelineStage(layers, **place).layers_in_flight(num_micro_batches) == wanted
