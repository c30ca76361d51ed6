"""The accounted passes in flight equal those of Megatron's pipeline schedules."""

from types import SimpleNamespace

import pytest
from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table

from megatron_fssdp.planning.replica_life import PipelineStage

PIPELINES = [
    (num_stages, num_chunks, group_size)
    for num_stages in (1, 2, 3, 4)
    for num_chunks in (1, 2, 3)
    for group_size in (num_stages, num_stages + 1)
    if num_chunks == 1 or num_stages > 1
]


@pytest.mark.parametrize(("num_stages", "num_chunks", "group_size"), PIPELINES)
def test_layers_in_flight_equal_those_of_megatrons_schedule(num_stages, num_chunks, group_size):
    for stage in range(num_stages):
        for layers in ((2,) * num_chunks, (3, 1, 0)[:num_chunks], (0, 1, 3)[-num_chunks:]):
            for num_micro_batches in range(1, 13):
                place = PipelineStage(layers, num_stages, stage, group_size)
                wanted = most_waiting(place, num_micro_batches)
                assert place.layers_in_flight(num_micro_batches) == wanted, (place, num_micro_batches)


def most_waiting(place, num_micro_batches):
    """Step through a schedule as Megatron does: warm-up, forward and backward in turn, remaining passes."""
    num_chunks = len(place.layers_of_chunk)
    group = SimpleNamespace(size=lambda: place.num_stages, rank=lambda: place.stage)
    communicator = SimpleNamespace(
        pp_group=group, virtual_pipeline_model_parallel_size=num_chunks if num_chunks > 1 else None
    )
    total, _, num_first, num_in_turn = get_pp_rank_microbatches(
        num_micro_batches, num_chunks, place.group_size, p2p_communicator=communicator
    )
    chunks = [chunk for _, chunk in get_schedule_table(num_micro_batches, num_chunks, place.group_size)]
    waiting, seen = dict.fromkeys(range(num_chunks), 0), []

    def forward(number):
        waiting[chunks[number]] += 1
        seen.append(sum(num * place.layers_of_chunk[chunk] for chunk, num in waiting.items()))

    def backward(number):
        waiting[num_chunks - 1 - chunks[number]] -= 1
        assert min(waiting.values()) >= 0

    for number in range(num_first):
        forward(number)
    for number in range(num_in_turn):
        forward(num_first + number)
        backward(number)
    for number in range(num_in_turn, total):
        backward(number)
    assert not any(waiting.values())
    return max(seen)
