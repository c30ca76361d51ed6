"""Streams and events of a virtual device: everything is executed at once, and only the order is noted."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from devtools.virtual_cuda.books.device_log import name_of
from devtools.virtual_cuda.books.stream_order import Clock
from devtools.virtual_cuda.books.virtual_device import VirtualDevice, current_device

_MS_OF_OPERATION = 0.01  # Times are made up, but they are positive, and the same in every run.


class VirtualStream:
    """Replaces ``torch.cuda.Stream``; priorities have no effect."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.cuda_stream = self._books.add_stream()
        self.priority = priority

    @classmethod
    def numbered(cls, number: int) -> "VirtualStream":
        stream = cls.__new__(cls)
        stream.cuda_stream, stream.priority = number, 0
        return stream

    @property
    def _books(self) -> VirtualDevice:
        return current_device()

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, -5)

    @property
    def stream_id(self) -> int:
        return self.cuda_stream

    @property
    def number(self) -> int:
        """Number of the stream, which the current device knows from now on."""
        return self._books.know_stream(self.cuda_stream)

    @property
    def device(self) -> torch.device:
        return self._books.device

    @property
    def device_index(self) -> int:
        return self._books.index

    def record_event(self, event: "VirtualEvent | None" = None) -> "VirtualEvent":
        event = event or VirtualEvent()
        event.record(self)
        return event

    def wait_event(self, event: "VirtualEvent") -> None:
        self._books.wait(self.number, event.clock)

    def wait_stream(self, stream: "VirtualStream") -> None:
        self._books.wait(self.number, self._books.snapshot(stream.number))

    def synchronize(self) -> None:
        clock = self._books.snapshot(self.number)
        self._books.host_sync("stream.synchronize", clock)

    def query(self) -> bool:
        """Return that all work is complete; from then on the host knows it."""
        self._books.host_knows(self._books.snapshot(self.number))
        return True

    def is_capturing(self) -> bool:
        return False

    def __enter__(self) -> "VirtualStream":
        self._books.current_stack.append(self.number)
        return self

    def __exit__(self, *_: object) -> None:
        self._books.current_stack.pop()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, VirtualStream) and other.cuda_stream == self.cuda_stream

    def __hash__(self) -> int:
        return hash(self.cuda_stream)

    def __repr__(self) -> str:
        return f"<VirtualStream {name_of(self.number)}>"


class VirtualEvent:
    """Replaces ``torch.cuda.Event``; the clock is what is complete when the event is."""

    def __init__(self, *_: object, **__: object) -> None:
        self.clock: Clock = {}
        self._recorded_after = 0

    @property
    def _books(self) -> VirtualDevice:
        return current_device()

    def record(self, stream: VirtualStream | None = None) -> None:
        number = self._books.current_stream if stream is None else stream.number
        self.clock = self._books.snapshot(number)
        self._recorded_after = self._books.order.num_operations

    def wait(self, stream: VirtualStream | None = None) -> None:
        number = self._books.current_stream if stream is None else stream.number
        self._books.wait(number, self.clock)

    def synchronize(self) -> None:
        self._books.host_sync("event.synchronize", self.clock)

    def query(self) -> bool:
        """Return that the event is complete; from then on the host knows it."""
        self._books.host_knows(self.clock)
        return True

    def elapsed_time(self, end_event: "VirtualEvent") -> float:
        """Made-up milliseconds between two events: a constant for each operation in between."""
        return max(0, end_event._recorded_after - self._recorded_after) * _MS_OF_OPERATION


@contextmanager
def stream_context(stream: VirtualStream | None) -> Iterator[None]:
    """Replaces ``torch.cuda.stream``: make a stream current; None leaves the current stream."""
    stack = current_device().current_stack
    stack.append(stack[-1] if stream is None else stream.number)
    try:
        yield
    finally:
        stack.pop()
