"""Where a transfer runs while the caller goes on: a thread for CPU tensors, a stream for CUDA ones."""

import os
import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

Results = dict[int, Tensor]


@dataclass(frozen=True)
class TransferTiming:
    """How long a transfer took, and how much of that its caller had to wait for.

    Attributes:
        busy_s: From its first message to its last, on its lane.
        exposed_s: Of these, the seconds in which the waiting thread or stream stood still.
    """

    busy_s: float = 0.0
    exposed_s: float = 0.0


class TransferTimer(Protocol):
    """Knows a transfer's times and keeps none of its tensors alive."""

    def timing(self) -> TransferTiming:
        """The times, after the wait; on CUDA the host waits until they are known."""


class PendingTransfer(Protocol):
    """A transfer that has been started."""

    @property
    def timer(self) -> TransferTimer:
        """Its times."""

    def wait(self) -> Results:
        """The results, ready for use by the calling thread (CPU) or its current stream (CUDA)."""


class FinishedTransfer:
    """A transfer in which this rank had nothing to do, or that is over."""

    def __init__(self, results: Results) -> None:
        self._results = results
        self.timer = HostTimer()

    def wait(self) -> Results:
        """The results at once."""
        return self._results


class HostTimer:
    """Times of a transfer on a :class:`ThreadLane`; one that did nothing took no time.

    Attributes:
        begin_s: When its lane began with it, on ``time.perf_counter``'s clock.
        end_s: When it was over.
        waits_s: Begin and end of each wait for it.
    """

    def __init__(self) -> None:
        self.begin_s = 0.0
        self.end_s = 0.0
        self.waits_s: list[tuple[float, float]] = []

    def timing(self) -> TransferTiming:
        """Times of the lane's thread and of the threads that waited."""
        busy_s = self.end_s - self.begin_s
        return TransferTiming(busy_s, min(busy_s, sum(end_s - begin_s for begin_s, end_s in self.waits_s)))


class ThreadTransfer:
    """A transfer on a :class:`ThreadLane`."""

    def __init__(self, future: "Future[Results]", timer: HostTimer) -> None:
        self._future = future
        self.timer = timer

    def wait(self) -> Results:
        """Block until the transfer is over; raises what it raised."""
        started_s = time.perf_counter()
        results = self._future.result()
        self.timer.waits_s.append((started_s, time.perf_counter()))
        return results


class StreamTimer:
    """Times of a transfer between events of its stream and of the one that waits for it."""

    def __init__(self, begin: torch.cuda.Event, done: torch.cuda.Event) -> None:
        self.begin = begin
        self.done = done
        self.asked: torch.cuda.Event | None = None

    def timing(self) -> TransferTiming:
        """Times of the device; nobody waited who did not ask."""
        self.done.synchronize()
        busy_s = self.begin.elapsed_time(self.done) / 1e3
        if self.asked is None:
            return TransferTiming(busy_s)
        self.asked.synchronize()
        exposed_s = self.asked.elapsed_time(self.done) / 1e3
        return TransferTiming(busy_s, min(busy_s, max(0.0, exposed_s)))


class StreamTransfer:
    """A transfer whose kernels have been queued on a stream of their own."""

    def __init__(self, results: Results, timer: StreamTimer) -> None:
        self._results = results
        self.timer = timer

    def wait(self) -> Results:
        """Make the current stream wait; the host goes on."""
        stream = torch.cuda.current_stream()
        self.timer.asked = torch.cuda.Event(enable_timing=True)
        self.timer.asked.record(stream)
        stream.wait_event(self.timer.done)
        for tensor in self._results.values():
            tensor.record_stream(stream)
        return self._results


class ThreadLane:
    """A thread that runs the transfers of one group, one after the other in the order of their start."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=f"transfers of {name}", daemon=True).start()

    def submit(self, run: Callable[[], Results]) -> ThreadTransfer:
        """Queue a transfer."""
        future: Future[Results] = Future()
        timer = HostTimer()
        self._jobs.put((run, future, timer))
        return ThreadTransfer(future, timer)

    def _work(self) -> None:
        torch.set_grad_enabled(False)  # of this thread only
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
            del run, future, timer  # an idle lane keeps no tensors alive


_Job = tuple[Callable[[], Results], "Future[Results]", HostTimer]
_lanes: dict[tuple[int, str], ThreadLane] = {}


def thread_lane(group: dist.ProcessGroup) -> ThreadLane:
    """The lane of a group in this process; threads do not survive a fork, so neither do lanes."""
    key = (os.getpid(), group.group_name)
    if key not in _lanes:
        _lanes[key] = ThreadLane(group.group_name)
    return _lanes[key]


def run_on_stream(
    run: Callable[[], Results], stream: torch.cuda.Stream, touched: Iterable[Tensor]
) -> StreamTransfer:
    """Queue a transfer on ``stream`` after what the current stream has queued so far.

    Args:
        run: Queues the kernels and returns the tensors they fill.
        stream: The transfer's stream.
        touched: The caller's tensors that are read or written; their memory is not given
            to others before the transfer is over.
    """
    stream.wait_stream(torch.cuda.current_stream())
    for tensor in touched:
        tensor.record_stream(stream)
    with torch.cuda.stream(stream), torch.no_grad():
        begin = torch.cuda.Event(enable_timing=True)
        begin.record(stream)
        results = run()
        done = torch.cuda.Event(enable_timing=True)
        done.record(stream)
    return StreamTransfer(results, StreamTimer(begin, done))
