"""The order in which one device sends and receives the chunks of a transfer plan.

Pure data: which message goes in which step. In step ``t`` an edge of depth ``k`` carries
chunk ``t - k`` of its expert, so a device passes a chunk on in the step after the one that
brought it, and the levels of a tree work at the same time. The reduction is the mirror
image: an edge of depth ``k`` of a plan of depth ``K`` carries chunk ``t - (K - k)``.
"""

from dataclasses import dataclass
from typing import NamedTuple

from megatron_fssdp.planning.transfer.transfer_plan import TransferPlan


class Message(NamedTuple):
    """One chunk of one expert, to or from a peer.

    Attributes:
        peer: The other device, as a rank in the group.
        expert: The expert.
        chunk: Number of the chunk within the expert.
    """

    peer: int
    expert: int
    chunk: int


class Step(NamedTuple):
    """What a device posts together; any two devices list what they exchange in the same order."""

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


class _Route(NamedTuple):
    delay: int
    peer: int
    expert: int


_EMPTY_STEP = Step((), ())


@dataclass(frozen=True)
class Wavefront:
    """All steps of one device.

    Attributes:
        num_steps: Number of steps, the same on every device; some may be empty here.
        num_chunks: Number of chunks in an expert.
        send_routes: Where to send which expert, and how many steps after the first.
        receive_routes: Likewise, from where.
    """

    num_steps: int
    num_chunks: int
    send_routes: tuple[_Route, ...]
    receive_routes: tuple[_Route, ...]

    @classmethod
    def of_gather(cls, plan: TransferPlan, device: int, num_chunks: int) -> "Wavefront":
        """From the owners to the replicas."""
        incoming, outgoing = plan.edges_of(device)
        return cls(
            num_chunks + plan.max_depth if num_chunks else 0,
            num_chunks,
            tuple(_Route(edge.depth, edge.destination, edge.expert) for edge in outgoing),
            tuple(_Route(edge.depth, edge.source, edge.expert) for edge in incoming),
        )

    @classmethod
    def of_reduction(cls, plan: TransferPlan, device: int, num_chunks: int) -> "Wavefront":
        """From the replicas to the owners, the same edges the other way round."""
        incoming, outgoing = plan.edges_of(device)
        last = plan.max_depth
        return cls(
            num_chunks + last if num_chunks else 0,
            num_chunks,
            tuple(_Route(last - edge.depth, edge.source, edge.expert) for edge in incoming),
            tuple(_Route(last - edge.depth, edge.destination, edge.expert) for edge in outgoing),
        )

    @property
    def idle(self) -> bool:
        """Whether this device has nothing to send or receive."""
        return not self.num_chunks or not (self.send_routes or self.receive_routes)

    def step(self, t: int) -> Step:
        """The messages of step ``t``; empty outside the range of steps."""
        if not 0 <= t < self.num_steps:
            return _EMPTY_STEP
        return Step(self._messages(self.send_routes, t), self._messages(self.receive_routes, t))

    def _messages(self, routes: tuple[_Route, ...], t: int) -> tuple[Message, ...]:
        return tuple(
            Message(route.peer, route.expert, t - route.delay)
            for route in routes
            if 0 <= t - route.delay < self.num_chunks
        )
