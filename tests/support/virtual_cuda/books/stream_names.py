"""Numbers and names of streams. A program may keep a stream longer than a virtual device exists."""

import itertools

from tests.support.virtual_cuda.books.stream_order import DEFAULT_STREAM, HOST

_numbers = itertools.count(DEFAULT_STREAM + 1)
_names: dict[int, str] = {}


class StreamNames:
    """The names of the streams that one virtual device knows."""

    def __init__(self) -> None:
        self._known = {HOST: "the host", DEFAULT_STREAM: "the default stream"}

    def add(self, name: str) -> int:
        """Number of a new stream; a name that exists already gets a number as well."""
        stream = next(_numbers)
        num_before = sum(other == name or other.startswith(f"{name} (") for other in self._known.values())
        self._known[stream] = _names[stream] = f"{name} ({num_before + 1})" if num_before else name
        return stream

    def know(self, stream: int) -> bool:
        """Take over a stream that was made on an earlier device; return whether it was unknown."""
        is_unknown = stream not in self._known
        if is_unknown:
            self._known[stream] = _names[stream]
        return is_unknown

    def of(self, actor: int) -> str:
        """Name of a stream, or of the host."""
        return self._known[actor]
