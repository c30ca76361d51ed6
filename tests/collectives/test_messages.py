import torch
import torch.distributed as dist

from devtools.virtual_cuda import EventKind, virtual_cuda
from megatron_fssdp.collectives.messages import connect_pairs
from megatron_fssdp.testing import run_ranks


def connect(rank, world_size):
    """Messages of the batches of two calls, and findings."""
    group = dist.new_group()
    with virtual_cuda() as device:
        for _ in range(2):
            connect_pairs(group, torch.device("cuda", 0))
    batches = [event.num_messages for event in device.events_of(EventKind.P2P_BATCH)]
    return batches, [str(finding) for finding in device.findings]


def test_every_rank_sends_to_and_receives_from_every_other_rank_once():
    for batches, findings in run_ranks(connect, 3):
        assert batches == [2 * 2]
        assert findings == []
