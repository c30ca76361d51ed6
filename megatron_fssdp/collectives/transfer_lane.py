"""Where a transfer runs while the caller goes on: a thread for CPU tensors, a stream for CUDA ones."""

import os
import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

Results = dict[int, Tensor]


class PendingTransfer(Protocol):
    """A transfer that has been started."""

    def wait(self) -> Results:
        """The results, ready for use by the calling thread (CPU) or its current stream (CUDA)."""


class FinishedTransfer:
    """A transfer in which this rank had nothing to do, or that is over."""

    def __init__(self, results: Results) -> None:
        self._results = results

    def wait(self) -> Results:
        """The results at once."""
        return self._results


class ThreadTransfer:
    """A transfer on a :class:`ThreadLane`."""

    def __init__(self, future: "Future[Results]") -> None:
        self._future = future

    def wait(self) -> Results:
        """Block until the transfer is over; raises what it raised."""
        return self._future.result()


class StreamTransfer:
    """A transfer whose kernels have been queued on a stream of their own."""

    def __init__(self, results: Results, done: torch.cuda.Event) -> None:
        self._results = results
        self._done = done

    def wait(self) -> Results:
        """Make the current stream wait; the host goes on."""
        stream = torch.cuda.current_stream()
        stream.wait_event(self._done)
        for tensor in self._results.values():
            tensor.record_stream(stream)
        return self._results


class ThreadLane:
    """A thread that runs the transfers of one group, one after the other in the order of their start."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Results], Future[Results]]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=f"transfers of {name}", daemon=True).start()

    def submit(self, run: Callable[[], Results]) -> ThreadTransfer:
        """Queue a transfer."""
        future: Future[Results] = Future()
        self._jobs.put((run, future))
        return ThreadTransfer(future)

    def _work(self) -> None:
        torch.set_grad_enabled(False)  # of this thread only
        while True:
            run, future = self._jobs.get()
            try:
                future.set_result(run())
            except BaseException as error:
                future.set_exception(error)
            del run, future  # an idle lane keeps no tensors alive


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
        results = run()
        done = torch.cuda.Event()
        done.record(stream)
    return StreamTransfer(results, done)
