import pytest
import torch
import torch.distributed as dist

from megatron_fssdp.collectives.rows.uneven_all_gather import uneven_all_gather, uneven_reduce_scatter
from megatron_fssdp.testing import run_ranks

SPLITS = [[3, 0, 2], [0, 0, 1], [2, 2, 2], [0, 0, 0]]


def gather_and_reduce(rank, world_size):
    group = dist.group.WORLD
    for splits in SPLITS:
        for dtype in (torch.float32, torch.bfloat16):
            weight = torch.arange(1.0, sum(splits) + 1, dtype=dtype).unsqueeze(1)
            x = torch.full((splits[rank], 2), rank + 1.0, dtype=dtype, requires_grad=True)
            gathered = uneven_all_gather(x, splits, group)
            wanted = torch.tensor([r + 1.0 for r in range(world_size) for _ in range(splits[r])], dtype=dtype)
            assert torch.equal(gathered.detach(), wanted.unsqueeze(1).expand(-1, 2))
            # Every rank r weighs row i with (r + 1) i: the gradients are sums over the ranks.
            (gathered * weight * (rank + 1)).sum().backward()
            own = weight.split(splits)[rank]
            assert torch.equal(x.grad, (6 * own).expand(-1, 2))

            y = (weight * (rank + 1)).repeat(1, 2).requires_grad_()
            summed = uneven_reduce_scatter(y, splits, group)
            assert torch.equal(summed.detach(), (6 * own).expand(-1, 2))
            (summed * (rank + 1)).sum().backward()
            assert torch.equal(y.grad, wanted.unsqueeze(1).expand(-1, 2))
    return True


def test_all_gather_and_reduce_scatter_are_each_others_backward_pass():
    assert run_ranks(gather_and_reduce, 3) == [True] * 3


def misuse(rank, world_size):
    group = dist.group.WORLD
    with pytest.raises(ValueError, match="wanted 2 numbers"):
        uneven_all_gather(torch.ones(3, 2), [3], group)
    with pytest.raises(ValueError, match="wanted 1, the number in splits"):
        uneven_all_gather(torch.ones(3, 2), [1, 1], group)
    with pytest.raises(ValueError, match="the sum of the splits"):
        uneven_reduce_scatter(torch.ones(3, 2), [1, 1], group)
    return True


def test_splits_that_do_not_match_the_rows_are_refused():
    assert run_ranks(misuse, 2) == [True, True]
