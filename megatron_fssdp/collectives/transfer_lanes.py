"""Lanes run transfers beside the caller's work: a thread for CPU tensors, a stream for CUDA tensors.

The caller starts a transfer, continues with other work, and waits for the results when it needs them::

    caller   start ── other work ──────── wait ░░ use the results
               └────┐                          ▲
    lane            transfer ──────────────────┘         ░░ is the exposed time

A transfer consists of steps, and each step issues one batch of messages. A thread runs all steps at once. On
CUDA, the host decides when the later batches are issued, and the answer depends on the device:

* **Many connections** (CUDA's default). Work of different streams waits in different hardware queues. All
  batches are issued at the start of the transfer, which then makes progress on its own.
* **One connection** (``CUDA_DEVICE_MAX_CONNECTIONS=1``, which Megatron asks for under tensor or context
  parallelism). The kernels of all streams wait in one queue, in the order in which the host issued them. A
  batch that waits for the batch before it also holds up the attention that is queued behind it. So a
  transfer issues only a few batches at its start, and a few more at each *point* of the program::

      issued   batches 0-1 │ attention, part 1 │ batches 2-3 │ attention, part 2 │ … │ wait: all the rest

Points are fixed places of the program, in the same order on all ranks. A lane never asks the device how far
it is, because ranks would get different answers. Two ranks that issue the work of two communicators in
different orders can wait for each other forever. For the same reason, a rank without messages in a step
counts this step as well, and transfers of a lane are issued strictly one after the other.
"""

import os
import queue
import threading
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fssdp.collectives.device_clock import Moment, now, seconds_between

Steps = Generator[bool, None, None]
"""A transfer that stops after each batch that it has issued, and says whether another one follows."""


@dataclass(eq=False)
class TransferTimer:
    """When a transfer ran, and when its caller waited for it. It keeps no tensors alive."""

    is_gather: bool = True  # otherwise a SparseReduceScatter
    num_bytes: int = 0  # between all devices in total
    begin: Moment | None = None  # on the lane; None if there was nothing to do
    end: Moment | None = None
    # The begin of each wait, and the moment at which the waiting thread or stream could go on.
    waits: list[tuple[Moment, Moment]] = field(default_factory=list)
    # With one connection, the wait issues the end, so a transfer seems to last at least until the wait.
    ends_at_wait: bool = False

    def seconds(self, beside_s: float = 0.0) -> tuple[float, float]:
        """Seconds on the lane, and those that are exposed; on CUDA, the host waits for them.

        These are the seconds for which callers had to stop, and ``beside_s`` more.
        """
        if self.begin is None or self.end is None:
            return 0.0, 0.0
        busy_s = seconds_between(self.begin, self.end)
        exposed_s = beside_s + sum(max(0.0, seconds_between(*wait)) for wait in self.waits)
        return busy_s, min(busy_s, exposed_s)

    def beside_s(self, begin: Moment, end: Moment) -> float:
        """Seconds of the transfer between two moments; 0 if its end is not known."""
        if self.begin is None or self.end is None or self.ends_at_wait:
            return 0.0
        if (left_s := seconds_between(begin, self.end)) <= 0:
            return 0.0
        others = ((begin, end), (self.begin, end), (self.begin, self.end))
        return max(0.0, min(left_s, *(seconds_between(*pair) for pair in others)))


class PendingTransfer:
    """A transfer that has started on a thread; without a ``future``, it has nothing to do on this rank."""

    def __init__(self, timer: TransferTimer, future: Future[None] | None = None) -> None:
        self.timer, self._future = timer, future

    def wait(self) -> None:
        """Wait, on the CPU by the calling thread, which gets errors, on CUDA by its current stream."""
        if self._future is not None:
            begin = now(is_cuda=False)
            self._future.result()
            self.timer.waits.append((begin, now(is_cuda=False)))


