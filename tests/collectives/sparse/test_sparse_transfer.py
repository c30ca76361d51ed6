import copy
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_fssdp.collectives.sparse.peer_memory import NO_PUTS, SharedMemory, WeightPuts
from megatron_fssdp.collectives.sparse.sparse_transfer import SparseTransfer
from megatron_fssdp.collectives.sparse.transfer_cargo import accumulation_dtype
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.transfer.message_size import FixedMessages, PipelinedMessages
from megatron_fssdp.planning.transfer.transfer_plan import two_level_transfer
from megatron_fssdp.testing import run_ranks
from tests.support.random_placement import plain_transfer, random_placement
from tests.support.training_preload import on_plain_ranks

RULES = (
    *(FixedMessages(num_bytes) for num_bytes in (1, 16, 64, 10_000)),
    PipelinedMessages(16, 8, most_bytes=64),
)


def draw_case(rng, num_devices):
    """Placement and arguments of the transfer; the same on every rank."""
    placement = random_placement(rng, int(rng.integers(1, 9)), num_devices)
    nodes = [n for n in (1, 2, 4) if num_devices % n == 0]
    topology = Topology.uniform(num_devices, int(rng.choice(nodes)))
    plan = two_level_transfer(placement, topology) if rng.random() < 0.7 else plain_transfer(placement)
    sizes = [int(size) for size in rng.integers(0, 30, rng.integers(1, 5))]
    begin, end = sorted(int(place) for place in rng.integers(0, sum(sizes) + 1, 2))
    return placement, {
        "plan": plan,
        "sizes": sizes,
        "elements": range(begin, end) if rng.random() < 0.3 else None,
        "dtype": [torch.float32, torch.bfloat16, torch.float64, torch.float16][rng.integers(4)],
        "messages": RULES[rng.integers(len(RULES))],
        "is_far": plan.crosses_nodes(topology),
    }


def drawn(seed, num_experts, num_elements, dtype):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_experts, num_elements, generator=generator, dtype=torch.float64).to(dtype)


def parts_of(flat, sizes):
    """Tensors that do not lie together, as an owner's Parameters."""
    return [part.clone() for part in flat.split(sizes)]


def node_memory(world_size):
    """Memory that this rank's node shares, and the node's devices, with one node and with two."""
    memory = []
    for num_nodes in range(1, 1 + min(world_size, 2)):
        for node in Topology.uniform(world_size, num_nodes).devices_by_node:
            group = dist.new_group(list(node))
            if dist.get_rank() in node:
                shared = SharedMemory(group, (8, 120), timedelta(minutes=10), torch.float64)
                memory.append((shared, list(node)))
    return memory


def puts_of(memory, devices, transfer, placement):
    """Puts into the first elements of slots that all transfers use, and this rank's slots."""
    narrow, num_elements = copy.copy(memory), sum(transfer.sizes)
    narrow.of_rank = [slots.view(transfer.dtype)[:, :num_elements] for slots in memory.of_rank]
    slot_of = {}
    for device in devices:
        replicas = [e for e in placement.experts_on(device) if placement.owner_E[e] != device]
        slot_of |= {(device, expert): slot for slot, expert in enumerate(replicas)}
    peers = {device: at for at, device in enumerate(devices) if device != transfer.rank}
    own = narrow.of_rank[devices.index(transfer.rank)]
    held = {e: own[slot_of[transfer.rank, e]] for e in transfer.received_experts}
    return WeightPuts(narrow, peers, slot_of), held


def check_gather(case, transfer, placement, memory=None):
    """Messages alone, or puts inside nodes of the ranks that share ``memory``."""
    weights = drawn(1000 + case, placement.num_experts, sum(transfer.sizes), transfer.dtype)
    owned = {e: parts_of(weights[e], transfer.sizes) for e in transfer.shared_experts}
    here = placement.experts_on(transfer.rank)
    assert [*transfer.received_experts] == [e for e in here if placement.owner_E[e] != transfer.rank]
    replicas, puts = {e: torch.empty_like(weights[e]) for e in transfer.received_experts}, NO_PUTS
    if memory is not None:
        puts, replicas = puts_of(*memory, transfer, placement)
    for replica in replicas.values():
        replica.fill_(-1.0)
    received = {e: flat.split(transfer.sizes) for e, flat in replicas.items()}
    transfer.start_all_gather({**owned, **received}, puts).wait()
    for e, replica in replicas.items():
        travels = torch.zeros_like(replica, dtype=torch.bool)
        travels[transfer.elements.start : transfer.elements.stop] = True
        assert torch.equal(replica, torch.where(travels, weights[e], -1.0))


