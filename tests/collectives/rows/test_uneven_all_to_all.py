import pytest
import torch
import torch.distributed as dist

from megatron_fssdp.collectives.rows.gathered_counts import gather_counts
from megatron_fssdp.collectives.rows.uneven_all_to_all import uneven_all_to_all
from megatron_fssdp.testing import run_ranks

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8]


def exchange(rank, world_size, group_ranks):
    groups = [dist.new_group(ranks) for ranks in group_ranks]
    group = next(g for g, ranks in zip(groups, group_ranks, strict=True) if rank in ranks)
    size, me = dist.get_world_size(group), dist.get_rank(group)
    generator = torch.Generator().manual_seed(1)
    for case in range(20):
        counts = torch.randint(0, 4, (size, size), generator=generator)
        if case % 4 == 0:
            counts[:, case % size] = 0  # one rank receives nothing
        if case % 5 == 0:
            counts.zero_()
        dtype, width = DTYPES[case % len(DTYPES)], (case % 3) + 1
        rows = torch.tensor(
            [(10 * me + d, i) for d in range(size) for i in range(counts[me, d])], dtype=torch.int64
        ).reshape(-1, 2)
        x = rows.sum(1, keepdim=True).repeat(1, width).to(dtype)
        x.requires_grad_(dtype.is_floating_point)
        beside = x.detach()[:, 0].to(torch.float32).requires_grad_(x.requires_grad)
        y, z = uneven_all_to_all((x, beside), counts[:, me].tolist(), counts[me].tolist(), group)
        wanted = torch.tensor([10 * s + me + i for s in range(size) for i in range(counts[s, me])])
        assert y.shape == (int(counts[:, me].sum()), width)
        assert torch.equal(y.detach()[:, 0].to(torch.int64), wanted.to(torch.int64))
        assert torch.equal(z.detach(), y.detach()[:, 0].to(torch.float32))
        if dtype.is_floating_point:
            ((y * (me + 1)).sum() + (z * (me + 2)).sum()).backward()
            wanted_grad = [d + 1 for d in range(size) for _ in range(counts[me, d])]
            assert x.grad[:, 0].tolist() == wanted_grad
            assert beside.grad.tolist() == [of_x + 1 for of_x in wanted_grad]
        gathered = gather_counts(counts[me], group)
        assert torch.equal(gathered, counts)
    return True


@pytest.mark.parametrize("group_ranks", [[[0], [1]], [[0, 1]], [[0, 2], [1, 3]], [[0, 1, 2, 3]]])
def test_both_passes_equal_a_reference(group_ranks):
    world_size = sum(map(len, group_ranks))
    assert run_ranks(exchange, world_size, group_ranks) == [True] * world_size


def misuse(rank, world_size):
    group = dist.group.WORLD
    x = torch.ones(3, 2)
    with pytest.raises(ValueError, match="wanted 2 of each"):
        uneven_all_to_all((x,), [3], [3], group)
    with pytest.raises(ValueError, match=r"do not fit tensors of \[3\] rows"):
        uneven_all_to_all((x,), [1, 1], [1, 1], group)
    with pytest.raises(ValueError, match="do not fit"):
        uneven_all_to_all((x,), [1, 1], [4, -1], group)
    return True


def test_splits_that_do_not_match_the_rows_are_refused():
    assert run_ranks(misuse, 2) == [True, True]
