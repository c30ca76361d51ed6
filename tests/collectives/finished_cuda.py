"""Streams and events of ``torch.cuda`` whose work is always done, with a log of what is issued on streams."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from megatron_fssdp.megatron_adapter.cpu.cpu_device import FinishedStream, HostEvent


@dataclass(eq=False)
class StreamLog:
    """What happens to streams while they are replaced.

    Attributes:
        made: Streams that were created.
        current: The current streams, innermost last; the first one is the caller's.
    """

    made: list[FinishedStream] = field(default_factory=list)
    current: list[FinishedStream] = field(default_factory=lambda: [FinishedStream()])

    @property
    def on_lane(self) -> bool:
        """Whether the current stream is not the caller's."""
        return len(self.current) > 1


def finished_cuda(monkeypatch: pytest.MonkeyPatch) -> StreamLog:
    """Replace streams and events of ``torch.cuda`` for one test."""
    log = StreamLog()

    class Stream(FinishedStream):
        def __init__(self, *_: Any, **__: Any) -> None:
            log.made.append(self)

    @contextmanager
    def entered(stream: FinishedStream) -> Iterator[None]:
        log.current.append(stream)
        yield
        log.current.pop()

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", HostEvent)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: log.current[-1])
    return log
