"""The rule by which a transfer divides an expert into messages; the runtime and all prices follow it.

A transfer of B bytes in n messages takes s stages: the hops of its longest path, one after the other, and
under SparseReduceScatter the addition at the owner. While a stage works on one message, the stage before it
works on the next one. With a fixed cost of a seconds for each batch of messages and b seconds per byte, the
transfer takes

    (n + s - 1) · (a + b · B / n)        shortest for        n² = (s - 1) · B · b / a

One stage has nothing to wait for, so one message is best. With several stages, their number grows with the
root of the bytes. ``a / b`` is the number of bytes that travel in the time of a batch's fixed cost.
"""

import math
from dataclasses import dataclass

ALIGNMENT_BYTES = 16
"""Messages begin at multiples of this number of bytes, which is what vectorized copies need."""


@dataclass(frozen=True)
class FixedMessages:
    """Messages of at most ``num_bytes``, whatever the size of an expert and the number of stages.

    A receiving device keeps at most ``num_open`` messages of one sender, which come early. The host takes
    ``batch_host_s`` for each batch of messages, and ``step_host_s`` for each step of the smart schedule.
    """

    num_bytes: int
    num_open: int = 1
    batch_host_s: float = 0.0
    step_host_s: float = 0.0

    def message_bytes(self, expert_bytes: int, num_stages: int) -> int:
        """Bytes of a message of an expert or of its gradient: the fixed size, or all if they are fewer."""
        return min(expert_bytes, self.num_bytes)

    def buffered_bytes(self, gradient_bytes: int) -> int:
        """Most bytes that a device keeps for the messages of one sender in SparseReduceScatter."""
        return min(gradient_bytes, self.num_open * self.num_bytes)


@dataclass(frozen=True)
class PipelinedMessages:
    """One message for one stage, otherwise as many as make the pipeline shortest.

    They are ``fewest`` to ``most`` of at least ``least_bytes``, which travel in the time of a batch's fixed
    cost.
    """

    least_bytes: int
    fewest: int
    most: int
    num_open: int = 2
    batch_host_s: float = 0.0
    step_host_s: float = 0.0

    def message_bytes(self, expert_bytes: int, num_stages: int) -> int:
        """Bytes of a message of an expert, or of its gradient, in a transfer with so many stages."""
        if num_stages <= 1:
            return expert_bytes
        wanted = math.ceil(math.sqrt((num_stages - 1) * expert_bytes / self.least_bytes))
        number = min(max(wanted, self.fewest), self.most, max(1, expert_bytes // self.least_bytes))
        each = -(-expert_bytes // number)
        return min(expert_bytes, -(-each // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)

    def buffered_bytes(self, gradient_bytes: int) -> int:
        """Most bytes that a device keeps for the messages of one sender in SparseReduceScatter."""
        # A reduction over one hop has two stages, the fewest of all reductions and so the largest messages.
        return min(gradient_bytes, self.num_open * self.message_bytes(gradient_bytes, 2))


MessageRule = FixedMessages | PipelinedMessages

HOST_MESSAGES = FixedMessages(1 << 17, num_open=6, step_host_s=1.7e-3)
"""Between CPUs: 128 KiB, small enough that node leaders forward the first message early.

This was the best of 32 to 256 KiB for experts of 2 to 16 MiB (docs/decisions.md). Receives are posted four
steps early, and the messages of one more step are added meanwhile. A link's measured bandwidth contains the
host's time for messages. Steps of the smart schedule wait for each other: on the testbed (8 ranks on 2
cores), 4 steps took 5.8 ms (rows) and 7.7 ms (results) longer than their bytes and start-ups.
"""

CUDA_MESSAGES = PipelinedMessages(1 << 20, fewest=8, most=16, batch_host_s=30e-6)
"""Between CUDA devices: the whole expert over one hop, 8 to 16 messages where stages pipeline.

No GPU has measured these numbers. The host is assumed to take 30 µs for a batch of NCCL messages, in which a
link of 35 GB/s carries 1 MiB, and no time for a step, because the host runs ahead of the stream.
"""


def message_rule(*, on_cuda: bool) -> MessageRule:
    """The rule for transfers between CUDA devices, or between CPUs."""
    return CUDA_MESSAGES if on_cuda else HOST_MESSAGES


def num_stages(num_hops: int, *, adds: bool) -> int:
    """Number of stages of a transfer: the hops of its longest path, then SparseReduceScatter's addition."""
    return num_hops + adds


def num_batches(expert_bytes: int, message_bytes: int, num_hops: int) -> int:
    """Number of batches of messages that a rank posts, one after the other, for a path of ``num_hops``."""
    return -(-expert_bytes // message_bytes) + num_hops - 1
