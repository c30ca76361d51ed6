from unittest import mock

import torch
import torch.distributed as dist

from devtools.virtual_cuda import EventKind, virtual_cuda
from devtools.virtual_cuda.nccl.backends import CoalescingBackend
from megatron_fssdp.collectives.link_probes import measure_links
from megatron_fssdp.collectives.messages import connect_pairs
from megatron_fssdp.collectives.sparse.sparse_transfer import SparseTransfer
from megatron_fssdp.planning.cost.cost_model import LinkCost
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.transfer.message_size import FixedMessages
from megatron_fssdp.planning.transfer.transfer_plan import TransferPlan
from tests.support.training_preload import on_plain_ranks


@on_plain_ranks(3)
def test_every_rank_sends_to_and_receives_from_every_other_rank_once():
    """In two calls."""
    group = dist.new_group()
    with virtual_cuda() as device:
        for _ in range(2):
            connect_pairs(group, torch.device("cuda", 0))
    assert [event.num_messages for event in device.events_of(EventKind.P2P_BATCH)] == [2 * 2]
    assert not device.findings


@on_plain_ranks(3)
def test_a_new_group_is_connected_by_idle_ranks_too():
    """Torch wants all ranks of a group in its first messages."""
    of_0_to_1 = TransferPlan(3, [[0, 0, 1, 0]])
    renewed, rank, numbers = CoalescingBackend(), dist.get_rank(), []
    with virtual_cuda() as device:
        kind = {"sizes": [4], "dtype": torch.float32, "device": "cuda", "messages": FixedMessages(16)}
        transfer = SparseTransfer(dist.new_group(), of_0_to_1, **kind)
        contents = {} if rank == 2 else {0: [torch.ones(4, device="cuda")]}

        def gather():
            transfer.start_all_gather(contents).wait()
            numbers.append(len(device.events_of(EventKind.P2P_BATCH)))

        gather()
        gather()
        with mock.patch.object(dist.ProcessGroup, "_get_backend", return_value=renewed):
            gather()
        with mock.patch("megatron_fssdp.collectives.link_probes._measure", return_value=LinkCost(0.0, 1.0)):
            measure_links(dist.new_group(), Topology((0, 0, 1)), torch.device("cuda", 0))
    assert numbers == ([1, 1, 2] if rank == 2 else [2, 3, 5])
    assert len(device.events_of(EventKind.P2P_BATCH)) == numbers[-1] + 1
    assert not device.findings