def check_reduction(case, transfer, placement, total_dtype, rng):
    num_elements, travels = sum(transfer.sizes), slice(transfer.elements.start, transfer.elements.stop)
    held = (*transfer.shared_experts, *transfer.received_experts)
    own = drawn(7919 * case + transfer.rank, placement.num_experts, num_elements, transfer.dtype)
    wide = accumulation_dtype(transfer.dtype)
    # Sums are in the messages' dtype, or in the wide one and rounded when they are sent.
    partial = {e: own[e].to(wide if case % 2 else transfer.dtype) for e in held}
    border = int(rng.integers(0, num_elements + 1))
    results = []
    for _ in range(2):
        totals = {e: partial[e].to(total_dtype or transfer.dtype, copy=True) for e in transfer.shared_experts}
        parts = {e: parts_of(partial[e], transfer.sizes) for e in transfer.received_experts}
        into = {e: [total[:border], total[border:]] for e, total in totals.items()}
        transfer.start_reduce_scatter(parts, into).wait()
        assert all(torch.equal(torch.cat(parts[e]), partial[e]) for e in parts), "summands were overwritten"
        results.append(totals)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
    for e, got in results[0].items():
        parts = [
            drawn(7919 * case + holder, placement.num_experts, num_elements, transfer.dtype)[e].double()
            for holder in placement.holders(e)
        ]
        wanted, scale = partial[e].double(), torch.stack(parts).abs().sum(0)
        wanted[travels] = torch.stack(parts).sum(0)[travels]
        limit = max(tolerance[transfer.dtype], tolerance[got.dtype])
        assert ((got.double() - wanted).abs() <= limit * scale + 1e-12).all()
        assert torch.equal(got, results[1][e])


def run_cases(rank, world_size, seed, num_cases, group_ranks=None):
    if group_ranks is None:
        groups, group_ranks = [dist.group.WORLD], [range(world_size)]
        memory = node_memory(world_size)
    else:
        groups = [dist.new_group(ranks) for ranks in group_ranks]
        memory = []
    rng, num_put, num_sent = np.random.default_rng(seed), 0, 0
    for case in range(num_cases):
        for group, ranks in zip(groups, group_ranks, strict=True):
            placement, words = draw_case(rng, len(ranks))
            if rank not in ranks:
                continue
            transfer = SparseTransfer(group, **words)
            check_gather(case, transfer, placement)
            if memory:
                check_gather(case, transfer, placement, shared := memory[case % len(memory)])
                incoming, _ = transfer.plan.edges_of(rank)
                num_put += sum(edge.source in shared[1] for edge in incoming)
                num_sent += sum(edge.source not in shared[1] for edge in incoming)
            total_dtype = [None, torch.float32, torch.float64][case % 3]
            check_reduction(case, transfer, placement, total_dtype, np.random.default_rng(case))
    return num_put, num_sent


@pytest.mark.parametrize(("world_size", "num_cases"), [(1, 5), (2, 20), (4, 30), (8, 8)])
def test_equals_dense_collectives_on_random_placements(world_size, num_cases):
    num_put, num_sent = np.sum(run_ranks(run_cases, world_size, world_size, num_cases), axis=0)
    assert world_size == 1 or min(num_put, num_sent) > world_size


def test_transfers_work_in_subgroups_whose_ranks_differ_from_the_worlds():
    run_ranks(run_cases, 4, 5, 10, [[1, 3], [0, 2], [1, 2, 3]])


@on_plain_ranks(5)
def test_half_precision_is_added_in_fp32_and_rounded_once_and_meta_tensors_drop_sums():
    """In bf16, 256 + 1 is 256, and 260 has a number."""
    rank, placement = dist.get_rank(), ExpertPlacement(np.array([0]), np.ones((1, 5), dtype=bool))
    transfer = SparseTransfer(
        dist.group.WORLD,
        plain_transfer(placement),
        sizes=[3],
        dtype=torch.bfloat16,
        messages=FixedMessages(16),
    )
    part = torch.ones(3, dtype=torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float64):
        total = torch.full((3,), 256.0, dtype=dtype)
        totals = {0: [total[:1], torch.empty(1, device="meta"), total[2:]]}
        transfer.start_reduce_scatter({} if rank == 0 else {0: [part]}, totals if rank == 0 else {}).wait()
        assert rank or total.tolist() == [260.0, 256.0, 260.0]
