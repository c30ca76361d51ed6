"""Knows which work on the streams of a device and on the host is ordered after which other work.

Every stream, and the host, has a vector clock: for each actor, the number of its last operation that is
certainly complete before the next operation of the clock's owner starts.
"""

from collections.abc import Callable, Iterable

HOST, DEFAULT_STREAM = -1, 0  # numbers of actors; other streams follow

Clock = dict[int, int]
"""From the number of an actor to the number of its last operation that is known to be complete."""


def _merge(clock: Clock, added: Clock) -> None:
    for actor, number in added.items():
        if clock.get(actor, 0) < number:
            clock[actor] = number


class StreamOrder:
    """The order of operations on streams and on the host, from launches, events and synchronizations."""

    def __init__(self) -> None:
        self._clocks: dict[int, Clock] = {HOST: {}, DEFAULT_STREAM: {}}
        self.num_operations = 0

    @property
    def streams(self) -> Iterable[int]:
        return self._clocks.keys()

    def add_stream(self, stream: int) -> None:
        """Add a stream, unless it is known. Its work starts after all that the host knows to be complete."""
        self._clocks.setdefault(stream, dict(self._clocks[HOST]))

    def launch(self, actor: int) -> int:
        """Number of a new operation of a stream or of the host.

        An operation that the host launches comes after all work whose end the host has awaited.
        """
        self.num_operations += 1
        clock = self._clocks[actor]
        if actor != HOST:
            _merge(clock, self._clocks[HOST])
        clock[actor] = self.num_operations
        return self.num_operations

    def snapshot(self, actor: int) -> Clock:
        """What an event knows that is recorded on a stream now."""
        clock = dict(self._clocks[HOST])
        _merge(clock, self._clocks[actor])
        return clock

    def wait(self, actor: int, clock: Clock) -> None:
        """Order the following operations of a stream or of the host after an event."""
        _merge(self._clocks[actor], clock)

    def knows(self, actor: int, clock: Clock) -> bool:
        own = self._clocks[actor]
        return all(own.get(earlier, 0) >= number for earlier, number in clock.items())

    def wait_for_all_streams(self) -> None:
        for clock in self._clocks.values():
            _merge(self._clocks[HOST], clock)

    def is_ordered(self, actor: int, earlier: int, number: int) -> bool:
        """Whether the next operation of ``actor`` starts after operation ``number`` of ``earlier``."""
        if actor == earlier or self._clocks[actor].get(earlier, 0) >= number:
            return True
        return actor != HOST and self._clocks[HOST].get(earlier, 0) >= number

    def completed_before_reuse(self, owner: int, recorded: set[int]) -> Clock:
        """What is complete before the allocator gives freed memory to new work.

        Later work of the owner may use the memory at once. The allocator waits for recorded streams.
        """
        clock = self.snapshot(owner)
        for stream in recorded:
            _merge(clock, self._clocks[stream])
        return clock


class UnfinishedWork:
    """Operations whose data arrives only when a stream or the host knows that they are complete."""

    def __init__(self, order: StreamOrder) -> None:
        self._order = order
        self._works: list[tuple[int, int, Callable[[], object]]] = []

    def finish_later(self, stream: int, finish: Callable[[], object]) -> None:
        """Call a function when something waits for the last operation of a stream, or at the end."""
        self._works.append((stream, self._order.num_operations, finish))

    def finish_known(self, actor: int) -> None:
        """Call the functions of the operations that are complete for a stream or for the host."""
        for work in list(self._works):
            stream, number, finish = work
            if stream != actor and self._order.is_ordered(actor, stream, number):
                self._works.remove(work)
                finish()

    def finish_all(self) -> None:
        """Call all functions, in the order in which the operations were issued."""
        while self._works:
            self._works.pop(0)[2]()
