"""Transfers on a virtual CUDA device: how many batches are issued where, and no races."""

from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fssdp.collectives.sparse.sparse_transfer import SparseTransfer
from megatron_fssdp.collectives.transfer_lanes import PendingTransfer, advance_transfers
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.transfer.message_size import PipelinedMessages
from megatron_fssdp.planning.transfer.transfer_plan import TransferPlan, two_level_transfer
from megatron_fssdp.testing import run_ranks
from tests.support.random_placement import plain_transfer
from tests.support.virtual_cuda import EventKind, VirtualDevice, virtual_cuda

WORLD = 4
ELEMENTS = 1024
RULE = PipelinedMessages(16, fewest=8, most=16)
NUM_MESSAGES = 16  # of a pipelined transfer of ELEMENTS in fp32, by this rule
Outcome = tuple[dict[str, list[list[int]]], list[str], float, int]


def plans() -> dict[str, TransferPlan]:
    """Expert 0 goes to all devices, over one hop or over a chain of three; expert 1 goes to device 0."""
    present_ED = np.array([[True] * WORLD, [True, True, False, False]])
    placement = ExpertPlacement(np.array([0, 1]), present_ED)
    return {
        "one hop": plain_transfer(placement),
        "chain": two_level_transfer(placement, Topology.uniform(WORLD, WORLD)),
    }


def transfer_on_devices(rank: int, world_size: int) -> list[Outcome]:
    """Outcomes on a device with many queues, and on a device with one."""
    group = dist.new_group()
    return [_transfer(group, one_queue) for one_queue in (False, True)]


def _transfer(group: dist.ProcessGroup, one_queue: bool) -> Outcome:
    """Batches after the start, after each of four points and after the wait, by plan and direction."""
    issued: dict[str, list[list[int]]] = {}
    worst = 0.0
    with virtual_cuda() as device:
        for name, plan in plans().items():
            transfer = SparseTransfer(
                group,
                plan,
                num_elements=ELEMENTS,
                dtype=torch.float32,
                device=device.device,
                messages=RULE,
                one_queue=one_queue,
            )
            owned = {expert: _filled(expert + 1) for expert in transfer.shared_experts}
            replicas, issued[f"{name}, spAG"] = _counted(
                device, lambda transfer=transfer, owned=owned: transfer.start_all_gather(owned), group
            )
            for expert, replica in replicas.items():
                worst = max(worst, float((replica - (expert + 1)).abs().max()))
            sums, issued[f"{name}, spRS"] = _counted(
                device, lambda transfer=transfer, held=replicas: transfer.start_reduce_scatter(held), group
            )
            for expert, total in sums.items():
                num_replicas = sum(edge.expert == expert for edge in plan.edges)
                worst = max(worst, float((total - (expert + 1) * num_replicas).abs().max()))
        num_streams = device.counts["stream made"]
    return issued, [str(finding) for finding in device.findings], worst, num_streams


def _filled(value: float) -> Tensor:
    return torch.full((ELEMENTS,), float(value), device="cuda")


def _counted(
    device: VirtualDevice, start: Callable[[], PendingTransfer], group: dist.ProcessGroup
) -> tuple[dict[int, Tensor], list[int]]:
    before = _num_batches(device)
    pending = start()
    batches = [_num_batches(device) - before]
    for _ in range(4):
        advance_transfers(group)
        batches.append(_num_batches(device) - before)
    results = pending.wait()
    batches.append(_num_batches(device) - before)
    return results, batches


def _num_batches(device: VirtualDevice) -> int:
    return len(device.events_of(EventKind.P2P_BATCH))


def test_batches_are_issued_at_their_points_without_races() -> None:
    results = run_ranks(transfer_on_devices, WORLD, timeout_s=120)
    outcomes = [
        (rank, number == 1, outcome)
        for rank, both in enumerate(results)
        for number, outcome in enumerate(both)
    ]
    for rank, one_queue, (issued, findings, worst, num_streams) in outcomes:
        assert findings == []
        assert worst == 0.0
        for name, batches in issued.items():
            assert batches[-1] <= 16 + 2, name
            if not one_queue:
                assert len(set(batches)) == 1, "everything is issued at the start"
        assert num_streams <= 2, "one stream for all transfers of a group, and NCCL's"
        owner = rank == 0
        if one_queue and owner:
            assert issued["one hop, spAG"] == [1] * 6
            # One hop: a batch at each point. The sums of the eight messages pipeline with the messages.
            assert issued["one hop, spRS"] == [1, 2, 3, 4, 5, NUM_MESSAGES]
            # A chain of three hops: three steps at each point; device 0 takes part in the first 16 of 18.
            assert issued["chain, spAG"] == [3, 6, 9, 12, 15, NUM_MESSAGES]
