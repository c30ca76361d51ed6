"""The books of a virtual CUDA device: order between streams, memory, findings and a log."""

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from megatron_fssdp.testing.virtual_cuda.code_place import code_place
from megatron_fssdp.testing.virtual_cuda.findings import DeviceEvent, EventKind, Finding, FindingKind
from megatron_fssdp.testing.virtual_cuda.memory_blocks import Access, Block, MemoryBlocks, byte_range
from megatron_fssdp.testing.virtual_cuda.stream_order import DEFAULT_STREAM, HOST, Clock, StreamOrder

_stream_numbers = itertools.count(DEFAULT_STREAM + 1)
_names: dict[int, str] = {}
_current: list["VirtualDevice"] = []


def current_device() -> "VirtualDevice":
    """The virtual device of this process.

    Raises:
        RuntimeError: The code is not inside ``with virtual_cuda()``.
    """
    if not _current:
        raise RuntimeError("virtual_cuda: a stream or an event was used outside of `with virtual_cuda()`")
    return _current[-1]


class VirtualDevice:
    """What happened on a virtual CUDA device, and which defects it showed.

    Attributes:
        capability: Compute capability, as (major, minor).
        num_devices: Number of devices that ``torch.cuda.device_count()`` reports.
        total_memory: Bytes that ``torch.cuda.mem_get_info()`` reports as the size of the device's memory.
        index: Index of the current device; ``torch.cuda.set_device`` changes it.
        order: Order between the work on streams and on the host.
        memory: Allocations of the device and page-locked allocations of the host.
        events: Log of everything that was issued, in order.
        host_factory: Whether Python code calls a function now that makes a tensor on the host.
        ignores_record_stream: Set it to find out whether the code under test depends on ``record_stream``.
    """

    def __init__(self, capability: tuple[int, int], num_devices: int, total_memory: int) -> None:
        self.capability = capability
        self.num_devices = num_devices
        self.total_memory = total_memory
        self.index = 0
        self.order = StreamOrder()
        self.memory = MemoryBlocks()
        self.events: list[DeviceEvent] = []
        self.host_factory = False
        self.ignores_record_stream = False
        self._findings: dict[tuple[str, ...], Finding] = {}
        self._stream_names = {HOST: "the host", DEFAULT_STREAM: "the default stream"}
        self._current = threading.local()
        self._unfinished: list[tuple[int, int, Callable[[], object]]] = []

    def __enter__(self) -> "VirtualDevice":
        if _current:
            raise RuntimeError("virtual_cuda: there is a virtual device already; leave it first")
        _current.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _current.remove(self)

    @property
    def device(self) -> torch.device:
        """The current device, such as ``cuda:0``."""
        return torch.device("cuda", self.index)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All defects so far, in the order in which they were found."""
        self.notice_freed_memory()
        return tuple(self._findings.values())

    @property
    def host_syncs(self) -> tuple[DeviceEvent, ...]:
        """All points at which the host waited for the device, in order, with their places."""
        return self.events_of(EventKind.HOST_SYNC)

    @property
    def counts(self) -> Counter[str]:
        """Number of log entries by kind, and of operators by stream (``operators on <stream>``)."""
        counts: Counter[str] = Counter()
        for event in self.events:
            counts[event.kind.value] += 1
            if event.kind is EventKind.OPERATOR:
                counts[f"operators on {event.stream}"] += 1
        return counts

    def events_of(self, *kinds: EventKind) -> tuple[DeviceEvent, ...]:
        """Log entries of some kinds, in order."""
        return tuple(event for event in self.events if event.kind in kinds)

    def mark(self, text: str) -> None:
        """Put an entry into the log, so that a budget can be counted from here."""
        self.log(EventKind.MARK, text)

    def assert_clean(self) -> None:
        """Raise an error that lists all findings.

        Raises:
            AssertionError: There are findings.
        """
        findings = self.findings
        if findings:
            lines = "\n".join(f"{i + 1}. {finding}" for i, finding in enumerate(findings))
            raise AssertionError(f"the virtual device has {len(findings)} findings, wanted none:\n{lines}")

    # ---------------------------------------------------------------- streams

    @property
    def current_stack(self) -> list[int]:
        """Numbers of this thread's current streams; the last one is current."""
        if not hasattr(self._current, "streams"):
            self._current.streams = [DEFAULT_STREAM]
        streams: list[int] = self._current.streams
        return streams

    @property
    def current_stream(self) -> int:
        """Number of this thread's current stream."""
        return self.current_stack[-1]

    def add_stream(self, name: str = "") -> int:
        """Number of a new stream."""
        stream, place = next(_stream_numbers), code_place()
        name = name or f"the stream made at [{place.split(' < ')[0]}]"
        num_before = sum(other.startswith(name) for other in self._stream_names.values())
        self._name_stream(stream, f"{name} ({num_before + 1})" if num_before else name)
        self.log(EventKind.STREAM_MADE, name, stream, place)
        return stream

    def _name_stream(self, stream: int, name: str) -> None:
        self.order.add_stream(stream)
        self._stream_names[stream] = _names[stream] = name

    def know_stream(self, stream: int) -> int:
        """Return the number of a stream; a program may have made it on an earlier virtual device."""
        if stream not in self._stream_names:
            self._name_stream(stream, _names[stream])
        return stream

    def name_of(self, actor: int) -> str:
        """Name of a stream, or of the host."""
        return self._stream_names[actor]

    def wait(self, stream: int, clock: Clock) -> None:
        """Make a stream wait for an event that has this clock."""
        self.notice_freed_memory()
        self.log(EventKind.STREAM_WAIT, "wait", stream)
        self.order.wait(stream, clock)
        self._finish_known(stream)

    def snapshot(self, stream: int) -> Clock:
        """Clock of an event that is recorded on a stream now."""
        self.notice_freed_memory()
        return self.order.snapshot(stream)

    def host_sync(self, what: str, clock: Clock | None = None) -> None:
        """Note that the host waits for an event, or for the current stream if no clock is given."""
        self.notice_freed_memory()
        if clock is None:
            clock = self.order.snapshot(self.current_stream)
        elif self.order.knows(HOST, clock):
            return
        self.log(EventKind.HOST_SYNC, what)
        self.order.wait(HOST, clock)
        self._finish_known(HOST)

    def synchronize(self) -> None:
        """Make the host wait for all streams."""
        self.notice_freed_memory()
        self.log(EventKind.HOST_SYNC, "device.synchronize")
        self.order.wait_for_all_streams()
        self._finish_known(HOST)

    def host_knows(self, clock: Clock) -> None:
        """Note that the host has seen that an event is complete, without waiting for it."""
        self.notice_freed_memory()
        self.order.wait(HOST, clock)
        self._finish_known(HOST)

    def finish_later(self, stream: int, finish: Callable[[], object]) -> None:
        """Call a function when something waits for the last operation of a stream, or at the end."""
        self._unfinished.append((stream, self.order.num_operations, finish))

    def finish_all(self) -> None:
        """Let everything that was issued come to its end."""
        self.notice_freed_memory()
        self.order.wait_for_all_streams()
        while self._unfinished:
            self._unfinished.pop(0)[-1]()

    def _finish_known(self, actor: int) -> None:
        """Call the functions of the operations that are complete for a stream or for the host."""
        known = [
            entry
            for entry in self._unfinished
            if entry[0] != actor and self.order.is_ordered(actor, entry[0], entry[1])
        ]
        for entry in known:
            self._unfinished.remove(entry)
            entry[-1]()

    # ---------------------------------------------------------------- work

    def log(
        self,
        kind: EventKind,
        what: str,
        stream: int | None = None,
        place: str = "",
        num_bytes: int = 0,
        num_messages: int = 0,
    ) -> None:
        """Add an entry to the log."""
        stream = self.current_stream if stream is None else stream
        entry = DeviceEvent(kind, what, self.name_of(stream), place or code_place(), num_bytes, num_messages)
        self.events.append(entry)

    def launch(
        self,
        what: str,
        reads: Iterable[Tensor] = (),
        writes: Iterable[Tensor] = (),
        *,
        actor: int | None = None,
        kind: EventKind | None = EventKind.OPERATOR,
        num_bytes: int = 0,
        num_messages: int = 0,
    ) -> None:
        """Note an operation of a stream or of the host, and check what it reads and writes.

        Args:
            what: Name of the operation.
            reads: Tensors that it reads.
            writes: Tensors that it writes.
            actor: Number of the stream, or ``HOST``; the current stream if it is left out.
            kind: Kind of the log entry; None for no entry.
            num_bytes: Bytes for the log entry.
            num_messages: Messages for the log entry.
        """
        self.notice_freed_memory()
        actor = self.current_stream if actor is None else actor
        place = code_place()
        number = self.order.launch(actor)
        if kind is not None:
            self.log(kind, what, actor, place, num_bytes, num_messages)
        for tensors, is_write in ((reads, False), (writes, True)):
            for tensor in tensors:
                self._access(tensor, is_write, actor, number, what, place)

    def _access(self, tensor: Tensor, is_write: bool, actor: int, number: int, what: str, place: str) -> None:
        block = self.memory.of(tensor)
        if block is None or not tensor.numel():
            return
        access = Access(*byte_range(tensor), is_write, actor, number, what, place)
        if block.is_free:
            self._find(FindingKind.USE_AFTER_FREE, self._told(access), place, memory_place=block.place)
            return
        for other in block.conflicts(access, self.order.is_ordered):
            self._find(
                FindingKind.RACE,
                self._told(access),
                place,
                self._told(other),
                other.place,
                block.place,
            )
        block.add(access)

    # ---------------------------------------------------------------- memory

    def allocate(self, tensor: Tensor, *, is_pinned: bool = False) -> None:
        """Make a tensor's storage one of the device, or page-locked memory of the host."""
        self.memory.add(tensor.untyped_storage(), self.current_stream, code_place(), is_pinned=is_pinned)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is on the device."""
        block = self.memory.of(tensor)
        return block is not None and not block.is_pinned

    def holds_pinned(self, tensor: Tensor) -> bool:
        """Whether a tensor is in page-locked memory of the host."""
        block = self.memory.of(tensor)
        return block is not None and block.is_pinned

    def record_stream(self, tensor: Tensor, stream: int) -> None:
        """Note that the memory of a tensor is not reused before the work on a stream is complete."""
        self.log(EventKind.RECORD_STREAM, "record_stream", stream)
        block = self.memory.of(tensor)
        if block is not None and not self.ignores_record_stream:
            block.recorded.add(stream)

    def notice_freed_memory(self) -> None:
        """Check the memory that was given back since the last call."""
        for block in self.memory.take_expired():
            self.give_back(block)

    def give_back(self, block: Block) -> None:
        """Check that the streams that use a block are ordered before any later use of its memory."""
        if block.is_free:
            return
        self.memory.give_back(block)
        if block.is_pinned:
            return  # The allocator of page-locked memory waits for all streams that use it.
        known = self.order.completed_before_reuse(block.stream, block.recorded)
        for actor, access in block.last.items():
            if actor != block.stream and known.get(actor, 0) < access.number:
                self._find(
                    FindingKind.FREED_IN_USE,
                    f"end of memory of {self.name_of(block.stream)} (record_stream or a wait is missing)",
                    code_place(),
                    self._told(access),
                    access.place,
                    block.place,
                )

    # ---------------------------------------------------------------- findings

    def find_mix(self, what: str, argument: str) -> None:
        """Report a CPU tensor among CUDA tensors."""
        self._find(FindingKind.DEVICE_MIX, f"argument {argument!r} of {what}", code_place())

    def find_in_nccl(self, kind: FindingKind, what: str) -> None:
        """Report a tensor that NCCL does not accept."""
        self._find(kind, what, code_place())

    def _told(self, access: Access) -> str:
        verb = "write" if access.writes else "read"
        return f"{verb} by {self.name_of(access.actor)} ({access.what})"

    def _find(
        self,
        kind: FindingKind,
        what: str,
        place: str,
        other: str = "",
        other_place: str = "",
        memory_place: str = "",
    ) -> None:
        # One defect often shows in many operations of the same lines; the first one is reported.
        lines = [text.split(" < ")[0] for text in (place, other_place, memory_place)]
        if kind is FindingKind.FREED_IN_USE:
            lines[0] = ""  # The place at which the end of a tensor is noticed depends on what comes next.
        self._findings.setdefault(
            (kind, *lines), Finding(kind, what, place, other, other_place, memory_place)
        )
