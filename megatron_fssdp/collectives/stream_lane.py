"""Transfers of CUDA tensors beside the caller's work: a lane that issues their batches on one stream.

A transfer consists of steps, and each step issues one batch of messages. When do the later batches of a
transfer have to be issued? The host decides this, and the answer depends on the device:

* **Many connections** (CUDA's default). Work of different streams waits in different hardware queues. All
  batches are issued at the start of the transfer. The transfer then makes progress on its own, whatever the
  host does next.
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

from collections import deque
from collections.abc import Generator, Iterable
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fssdp.collectives.transfer_lane import Results, TransferTiming

Steps = Generator[None, None, Results]
"""A transfer that stops after each batch that it has issued, and returns its results at the end."""


class StreamTimer:
    """Times of a transfer on a CUDA stream, measured by events.

    Attributes:
        begin: Event on the transfer's stream before the transfer.
        done: Event on the transfer's stream after the transfer. With one connection it is issued by the
            wait, so that the transfer seems to last until the wait if it has ended before.
        asked: Event on the waiting stream at the moment of the wait; ``None`` if no stream has waited.
    """

    def __init__(self) -> None:
        self.begin = torch.cuda.Event(enable_timing=True)
        self.done = torch.cuda.Event(enable_timing=True)
        self.asked: torch.cuda.Event | None = None

    def timing(self) -> TransferTiming:
        """Times on the device; the exposed time is zero if no stream waited."""
        self.done.synchronize()
        busy_s = self.begin.elapsed_time(self.done) / 1e3
        if self.asked is None:
            return TransferTiming(busy_s)
        self.asked.synchronize()
        exposed_s = self.asked.elapsed_time(self.done) / 1e3
        return TransferTiming(busy_s, min(busy_s, max(0.0, exposed_s)))


class StreamTransfer:
    """A transfer on a :class:`StreamLane`.

    It keeps the caller's tensors alive until the wait. After the wait, the waiting stream is ordered behind
    the transfer, so memory that belongs to this stream can be given back without ``record_stream``. Under
    Megatron's combined 1F1B schedule, the memory can belong to another stream than the waiting one, on which
    its use is then recorded.

    Args:
        lane: Lane on which the transfer runs.
        steps: The transfer.
        num_batches: Number of its batches, equal on all ranks.
        at_once: Most batches to issue at one point; ``None`` issues everything at the first one.
        touched: Tensors that the transfer reads or writes, results included.
    """

    def __init__(
        self,
        lane: "StreamLane",
        steps: Steps,
        num_batches: int,
        at_once: int | None,
        touched: Iterable[Tensor],
    ) -> None:
        self.timer = StreamTimer()
        self.num_issued = 0
        self._lane, self._steps, self._touched = lane, steps, tuple(touched)
        self._num_batches, self._at_once = num_batches, at_once
        self._submitted_on = torch.cuda.current_stream(lane.device)
        self._ready = self._submitted_on.record_event()
        self._results: Results | None = None

    @property
    def is_complete(self) -> bool:
        """Whether everything has been issued, together with the event that ends the transfer."""
        return self._results is not None

    def issue(self) -> None:
        """Issue the batches of one point. With one connection, the end of the transfer is left to the wait.

        The end waits for the last batch on the transfer's stream. In the one queue of the device, this would
        hold up everything behind it.
        """
        if self._at_once is None:
            self.issue_all()
        else:
            for _ in range(min(self._at_once, self._num_batches - self.num_issued)):
                self._issue_next()

    def issue_all(self) -> None:
        """Issue all remaining batches, and the event that ends the transfer."""
        while not self.is_complete:
            self._issue_next()

    @property
    def has_batches(self) -> bool:
        """Whether some batches have not been issued."""
        return self.num_issued < self._num_batches

    def _issue_next(self) -> None:
        stream = self._lane.stream
        with torch.cuda.stream(stream), torch.no_grad():
            if not self.num_issued:
                stream.wait_event(self._ready)
                self.timer.begin.record(stream)
            try:
                next(self._steps)
                self.num_issued += 1
            except StopIteration as end:
                self._results = end.value
                self.timer.done.record(stream)

    def wait(self) -> Results:
        """Make the current stream wait for the transfer, and return the results; the host does not wait."""
        self._lane.issue_through(self)
        assert self._results is not None
        stream = torch.cuda.current_stream(self._lane.device)
        asked = torch.cuda.Event(enable_timing=True)
        asked.record(stream)
        self.timer.asked = asked
        stream.wait_event(self.timer.done)
        if {self._submitted_on, stream} != {torch.cuda.default_stream(self._lane.device)}:
            for tensor in self._touched:
                tensor.record_stream(stream)
        self._touched = ()
        return self._results


class StreamLane:
    """Issues the transfers of one process group on one CUDA stream, in the order of their submission.

    Args:
        group: Process group of the transfers.
        device: CUDA device of the tensors.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.device = device
        self._group = group
        self._open: deque[StreamTransfer] = deque()

    @property
    def stream(self) -> torch.cuda.Stream:
        """The stream of the transfers."""
        return lane_stream("transfers", self._group, self.device)

    def submit(
        self, steps: Steps, num_batches: int, at_once: int | None, touched: Iterable[Tensor]
    ) -> StreamTransfer:
        """Begin a transfer, to run after all work that is on the current stream now.

        Args:
            steps: The transfer.
            num_batches: Number of its batches, equal on all ranks.
            at_once: Most batches to issue at one point; ``None`` issues everything now.
            touched: Tensors of the caller that the transfer reads or writes, results included. They must
                belong to the stream that waits for the transfer.
        """
        transfer = StreamTransfer(self, steps, num_batches, at_once, touched)
        if at_once is None:
            while self._open:
                self._open.popleft().issue_all()
            transfer.issue_all()
        else:
            self._open.append(transfer)
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
        while not transfer.is_complete:
            self._open.popleft().issue_all()


_lanes: WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, StreamLane]] = WeakKeyDictionary()
_Key = tuple[str, torch.device, type[torch.cuda.Stream]]
_streams: WeakKeyDictionary[dist.ProcessGroup, dict[_Key, torch.cuda.Stream]] = WeakKeyDictionary()


def lane_stream(use: str, group: dist.ProcessGroup, device: torch.device) -> torch.cuda.Stream:
    """The stream of one kind of use of a process group on a device; it is created at the first call.

    Torch hands out streams from a pool of 32 and begins again after the last one. A new stream for each
    transfer would soon be that of an earlier transfer or of another library.

    Args:
        use: Kind of use. Work of different kinds runs side by side.
        group: Process group whose messages the stream carries.
        device: CUDA device of the stream.
    """
    streams = _streams.setdefault(group, {})
    # Tests replace the class by that of a virtual device, whose streams serve that device alone.
    key = (use, device, torch.cuda.Stream)
    if key not in streams:
        streams[key] = torch.cuda.Stream(device)
    return streams[key]


def stream_lane(group: dist.ProcessGroup, device: torch.device) -> StreamLane:
    """The lane of a process group's transfers on a CUDA device; it is created at the first call."""
    lanes = _lanes.setdefault(group, {})
    if device not in lanes:
        lanes[device] = StreamLane(group, device)
    return lanes[device]


def advance_transfers(group: dist.ProcessGroup) -> None:
    """Mark a point of the program, at which the group's transfers issue their next batches.

    All ranks of the group must call it at the same points. It does nothing for CPU tensors, whose transfers a
    thread drives, and nothing if everything has been issued.
    """
    for lane in _lanes.get(group, {}).values():
        lane.advance()
