import torch
import torch.distributed as dist

from devtools.virtual_cuda import EventKind, virtual_cuda
from megatron_fssdp.collectives.messages import connect_pairs
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
