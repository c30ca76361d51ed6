"""The order in which one device sends and receives the chunks of a transfer plan.

The module is pure data: it says which message belongs to which step. In step ``t``, an edge of depth ``k``
carries chunk ``t - k`` of its expert. A device therefore passes a chunk on in the step after its arrival, and
all levels of a tree work at the same time. For three chunks and the tree 0 → 4 → {5, 6}::

    step                       0        1        2        3
    edge 0 → 4   (depth 0)     chunk 0  chunk 1  chunk 2
    edge 4 → 5   (depth 1)              chunk 0  chunk 1  chunk 2
    edge 4 → 6   (depth 1)              chunk 0  chunk 1  chunk 2

The reduction is the mirror image: an edge of depth ``k`` in a plan of depth ``K`` carries chunk
``t - (K - k)``::

    step                       0        1        2        3
    edge 5 → 4   (depth 1)     chunk 0  chunk 1  chunk 2
    edge 6 → 4   (depth 1)     chunk 0  chunk 1  chunk 2
    edge 4 → 0   (depth 0)              chunk 0  chunk 1  chunk 2
"""

from dataclasses import dataclass
from typing import NamedTuple

from megatron_fssdp.planning.transfer.transfer_plan import TransferPlan


class Message(NamedTuple):
    """One chunk of one expert that a device sends to or receives from a peer.

    Attributes:
        peer: Rank of the other device in the group.
        expert: Number of the expert.
        chunk: Number of the chunk within the expert.
    """

    peer: int
    expert: int
    chunk: int


class Step(NamedTuple):
    """Messages that a device posts together; any two devices list their common messages in the same order.

    Attributes:
        sends: Messages that the device sends.
        receives: Messages that the device receives.
    """

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


_Routes = tuple[tuple[int, int, int], ...]
"""For edges of the plan: step in which the edge carries chunk 0, device at the other end, expert."""


@dataclass(frozen=True)
class Wavefront:
    """All steps of one device in one direction of a transfer.

    Attributes:
        num_steps: Number of steps, equal on all devices; some can be empty on this device.
        num_chunks: Number of chunks in an expert.
        send_routes: Edges along which this device sends.
        receive_routes: Edges along which this device receives.
    """

    num_steps: int
    num_chunks: int
    send_routes: _Routes
    receive_routes: _Routes

    @classmethod
    def of_gather(cls, plan: TransferPlan, device: int, num_chunks: int) -> "Wavefront":
        """The steps of ``device`` in SparseAllGather, from the owners to the replicas."""
        incoming, outgoing = plan.edges_of(device)
        sends = tuple((edge.depth, edge.destination, edge.expert) for edge in outgoing)
        receives = tuple((edge.depth, edge.source, edge.expert) for edge in incoming)
        return cls(num_chunks + plan.max_depth if num_chunks else 0, num_chunks, sends, receives)

    @classmethod
    def of_reduction(cls, plan: TransferPlan, device: int, num_chunks: int) -> "Wavefront":
        """The steps of ``device`` in SparseReduceScatter: the same edges, from the replicas to the owners."""
        gather = cls.of_gather(plan, device, num_chunks)
        receives, sends = (
            tuple((plan.max_depth - depth, peer, expert) for depth, peer, expert in routes)
            for routes in (gather.send_routes, gather.receive_routes)
        )
        return cls(gather.num_steps, num_chunks, sends, receives)

    @property
    def idle(self) -> bool:
        """Whether this device has nothing to send or receive."""
        return not self.num_chunks or not (self.send_routes or self.receive_routes)

    def step(self, t: int) -> Step:
        """The messages of step ``t``; no messages if ``t`` is outside the range of steps."""
        if not 0 <= t < self.num_steps:
            return Step((), ())
        return Step(self._messages(self.send_routes, t), self._messages(self.receive_routes, t))

    def _messages(self, routes: _Routes, t: int) -> tuple[Message, ...]:
        return tuple(
            Message(peer, expert, t - delay)
            for delay, peer, expert in routes
            if 0 <= t - delay < self.num_chunks
        )