class ThreadLane:
    """A thread that runs the transfers of one process group one by one, in the order of their submission."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Steps, Future[None], TransferTimer]] = queue.SimpleQueue()
        # A daemon, because a transfer whose peer is gone must not keep the process from ending.
        threading.Thread(target=self._work, name="transfers", daemon=True).start()

    def submit(self, steps: Steps, timer: TransferTimer) -> PendingTransfer:
        """Queue a transfer."""
        future = Future[None]()
        self._jobs.put((steps, future, timer))
        return PendingTransfer(timer, future)

    def _work(self) -> None:
        torch.set_grad_enabled(False)  # This affects only the lane's thread.
        while True:
            steps, future, timer = self._jobs.get()
            begin = now(is_cuda=False)
            try:
                for _ in steps:
                    pass
                timer.begin, timer.end = begin, now(is_cuda=False)
                future.set_result(None)
            except BaseException as error:
                future.set_exception(error)
            del steps, future, timer  # An idle lane must not keep tensors alive.


class StreamTransfer(PendingTransfer):
    """A transfer on a :class:`StreamLane`, with the arguments of :meth:`StreamLane.submit`.

    It keeps the caller's tensors alive until the wait. After the wait, the waiting stream is ordered behind
    the transfer, so memory that belongs to this stream can be given back without ``record_stream``. Under
    Megatron's combined 1F1B schedule, the memory can belong to another stream than the waiting one, on which
    its use is then recorded.
    """

    def __init__(
        self,
        lane: "StreamLane",
        steps: Steps,
        timer: TransferTimer,
        at_once: int | None,
        touched: Iterable[Tensor],
    ) -> None:
        super().__init__(timer)
        self.has_batches = True
        self._lane, self._steps, self._touched, self._at_once = lane, steps, tuple(touched), at_once
        self._submitted_on = torch.cuda.current_stream(lane.device)
        self._ready = self._submitted_on.record_event()

    def issue(self, *, to_the_end: bool = False) -> None:
        """Issue the batches of one point, or all that are left and the event that ends the transfer.

        A point leaves the end out: it waits for the last batch, which would hold up all that is queued behind
        it.
        """
        stream = self._lane.stream
        with torch.cuda.stream(stream), torch.no_grad():
            if self.timer.begin is None:
                stream.wait_event(self._ready)
                self.timer.begin = now(is_cuda=True)
            for _ in range(self._at_once or 0):
                self.has_batches = self.has_batches and next(self._steps, False)
            if to_the_end:
                for _ in self._steps:
                    pass
                self.has_batches, self.timer.end = False, now(is_cuda=True)

    def wait(self) -> None:
        """Make the current stream wait for the transfer; the host does not wait."""
        self._lane.issue_through(self)
        stream, end = torch.cuda.current_stream(self._lane.device), cast(torch.cuda.Event, self.timer.end)
        self.timer.waits.append((now(is_cuda=True), end))
        stream.wait_event(end)
        if {self._submitted_on, stream} != {torch.cuda.default_stream(self._lane.device)}:
            for tensor in self._touched:
                tensor.record_stream(stream)
        self._touched = ()


class StreamLane:
    """Issues the transfers of one process group on one CUDA stream, in the order of their submission."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)
        self._open: deque[StreamTransfer] = deque()

    def submit(
        self, steps: Steps, timer: TransferTimer, at_once: int | None, touched: Iterable[Tensor]
    ) -> StreamTransfer:
        """Begin a transfer, to run after all work that is on the current stream now.

        All ranks have equally many batches. At most ``at_once`` of them are issued at one point; ``None``
        issues everything now. The caller's ``touched`` tensors, which the transfer reads or writes, must
        belong to the stream that waits for the transfer.
        """
        timer.ends_at_wait = at_once is not None
        transfer = StreamTransfer(self, steps, timer, at_once, touched)
        self._open.append(transfer)
        if at_once is None:
            self.issue_through(transfer)
        else:
            self.advance()
        return transfer

    def advance(self) -> None:
        """Issue the next batches of the first transfer that still has some: one point of the program."""
        for transfer in self._open:
            if transfer.has_batches:
                transfer.issue()
                break

    def issue_through(self, transfer: StreamTransfer) -> None:
        """Issue everything of a transfer and of the transfers before it."""
        while transfer in self._open:
            self._open.popleft().issue(to_the_end=True)


_thread_lanes: WeakKeyDictionary[dist.ProcessGroup, dict[int, ThreadLane]] = WeakKeyDictionary()
_stream_lanes: WeakKeyDictionary[dist.ProcessGroup, dict[object, StreamLane]] = WeakKeyDictionary()


def thread_lane(group: dist.ProcessGroup) -> ThreadLane:
    """The thread lane of a process group in this process; it is created at the first call."""
    # The process number is a key because a forked process does not inherit threads.
    lanes, process = _thread_lanes.setdefault(group, {}), os.getpid()
    if process not in lanes:
        lanes[process] = ThreadLane()
    return lanes[process]


def stream_lane(group: dist.ProcessGroup, device: torch.device, use: str = "transfers") -> StreamLane:
    """The lane for one use of a process group on a CUDA device; it is created at the first call."""
    # Torch hands out streams from a pool of 32 and begins again after the last one. A new stream for each
    # transfer would soon be that of an earlier transfer or of another library.
    lanes = _stream_lanes.setdefault(group, {})
    # Tests replace the class by that of a virtual device, whose streams serve that device alone.
    key = (use, device, torch.cuda.Stream)
    if key not in lanes:
        lanes[key] = StreamLane(device)
    return lanes[key]


def advance_transfers(group: dist.ProcessGroup, hidden: torch.Tensor | None = None) -> None:
    """Mark a point of the program, the same on all ranks, at which the group's transfers issue batches.

    The backward pass has one where the gradient of ``hidden`` is complete, if it is given.
    """
    for lane in _stream_lanes.get(group, {}).values():
        lane.advance()
    if hidden is not None and torch.is_grad_enabled() and hidden.requires_grad:
        hidden.register_hook(lambda gradient: advance_transfers(group))
