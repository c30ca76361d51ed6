"""The log of a virtual device: everything that was issued, in order."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable

from devtools.virtual_cuda.books.code_place import code_place
from devtools.virtual_cuda.books.findings import DeviceEvent, EventKind
from devtools.virtual_cuda.books.stream_order import DEFAULT_STREAM, HOST

# A program may keep a stream longer than a virtual device exists.
_numbers = itertools.count(DEFAULT_STREAM + 1)
_names: dict[int, str] = {HOST: "the host", DEFAULT_STREAM: "the default stream"}


def new_stream(name: str, known: Iterable[int]) -> int:
    """Number of a new stream. If a known stream has the name already, a number is added to the name."""
    num_before = sum(f"{_names[number]} (".startswith(f"{name} (") for number in known)
    stream = next(_numbers)
    _names[stream] = f"{name} ({num_before + 1})" if num_before else name
    return stream


def name_of(actor: int) -> str:
    return _names[actor]


class DeviceLog:
    """Log entries, in the order in which the host issued the work, and questions about them."""

    def __init__(self, current_stream: Callable[[], int]) -> None:
        self.events: list[DeviceEvent] = []
        self._current_stream = current_stream

    @property
    def host_syncs(self) -> tuple[DeviceEvent, ...]:
        """All points at which the host waited for the device, in order, with their places."""
        return self.events_of(EventKind.HOST_SYNC)

    @property
    def counts(self) -> Counter[str]:
        """Number of log entries by kind, and of operators by stream (``operators on <stream>``)."""
        operators = self.events_of(EventKind.OPERATOR)
        counts = Counter(event.kind.value for event in self.events)
        return counts + Counter(f"operators on {event.stream}" for event in operators)

    def events_of(self, *kinds: EventKind) -> tuple[DeviceEvent, ...]:
        return tuple(event for event in self.events if event.kind in kinds)

    def mark(self, text: str) -> None:
        """Put an entry into the log, so that a budget can be counted from here."""
        self.log(EventKind.MARK, text)

    def log(
        self,
        kind: EventKind,
        name: str,
        stream: int | None = None,
        place: str = "",
        num_bytes: int = 0,
        num_messages: int = 0,
    ) -> None:
        stream = self._current_stream() if stream is None else stream
        entry = DeviceEvent(kind, name, name_of(stream), place or code_place(), num_bytes, num_messages)
        self.events.append(entry)
