"""Measures the host's time for each batch of messages of a transfer, as it is posted between GPUs.

    python -m benchmarks.host.transfer_host_cost

No GPU is needed. A fake process group takes the messages, so the benchmark measures what Python and torch's
distributed package do for a batch: divide, check and pass on the messages. NCCL's own launch, which comes on
top, and the events and streams of a device are not in it. Times are CPU times of the process, so that other
programs on the machine do not count.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from megatron_fssdp.collectives.messages import Poster, Posting
from megatron_fssdp.collectives.sparse.sparse_transfer import SparseTransfer
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.transfer.message_size import (
    CUDA_MESSAGES,
    FixedMessages,
    MessageRule,
    gather_stages,
    reduction_stages,
)
from megatron_fssdp.planning.transfer.transfer_plan import TransferPlan, two_level_transfer
from tests.support.random_placement import plain_transfer

EXPERT_BYTES = {
    "2048 x 1408, gated": 2 * 3 * 2048 * 1408,
    "Mixtral 8x7B": 2 * 3 * 4096 * 14336,
}
"""Bytes of one expert in bf16. The first one is an expert of DeepSeekMoE 16B."""

SMALL_ELEMENTS = 64
"""Number of elements of a message here. The host's time does not depend on it."""


@dataclass(frozen=True)
class TransferHostCost:
    """The host's work for one transfer.

    Attributes:
        is_gather: Whether it is a SparseAllGather; otherwise it is a SparseReduceScatter.
        num_hops: Hops of the plan's longest path.
        num_messages: Number of messages of an expert.
        num_batches: Number of batches that this rank posts.
        host_s_per_batch: Seconds of the host for one batch.
    """

    is_gather: bool
    num_hops: int
    num_messages: int
    num_batches: int
    host_s_per_batch: float

    @property
    def host_s(self) -> float:
        """Seconds of the host for the whole transfer."""
        return self.num_batches * self.host_s_per_batch


class _CountedBatches(Poster):
    """Batches that are counted."""

    def __init__(self) -> None:
        super().__init__(in_batches=True, lookahead=0)
        self.number = 0

    def post(self, messages: Sequence[Posting], group: dist.ProcessGroup) -> list[dist.Work]:
        """Count a batch and start it."""
        self.number += bool(messages)
        return super().post(messages, group)


def transfer_host_cost(
    group: dist.ProcessGroup,
    plan: TransferPlan,
    *,
    expert_bytes: int,
    is_gather: bool = True,
    rule: MessageRule = CUDA_MESSAGES,
    repetitions: int = 20,
) -> TransferHostCost:
    """Measure the host's time of one transfer on this rank.

    Args:
        group: Process group whose messages need no partner, such as torch's fake one.
        plan: Edges along which experts travel.
        expert_bytes: Bytes of one expert, which determine the number of messages.
        is_gather: Whether to measure SparseAllGather; otherwise it is SparseReduceScatter.
        rule: How an expert is divided into messages.
        repetitions: Number of transfers; the median counts.
    """
    num_hops = plan.max_depth + 1
    stages = gather_stages(num_hops) if is_gather else reduction_stages(num_hops)
    num_messages = -(-expert_bytes // rule.message_bytes(expert_bytes, stages))
    num_elements = num_messages * SMALL_ELEMENTS
    batches = _CountedBatches()
    transfer = SparseTransfer(
        group,
        plan,
        num_elements=num_elements,
        dtype=torch.bfloat16,
        messages=FixedMessages(SMALL_ELEMENTS * torch.bfloat16.itemsize),
        poster=batches,
    )
    owned = {e: torch.zeros(num_elements, dtype=torch.bfloat16) for e in transfer.shared_experts}
    replicas = {e: torch.zeros(num_elements, dtype=torch.bfloat16) for e in transfer.received_experts}
    seconds = []
    for _ in range(repetitions + 1):  # The first one warms up.
        batches.number = 0
        begin_s = time.process_time()
        if is_gather:
            transfer.start_all_gather(owned, out=replicas).wait()
        else:
            transfer.start_reduce_scatter(replicas, dtype=torch.bfloat16).wait()
        seconds.append(time.process_time() - begin_s)
    per_batch_s = statistics.median(seconds[1:]) / max(1, batches.number)
    return TransferHostCost(is_gather, num_hops, num_messages, batches.number, per_batch_s)


def plans(num_devices: int) -> dict[str, TransferPlan]:
    """Plans in which device 0 owns one expert and sends it on, over one hop and over several.

    Args:
        num_devices: Number of devices, at least 4.
    """
    holders = np.zeros((1, num_devices), bool)
    holders[0, [0, num_devices // 2]] = True
    everywhere = ExpertPlacement(np.zeros(1, np.int64), np.ones((1, num_devices), bool))
    nodes = Topology.uniform(num_devices, 2)
    return {
        "1 replica": plain_transfer(ExpertPlacement(np.zeros(1, np.int64), holders)),
        "all devices": two_level_transfer(everywhere, nodes),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table of all transfers, with today's messages and with messages of 1 MiB."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=8, help="number of devices of the group")
    options = parser.parse_args(arguments)
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=options.devices)
    try:
        print("| expert | replicas | transfer | messages | batches | host, µs per batch | host, ms |")
        print("|---|---|---|---|---|---|---|")
        for expert, expert_bytes in EXPERT_BYTES.items():
            for name, plan in plans(options.devices).items():
                for is_gather in (True, False):
                    for rule in (CUDA_MESSAGES, FixedMessages(1 << 20)):
                        cost = transfer_host_cost(
                            dist.group.WORLD, plan, expert_bytes=expert_bytes, is_gather=is_gather, rule=rule
                        )
                        kind = "spAG" if is_gather else "spRS"
                        of_rule = "" if rule is CUDA_MESSAGES else " of 1 MiB"
                        print(
                            f"| {expert} | {name} | {kind} | {cost.num_messages}{of_rule} | "
                            f"{cost.num_batches} | {cost.host_s_per_batch * 1e6:.0f} | "
                            f"{cost.host_s * 1e3:.2f} |"
                        )
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
