"""Runs transfers beside the caller's work: in a thread for CPU tensors, on a stream for CUDA tensors.

"Lane" means either of them; ``stream_lane.py`` has the lane of CUDA tensors. The caller starts a transfer,
continues with other work, and waits for the results when it needs them::

    caller   start ── other work ──────── wait ░░ use the results
               └────┐                          ▲
    lane            transfer ──────────────────┘         ░░ is the exposed time
"""

import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

Results = dict[int, Tensor]


@dataclass(frozen=True)
class TransferTiming:
    """How long a transfer took, and for how much of that time its caller had to wait.

    Attributes:
        busy_s: Seconds from the start to the end of the transfer on its lane.
        exposed_s: The part of ``busy_s`` in which the thread or stream that waited had to stop, in seconds.
    """

    busy_s: float = 0.0
    exposed_s: float = 0.0


class TransferTimer(Protocol):
    """Knows how long a transfer took, and keeps none of its tensors alive."""

    def timing(self) -> TransferTiming:
        """Times of the transfer; valid after ``wait``. On CUDA, the host waits until they are known."""


class PendingTransfer(Protocol):
    """A transfer that has started."""

    @property
    def timer(self) -> TransferTimer:
        """Timer of this transfer."""

    def wait(self) -> Results:
        """Wait, and return the results for the calling thread (CPU) or its current stream (CUDA)."""


class FinishedTransfer:
    """A transfer that is complete, or in which this rank had nothing to do."""

    def __init__(self, results: Results) -> None:
        self._results = results
        self.timer = HostTimer()

    def wait(self) -> Results:
        """Return the results immediately."""
        return self._results


class HostTimer:
    """Times of a transfer on a :class:`ThreadLane`; all zero if the transfer had nothing to do.

    Attributes:
        begin_s: Time at which the lane started the transfer, in seconds of ``time.perf_counter``.
        end_s: Time at which the transfer was complete, in seconds of the same clock.
        waits_s: Begin and end of each wait for the transfer, in seconds of the same clock.
    """

    def __init__(self) -> None:
        self.begin_s = 0.0
        self.end_s = 0.0
        self.waits_s: list[tuple[float, float]] = []

    def timing(self) -> TransferTiming:
        """Busy time of the lane's thread, and total time of the threads that waited."""
        busy_s = self.end_s - self.begin_s
        return TransferTiming(busy_s, min(busy_s, sum(end_s - begin_s for begin_s, end_s in self.waits_s)))


class ThreadTransfer:
    """A transfer that runs on a :class:`ThreadLane`."""

    def __init__(self, future: "Future[Results]", timer: HostTimer) -> None:
        self._future = future
        self.timer = timer

    def wait(self) -> Results:
        """Block until the transfer is complete, and return its results or raise its exception."""
        started_s = time.perf_counter()
        results = self._future.result()
        self.timer.waits_s.append((started_s, time.perf_counter()))
        return results


class ThreadLane:
    """A thread that runs the transfers of one process group one by one, in the order of their submission."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=f"transfers of {name}", daemon=True).start()

    def submit(self, run: Callable[[], Results]) -> ThreadTransfer:
        """Queue a transfer; ``run`` performs it and returns its results."""
        future: Future[Results] = Future()
        timer = HostTimer()
        self._jobs.put((run, future, timer))
        return ThreadTransfer(future, timer)

    def _work(self) -> None:
        torch.set_grad_enabled(False)  # This affects only the lane's thread.
        while True:
            run, future, timer = self._jobs.get()
            begin_s = time.perf_counter()
            try:
                results = run()
                timer.begin_s, timer.end_s = begin_s, time.perf_counter()
                future.set_result(results)
                del results
            except BaseException as error:
                future.set_exception(error)
            del run, future, timer  # An idle lane must not keep tensors alive.


_Job = tuple[Callable[[], Results], "Future[Results]", HostTimer]
_lanes: dict[tuple[int, str], ThreadLane] = {}


def thread_lane(group: dist.ProcessGroup) -> ThreadLane:
    """The thread lane of a process group in this process; it is created at the first call."""
    # The process number is part of the key because a forked process does not inherit threads.
    key = (os.getpid(), group.group_name)
    if key not in _lanes:
        _lanes[key] = ThreadLane(group.group_name)
    return _lanes[key]
