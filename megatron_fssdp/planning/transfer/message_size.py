"""The rule by which a transfer divides an expert into messages; the runtime and all prices follow it.

A transfer of B bytes over h hops in n messages takes, if each batch of messages has a start-up of a seconds
and a link needs b seconds per byte,

    (n + h - 1) · (a + b · B / n)        shortest for        n² = (h - 1) · B · b / a

While a hop carries one message, the hop before it carries the next one. A received part of a gradient is
added while the next message travels. ``a / b`` is the number of bytes that travel in the time of a start-up.
"""

import math
from dataclasses import dataclass

ALIGNMENT_BYTES = 16
"""Messages begin at multiples of this number of bytes, which is what vectorized copies need."""

NEARLY = 1.1
"""Fewer messages are better, for the host, if the transfer takes at most this many times as long."""


@dataclass(frozen=True)
class FixedMessages:
    """Messages of at most ``num_bytes``, whatever the size of an expert and the number of hops.

    A receiving device keeps at most ``num_open`` messages of one sender, which come early. The host takes
    ``batch_host_s`` for each batch of messages, and ``step_host_s`` for each step of the smart schedule.
    """

    num_bytes: int
    num_open: int = 1
    batch_host_s: float = 0.0
    step_host_s: float = 0.0

    def message_bytes(self, expert_bytes: int, num_hops: int, *, is_far: bool, num_received: int = 0) -> int:
        """Bytes of a message of an expert or of its gradient: the fixed size, or all if they are fewer."""
        return min(expert_bytes, self.num_bytes)

    def buffered_bytes(self, gradient_bytes: int, num_received: int) -> int:
        """Most bytes that a device keeps of so many gradients that it receives in SparseReduceScatter."""
        return num_received * min(gradient_bytes, self.num_open * self.num_bytes)


@dataclass(frozen=True)
class PipelinedMessages:
    """The fewest messages with which the pipeline of hops is nearly as short as with any number.

    ``near_bytes`` and ``far_bytes`` travel in the time of a start-up, over the slowest link of a plan inside
    a node and of a plan between nodes. The messages that a device receives together into buffers have at
    most ``most_bytes``.
    """

    near_bytes: float
    far_bytes: float
    most_bytes: int = 48 << 20
    batch_host_s: float = 0.0
    step_host_s: float = 0.0

    def message_bytes(self, expert_bytes: int, num_hops: int, *, is_far: bool, num_received: int = 0) -> int:
        """Bytes of a message of an expert, or of its gradient, in a transfer over so many hops.

        ``is_far`` says whether any of the plan's hops is between nodes, and ``num_received`` how many
        gradients the device that receives the most has to buffer.
        """
        more = max(num_hops - 1, 0)
        starts = expert_bytes / (self.far_bytes if is_far else self.near_bytes)
        best = max(1, int(math.sqrt(more * starts)))
        shortest = min((n + more) * (1 + starts / n) for n in (best, best + 1))
        # The smaller n that solves (n + more)(1 + starts / n) = NEARLY · shortest.
        half = (NEARLY * shortest - starts - more) / 2
        fewest = math.ceil(half - math.sqrt(max(half * half - more * starts, 0.0)))
        fewest = max(1, fewest, -(-num_received * expert_bytes // self.most_bytes))
        part_bytes = -(-expert_bytes // fewest)
        return min(expert_bytes, -(-part_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)

    def buffered_bytes(self, gradient_bytes: int, num_received: int) -> int:
        """Most bytes that a device keeps of so many gradients that it receives in SparseReduceScatter."""
        return min(num_received * gradient_bytes, self.most_bytes + num_received * ALIGNMENT_BYTES)


MessageRule = FixedMessages | PipelinedMessages

HOST_MESSAGES = FixedMessages(1 << 17, num_open=6, step_host_s=1.7e-3)
"""Between CPUs: 128 KiB, small enough that node leaders forward the first message early.

This was the best of 32 to 256 KiB for experts of 2 to 16 MiB. Receives are posted four
steps early, and the messages of one more step are added meanwhile. A link's measured bandwidth contains the
host's time for messages. Steps of the smart schedule wait for each other: on the testbed (8 ranks on 2
cores), 4 steps took 5.8 ms (rows) and 7.7 ms (results) longer than their bytes and start-ups.
"""

BATCH_HOST_S = 30e-6
"""Seconds in which the host is assumed to post a batch of NCCL messages, the least start-up of a batch."""

CUDA_MESSAGES = PipelinedMessages(BATCH_HOST_S * 200e9, BATCH_HOST_S * 50e9, batch_host_s=BATCH_HOST_S)
"""Between CUDA devices whose links are not measured: 200 GB/s inside a node, and 400 Gb/s between nodes.

These are assumptions. The host needs no time for a step, because it runs ahead of the stream.
"""


def message_rule(*, on_cuda: bool) -> MessageRule:
    """The rule for transfers between CUDA devices, or between CPUs, before links are measured."""
    return CUDA_MESSAGES if on_cuda else HOST_MESSAGES


def num_batches(expert_bytes: int, message_bytes: int, num_hops: int) -> int:
    """Number of batches of messages that a rank posts, one after the other, for a path of ``num_hops``."""
    return -(-expert_bytes // message_bytes) + num_hops - 1 if expert_bytes else 0
