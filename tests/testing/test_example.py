"""How a test of your own uses ``megatron_fssdp.testing``: a function at the top of a module runs on ranks."""

import torch
import torch.distributed as dist

from megatron_fssdp.testing import run_megatron_ranks, run_ranks


def sum_of_ranks(rank: int, world_size: int, start: int) -> int:
    total = torch.tensor(start + rank)
    dist.all_reduce(total)
    return int(total)


def expert_parallel_size(rank: int, world_size: int) -> int:
    from megatron.core import parallel_state

    return parallel_state.get_expert_model_parallel_world_size()


def test_ranks_communicate_over_gloo() -> None:
    assert run_ranks(sum_of_ranks, 4, 10) == [46] * 4


def test_ranks_have_megatrons_parallel_state() -> None:
    assert run_megatron_ranks(expert_parallel_size, 4, ep=2) == [2] * 4
