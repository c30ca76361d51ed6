import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_fssdp.collectives.sparse.sparse_transfer import SparseTransfer
from megatron_fssdp.collectives.sparse_collectives import sparse_all_gather, sparse_reduce_scatter
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.transfer.transfer_plan import two_level_transfer
from megatron_fssdp.testing import run_ranks
from megatron_fssdp.testing.random_placement import random_placement


def make(rng, world_size, num_elements=7, placement=None):
    placement = placement or random_placement(rng, int(rng.integers(1, 9)), world_size)
    plan = two_level_transfer(placement, Topology.uniform(world_size, min(2, world_size)))
    transfer = SparseTransfer(
        dist.group.WORLD, plan, num_elements=num_elements, dtype=torch.float64, chunk_bytes=16
    )
    return placement, transfer


def rows(rank, seed, num_rows, num_elements=7):
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randn(num_rows, num_elements, generator=generator, dtype=torch.float64)


def check_duality(rank, world_size, num_cases):
    """<gather(x), y> = <x, reduce(y)> over all ranks, and each backward is the other's forward."""
    rng = np.random.default_rng(31)
    for case in range(num_cases):
        placement, transfer = make(rng, world_size)
        anchor = torch.ones(2, dtype=torch.float64, requires_grad=True)
        x = rows(rank, case, len(placement.owned_by(rank))).requires_grad_()
        y = rows(rank, case + 500, len(placement.experts_on(rank))).requires_grad_()
        anchor_out, gathered = sparse_all_gather(anchor, x, transfer, placement)
        anchor_out, reduced = sparse_reduce_scatter(anchor_out, y, transfer, placement)
        products = torch.stack([(gathered * y).sum(), (x * reduced).sum()]).detach()
        dist.all_reduce(products)
        torch.testing.assert_close(products[0], products[1])
        loss = (gathered * y.detach()).sum() + (reduced * x.detach()).sum() + (3 * anchor_out).sum()
        loss.backward()
        assert torch.equal(x.grad, reduced.detach())
        assert torch.equal(y.grad, gathered.detach())
        assert anchor.grad.eq(3).all()
    return True


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_duality(world_size):
    assert run_ranks(check_duality, world_size, 15) == [True] * world_size


def check_values(rank, world_size):
    """Device 0 owns all, 1 has a replica of expert 1 only, 2 has nothing, 3 has all."""
    present = np.array([[1, 0, 0, 1], [1, 1, 0, 1], [1, 0, 0, 1]], dtype=bool)
    placement, transfer = make(None, world_size, 3, ExpertPlacement(np.zeros(3, dtype=np.int64), present))
    owned = torch.arange(9.0, dtype=torch.float64).reshape(3, 3)[: 3 if rank == 0 else 0].requires_grad_()
    hidden = torch.ones(1, dtype=torch.float64, requires_grad=True)
    anchor, weights = sparse_all_gather(hidden, owned, transfer, placement)
    # Ranks without experts have no other way into the backward than the anchor.
    (anchor.sum() + ((rank + 1) * weights).sum()).backward()
    return weights.detach(), owned.grad


def test_values_and_ranks_without_experts_take_part():
    results = run_ranks(check_values, 4)
    full = torch.arange(9.0, dtype=torch.float64).reshape(3, 3)
    assert torch.equal(results[0][0], full)
    assert torch.equal(results[1][0], full[1:2])
    assert results[2][0].shape == (0, 3)
    assert torch.equal(results[3][0], full)
    wanted = torch.tensor([5.0, 7.0, 5.0], dtype=torch.float64)[:, None].expand(3, 3)
    assert torch.equal(results[0][1], wanted)
    assert all(r[1] is None or r[1].shape == (0, 3) for r in results[1:])


def check_detached_rows(rank, world_size):
    """Rows that need no gradient of their own: the anchor alone carries the backward on every rank."""
    placement, transfer = make(np.random.default_rng(5), world_size)
    x = rows(rank, 0, len(placement.owned_by(rank)))
    hidden = torch.ones(1, dtype=torch.float64, requires_grad=True)
    anchor, weights = sparse_all_gather(hidden, x, transfer, placement)
    assert weights.requires_grad
    (anchor.sum() * 2).backward()
    with pytest.raises(ValueError, match="owned_rows has shape"):
        sparse_all_gather(hidden, torch.ones(99, 7), transfer, placement)
    return hidden.grad.item()


def test_detached_rows():
    assert run_ranks(check_detached_rows, 2) == [2.0, 2.0]
