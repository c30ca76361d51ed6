"""The log of a virtual device: everything that was issued, in order."""

from collections import Counter
from collections.abc import Callable

from tests.support.virtual_cuda.books.code_place import code_place
from tests.support.virtual_cuda.books.findings import DeviceEvent, EventKind
from tests.support.virtual_cuda.books.stream_names import StreamNames


class DeviceLog:
    """Log entries, and questions about them.

    Args:
        current_stream: Returns the number of the current stream.

    Attributes:
        events: All entries, in the order in which the host issued the work.
        names: Names of streams.
    """

    def __init__(self, current_stream: Callable[[], int]) -> None:
        self.events: list[DeviceEvent] = []
        self.names = StreamNames()
        self._current_stream = current_stream

    @property
    def host_syncs(self) -> tuple[DeviceEvent, ...]:
        """All points at which the host waited for the device, in order, with their places."""
        return self.events_of(EventKind.HOST_SYNC)

    @property
    def counts(self) -> Counter[str]:
        """Number of log entries by kind, and of operators by stream (``operators on <stream>``)."""
        counts: Counter[str] = Counter()
        for event in self.events:
            counts[event.kind.value] += 1
            if event.kind is EventKind.OPERATOR:
                counts[f"operators on {event.stream}"] += 1
        return counts

    def events_of(self, *kinds: EventKind) -> tuple[DeviceEvent, ...]:
        """Log entries of some kinds, in order."""
        return tuple(event for event in self.events if event.kind in kinds)

    def mark(self, text: str) -> None:
        """Put an entry into the log, so that a budget can be counted from here."""
        self.log(EventKind.MARK, text)

    def log(
        self,
        kind: EventKind,
        what: str,
        stream: int | None = None,
        place: str = "",
        num_bytes: int = 0,
        num_messages: int = 0,
    ) -> None:
        """Add an entry to the log."""
        stream = self._current_stream() if stream is None else stream
        entry = DeviceEvent(kind, what, self.names.of(stream), place or code_place(), num_bytes, num_messages)
        self.events.append(entry)
