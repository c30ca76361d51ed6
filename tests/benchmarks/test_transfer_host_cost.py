"""The benchmark of the host's time counts the batches that a transfer posts."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.host.transfer_host_cost import EXPERT_BYTES, plans, transfer_host_cost
from megatron_fssdp.planning.transfer.message_size import FixedMessages


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_transfer_between_gpus_posts_few_batches(group: dist.ProcessGroup) -> None:
    large = EXPERT_BYTES["Mixtral 8x7B"]
    for name, plan in plans(8).items():
        for is_gather in (True, False):
            cost = transfer_host_cost(group, plan, expert_bytes=large, is_gather=is_gather, repetitions=1)
            assert cost.num_batches <= 16 + plan.max_depth, name
            assert cost.host_s > 0
    one_hop = plans(8)["1 replica"]
    assert transfer_host_cost(group, one_hop, expert_bytes=large, repetitions=1).num_batches == 1
    before = transfer_host_cost(
        group, one_hop, expert_bytes=large, rule=FixedMessages(1 << 20), repetitions=1
    )
    assert before.num_batches == 336
