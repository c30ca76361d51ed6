"""Passes in flight worked out by hand; `test_pipeline_schedules.py` compares with Megatron's schedules."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


@st.composite
def stages(draw):
    num_stages = draw(st.integers(1, 4))
    num_chunks = draw(st.integers(1, 3)) if num_stages > 1 else 1
    layers = tuple(draw(st.integers(0, 3)) for _ in range(num_chunks))
    group_size = draw(st.none() | st.integers(num_stages, 6))
    return PipelineStage(layers, num_stages, draw(st.integers(0, num_stages - 1)), group_size)


@given(stages(), st.integers(1, 12))
def test_layers_in_flight_keep_their_bounds(stage, num_micro_batches):
    most = stage.layers_in_flight(num_micro_batches)
    assert max(stage.layers_of_chunk) <= most <= num_micro_batches * stage.num_layers
    if len(stage.layers_of_chunk) == 1:
        num_passes = min(num_micro_batches, stage.num_stages - stage.stage)
        assert most == num_passes * stage.num_layers
        assert most <= stage.layers_in_flight(num_micro_batches + 1)
