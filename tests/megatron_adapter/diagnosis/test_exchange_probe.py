import pytest
import torch
import torch.distributed as dist

from megatron_fssdp.megatron_adapter.diagnosis.exchange_probe import prepare_exchange
from tests.support.training_preload import run_megatron_ranks


def exchanges(rank: int, world_size: int) -> list[tuple[int, dict[int, int]]]:
    return [exchange(num_near) for num_near in (0, 1)]


def exchange(num_near: int) -> tuple[int, dict[int, int]]:
    """The bytes that a call says it sends, and the elements of rows that each rank gets."""
    group, rows = dist.group.WORLD, {}
    call, sent_bytes = prepare_exchange(
        4000, group, torch.device("cpu"), num_near, model_dim=8, dtype=torch.float32
    )
    original = dist.all_to_all_single

    def counted(output, input, output_split_sizes=None, input_split_sizes=None, group=None, **more):
        if input.dim() == 2:
            for peer, number in enumerate(input_split_sizes):
                rows[peer] = rows.get(peer, 0) + int(number) * input.shape[1]
        return original(output, input, output_split_sizes, input_split_sizes, group, **more)

    dist.all_to_all_single = counted
    try:
        call()
    finally:
        dist.all_to_all_single = original
    return sent_bytes, rows


def test_every_rank_sends_the_stated_bytes_to_the_ranks_that_count():
    for rank, of_rank in enumerate(run_megatron_ranks(exchanges, 4)):
        for num_near, (sent_bytes, rows) in enumerate(of_rank):
            assert 4 * rows[(rank + 1) % 4] * (3 - num_near) == sent_bytes
            assert len(set(rows.values())) == 1
            assert sent_bytes == pytest.approx(4 * 4000, rel=0.1)
