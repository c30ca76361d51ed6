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


class PendingTransfer(Protocol):
    """A transfer that has been started."""

    def wait(self) -> Results:
        """The results, ready for use by the calling thread (CPU) or its current stream (CUDA)."""

    def timing(self) -> TransferTiming:
        """Its times, after the wait; on CUDA the host waits until they are known."""


class FinishedTransfer:
    """A transfer in which this rank had nothing to do, or that is over."""

    def __init__(self, results: Results) -> None:
        self._results = results

    def wait(self) -> Results:
        """The results at once."""
        return self._results

    def timing(self) -> TransferTiming:
        """Nothing to do takes no time."""
        return TransferTiming()


class ThreadTransfer:
    """A transfer on a :class:`ThreadLane`."""

    def __init__(self, future: "Future[tuple[Results, float]]") -> None:
        self._future = future
        self._blocked_s = 0.0

    def wait(self) -> Results:
        """Block until the transfer is over; raises what it raised."""
        started_s = time.perf_counter()
        results, _ = self._future.result()
        self._blocked_s += time.perf_counter() - started_s
        return results

    def timing(self) -> TransferTiming:
        """Times of the lane's thread and of the threads that waited."""
        _, busy_s = self._future.result()
        return TransferTiming(busy_s, min(busy_s, self._blocked_s))


class StreamTransfer:
    """A transfer whose kernels have been queued on a stream of their own."""

    def __init__(self, results: Results, begin: torch.cuda.Event, done: torch.cuda.Event) -> None:
        self._results = results
        self._begin = begin
        self._done = done
        self._asked: torch.cuda.Event | None = None

    def wait(self) -> Results:
        """Make the current stream wait; the host goes on."""
        stream = torch.cuda.current_stream()
        self._asked = torch.cuda.Event(enable_timing=True)
        self._asked.record(stream)
        stream.wait_event(self._done)
        for tensor in self._results.values():
            tensor.record_stream(stream)
        return self._results

    def timing(self) -> TransferTiming:
        """Times between events of both streams."""
        self._done.synchronize()
        busy_s = self._begin.elapsed_time(self._done) / 1e3
        if self._asked is None:
            return TransferTiming(busy_s)
        self._asked.synchronize()
        exposed_s = self._asked.elapsed_time(self._done) / 1e3
        return TransferTiming(busy_s, min(busy_s, max(0.0, exposed_s)))


class ThreadLane:
    """A thread that runs the transfers of one group, one after the other in the order of their start."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=f"transfers of {name}", daemon=True).start()

    def submit(self, run: Callable[[], Results]) -> ThreadTransfer:
        """Queue a transfer."""
        future: Future[tuple[Results, float]] = Future()
        self._jobs.put((run, future))
        return ThreadTransfer(future)

    def _work(self) -> None:
        torch.set_grad_enabled(False)  # of this thread only
        while True:
            run, future = self._jobs.get()
            started_s = time.perf_counter()
            try:
                results = run()
                future.set_result((results, time.perf_counter() - started_s))
                del results
            except BaseException as error:
                future.set_exception(error)
            del run, future  # an idle lane keeps no tensors alive


_Job = tuple[Callable[[], Results], "Future[tuple[Results, float]]"]
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
    return StreamTransfer(results, begin, done)
