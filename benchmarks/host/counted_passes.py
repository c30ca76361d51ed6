"""What the host did in the forward passes of a layer, counted in the log of a virtual CUDA device."""

from collections.abc import Iterable
from dataclasses import astuple, dataclass, replace

from devtools.virtual_cuda import EventKind, VirtualDevice
from megatron_fssdp.runtime.slots.autograd_points import in_backward

EXPERTS, PLANNED_AHEAD, PLANNED_AFTER_GATE = "experts", "planned ahead", "planned after the gate"
"""Marks in the log: the experts' compute begins; a plan was made for an iteration, or for exact counts."""


@dataclass(frozen=True)
class HostWork:
    """Host work of a forward pass of a layer; for several passes, the largest numbers.

    Attributes:
        synchronizations: Host synchronizations.
        operators_before: Operators from the beginning of the pass to the last synchronization.
        operators_after: Operators from the last synchronization to the first rows on the wire.
        plans_ahead: Plans for whole iterations that are made between the last synchronization and the
            experts.
        plans_after_gate: Plans in the same time that need the counts of this micro-batch.
        places: Places in the code of the synchronizations.
    """

    synchronizations: int = 0
    operators_before: int = 0
    operators_after: int = 0
    plans_ahead: int = 0
    plans_after_gate: int = 0
    places: frozenset[str] = frozenset()

    def at_most(self, other: "HostWork") -> "HostWork":
        """The larger number of each kind, and the places of both."""
        numbers = map(max, zip(astuple(self)[:-1], astuple(other)[:-1], strict=True))
        return replace(HostWork(*numbers), places=self.places | other.places)

    @classmethod
    def of_pass(cls, device: VirtualDevice, begin: int) -> "HostWork":
        """Count the log entries of the pass that has just ended."""
        events = device.events[begin:]
        waits = [i for i, event in enumerate(events) if event.kind is EventKind.HOST_SYNC]
        if not waits:
            return cls()
        after = events[waits[-1] + 1 :]
        marks = [event.name if event.kind is EventKind.MARK else "" for event in after]
        first_rows = next(
            i
            for i, event in enumerate(after)
            if event.kind in (EventKind.COLLECTIVE, EventKind.P2P_BATCH)
            and "collectives/sparse" not in event.place
        )
        until_experts = marks[: marks.index(EXPERTS)]
        return cls(
            synchronizations=len(waits),
            operators_before=sum(event.kind is EventKind.OPERATOR for event in events[: waits[-1]]),
            operators_after=sum(event.kind is EventKind.OPERATOR for event in after[:first_rows]),
            plans_ahead=until_experts.count(PLANNED_AHEAD),
            plans_after_gate=until_experts.count(PLANNED_AFTER_GATE),
            places=frozenset(events[i].place.split(" < ")[0] for i in waits),
        )


@dataclass
class CountedPasses:
    """Host work of the passes of a layer."""

    first: HostWork = HostWork()  # first forward passes
    again: HostWork = HostWork()  # forward passes that are recomputed in the backward pass

    def count(self, device: VirtualDevice, begin: int) -> None:
        """Count the pass that has just ended."""
        work = HostWork.of_pass(device, begin)
        if in_backward():
            self.again = self.again.at_most(work)
        else:
            self.first = self.first.at_most(work)


def most_of(of_ranks: Iterable[dict[str, CountedPasses]]) -> dict[str, CountedPasses]:
    """The largest numbers of several ranks."""
    total: dict[str, CountedPasses] = {}
    for of_rank in of_ranks:
        for name, passes in of_rank.items():
            most = total.setdefault(name, CountedPasses())
            most.first = most.first.at_most(passes.first)
            most.again = most.again.at_most(passes.again)
    return total
