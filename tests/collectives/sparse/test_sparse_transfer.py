import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_fssdp.collectives.sparse.sparse_transfer import SparseTransfer
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.transfer.message_size import FixedMessages, PipelinedMessages
from megatron_fssdp.planning.transfer.transfer_plan import two_level_transfer
from megatron_fssdp.testing import run_ranks
from tests.support.random_placement import plain_transfer, random_placement

RULES = (
    *(FixedMessages(num_bytes) for num_bytes in (1, 16, 64, 10_000)),
    PipelinedMessages(16, fewest=2, most=5),
)


def draw_case(rng, num_devices):
    """Placement, plan, rule of messages, elements, dtype; the same on every rank."""
    placement = random_placement(rng, int(rng.integers(1, 9)), num_devices)
    nodes = [n for n in (1, 2, 4) if num_devices % n == 0]
    topology = Topology.uniform(num_devices, int(rng.choice(nodes)))
    plan = two_level_transfer(placement, topology) if rng.random() < 0.7 else plain_transfer(placement)
    num_elements = int(rng.integers(1, 60))
    dtype = [torch.float32, torch.bfloat16, torch.float64, torch.float16][rng.integers(4)]
    messages = RULES[rng.integers(len(RULES))]
    return placement, plan, messages, num_elements, dtype


def drawn(seed, num_experts, num_elements, dtype):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_experts, num_elements, generator=generator, dtype=torch.float64).to(dtype)


def check_gather(case, transfer, placement, out):
    weights = drawn(1000 + case, placement.num_experts, transfer.num_elements, transfer.dtype)
    owned = {e: weights[e].clone() for e in transfer.shared_experts}
    storage = {e: torch.empty_like(weights[e]) for e in transfer.received_experts} if out else None
    replicas = transfer.start_all_gather(owned, out=storage).wait()
    here = placement.experts_on(transfer.rank)
    assert sorted(replicas) == [e for e in here if placement.owner_E[e] != transfer.rank]
    for e, replica in replicas.items():
        assert torch.equal(replica, weights[e])
        assert storage is None or replica is storage[e]


def check_reduction(case, transfer, placement, result_dtype):
    shape = (placement.num_experts, transfer.num_elements, transfer.dtype)
    held = (*transfer.shared_experts, *transfer.received_experts)
    own = drawn(7919 * case + transfer.rank, *shape)
    partial = {e: own[e].clone() for e in held}
    kind = {"dtype": result_dtype or transfer.dtype}
    sums, again = (
        transfer.start_reduce_scatter(
            partial, out={e: torch.empty(transfer.num_elements, **kind) for e in transfer.shared_experts}
        ).wait()
        for _ in range(2)
    )
    assert all(torch.equal(partial[e], own[e]) for e in held), "the summands were overwritten"
    assert tuple(sorted(sums)) == transfer.shared_experts
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
    for e, got in sums.items():
        assert got.dtype == (result_dtype or transfer.dtype)
        parts = [drawn(7919 * case + holder, *shape)[e].double() for holder in placement.holders(e)]
        wanted = torch.stack(parts).sum(0)
        scale = torch.stack(parts).abs().sum(0)
        limit = max(tolerance[transfer.dtype], tolerance[got.dtype])
        assert ((got.double() - wanted).abs() <= limit * scale + 1e-12).all()
        assert torch.equal(got, again[e])


def run_cases(rank, world_size, seed, num_cases, group_ranks=None):
    if group_ranks is None:
        groups, group_ranks = [dist.group.WORLD], [range(world_size)]
    else:
        groups = [dist.new_group(ranks) for ranks in group_ranks]
    rng = np.random.default_rng(seed)
    for case in range(num_cases):
        for group, ranks in zip(groups, group_ranks, strict=True):
            placement, plan, messages, num_elements, dtype = draw_case(rng, len(ranks))
            if rank not in ranks:
                continue
            transfer = SparseTransfer(group, plan, num_elements=num_elements, dtype=dtype, messages=messages)
            check_gather(case, transfer, placement, out=case % 2)
            check_reduction(case, transfer, placement, [None, torch.float32, torch.float64][case % 3])
    return True


@pytest.mark.parametrize(("world_size", "num_cases"), [(1, 5), (2, 30), (4, 40), (8, 20)])
def test_equals_dense_collectives_on_random_placements(world_size, num_cases):
    assert run_ranks(run_cases, world_size, world_size, num_cases) == [True] * world_size


def test_transfers_work_in_subgroups_whose_ranks_differ_from_the_worlds():
    assert run_ranks(run_cases, 4, 5, 20, [[1, 3], [0, 2], [1, 2, 3]]) == [True] * 4


def add_small_to_large(rank, world_size):
    placement = ExpertPlacement(np.array([0]), np.ones((1, world_size), dtype=bool))
    transfer = SparseTransfer(
        dist.group.WORLD,
        plain_transfer(placement),
        num_elements=3,
        dtype=torch.bfloat16,
        messages=FixedMessages(16),
    )
    part = torch.full((3,), 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16)
    into = {0: torch.empty(3, dtype=torch.float64)} if rank == 0 else {}
    sums = [
        transfer.start_reduce_scatter({0: part}).wait(),
        transfer.start_reduce_scatter({0: part}, out=into).wait(),
    ]
    return [(s[0].dtype, s[0].tolist()) for s in sums] if rank == 0 else sums


def test_half_precision_is_added_in_fp32_and_rounded_once():
    # In bf16, 256 + 1 is 256.
    owner, *others = run_ranks(add_small_to_large, 4)
    assert owner == [(torch.bfloat16, [260.0] * 3), (torch.float64, [259.0] * 3)]
    assert others == [[{}, {}]] * 3


def overlap_transfers(rank, world_size):
    """Start several transfers, wait for them in another order, and use another group meanwhile."""
    group = dist.new_group(list(range(world_size)))
    rng = np.random.default_rng(21)
    transfers, pending, weights = [], [], []
    for case in range(8):
        placement = random_placement(rng, 6, world_size)
        plan = two_level_transfer(placement, Topology.uniform(world_size, 2))
        transfer = SparseTransfer(
            group, plan, num_elements=5000, dtype=torch.float32, messages=FixedMessages(4096)
        )
        full = drawn(1000 + case, 6, 5000, torch.float32)
        transfers.append(transfer)
        weights.append(full)
        pending.append(transfer.start_all_gather({e: full[e] for e in transfer.shared_experts}))
        held = (*transfer.shared_experts, *transfer.received_experts)
        pending.append(transfer.start_reduce_scatter({e: torch.ones(5000) for e in held}))
        total = torch.ones(3)
        dist.all_reduce(total)
        assert total.eq(world_size).all()
    for case in reversed(range(8)):
        for e, total in pending[2 * case + 1].wait().items():
            num_holders = 1 + sum(edge.expert == e for edge in transfers[case].plan.edges)
            assert total.eq(num_holders).all()
        for e, replica in pending[2 * case].wait().items():
            assert torch.equal(replica, weights[case][e])
    return True


def test_transfers_run_in_the_background_in_the_order_of_their_start():
    assert run_ranks(overlap_transfers, 4) == [True] * 4
