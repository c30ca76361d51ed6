"""The books of a virtual CUDA device: order between streams, memory, findings and a log."""

import threading
from collections.abc import Iterable

import torch
from torch import Tensor

from devtools.virtual_cuda.books.code_place import code_place
from devtools.virtual_cuda.books.device_log import DeviceLog, name_of, new_stream
from devtools.virtual_cuda.books.finding_list import FindingList
from devtools.virtual_cuda.books.findings import EventKind, Finding
from devtools.virtual_cuda.books.memory_blocks import Access, Block, MemoryBlocks, byte_range
from devtools.virtual_cuda.books.stream_order import (
    DEFAULT_STREAM,
    HOST,
    Clock,
    StreamOrder,
    UnfinishedWork,
)

_current: list["VirtualDevice"] = []


def current_device() -> "VirtualDevice":
    if not _current:
        raise RuntimeError("virtual_cuda: a stream or an event was used outside of `with virtual_cuda()`")
    return _current[-1]


class VirtualDevice(DeviceLog):
    """What happened on a virtual CUDA device, and which defects it showed."""

    def __init__(self, capability: tuple[int, int], num_devices: int, total_memory: int) -> None:
        super().__init__(lambda: self.current_stream)
        self.capability = capability
        self.num_devices = num_devices
        self.total_memory = total_memory
        self.index = 0  # torch.cuda.set_device changes it.
        self.order = StreamOrder()
        self.memory = MemoryBlocks()
        self.found = FindingList()
        self._current = threading.local()
        self.unfinished = UnfinishedWork(self.order)

    def __enter__(self) -> "VirtualDevice":
        if _current:
            raise RuntimeError("virtual_cuda: there is a virtual device already; leave it first")
        _current.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _current.remove(self)

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.index)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All defects so far, in the order in which they were found."""
        self.notice_freed_memory()
        return self.found.all

    def assert_clean(self) -> None:
        findings = self.findings
        lines = "\n".join(f"{number}. {finding}" for number, finding in enumerate(findings, 1))
        assert not findings, f"the virtual device has {len(findings)} findings, wanted none:\n{lines}"

    @property
    def current_stack(self) -> list[int]:
        """Numbers of this thread's current streams; the last one is current."""
        stack: list[int] = self._current.__dict__.setdefault("streams", [DEFAULT_STREAM])
        return stack

    @property
    def host_factory(self) -> bool:
        """Whether Python code calls a function in this thread now that makes a tensor on the host."""
        return bool(self._current.__dict__.get("host_factory"))

    @host_factory.setter
    def host_factory(self, calls: bool) -> None:
        self._current.host_factory = calls

    @property
    def current_stream(self) -> int:
        return self.current_stack[-1]

    def add_stream(self, name: str = "") -> int:
        place = code_place()
        name = name or f"the stream made at [{place.split(' < ')[0]}]"
        stream = new_stream(name, self.order.streams)
        self.order.add_stream(stream)
        self.log(EventKind.STREAM_MADE, name_of(stream), stream, place)
        return stream

    def know_stream(self, stream: int) -> int:
        """Return the number of a stream; a program may have made it on an earlier virtual device."""
        self.order.add_stream(stream)
        return stream

    def wait(self, stream: int, clock: Clock) -> None:
        """Make a stream wait for an event that has this clock."""
        self.notice_freed_memory()
        self.log(EventKind.STREAM_WAIT, "wait", stream)
        self.order.wait(stream, clock)
        self.unfinished.finish_known(stream)

    def snapshot(self, stream: int) -> Clock:
        self.notice_freed_memory()
        return self.order.snapshot(stream)

    def host_sync(self, operation: str, clock: Clock | None = None) -> None:
        """Note that the host waits for an event, or for the current stream if no clock is given."""
        if clock is not None and self.order.knows(HOST, clock):
            return
        self.log(EventKind.HOST_SYNC, operation)
        self.host_knows(self.order.snapshot(self.current_stream) if clock is None else clock)

    def synchronize(self) -> None:
        self.notice_freed_memory()
        self.log(EventKind.HOST_SYNC, "device.synchronize")
        self.order.wait_for_all_streams()
        self.unfinished.finish_known(HOST)

    def host_knows(self, clock: Clock) -> None:
        """Note that the host has seen that an event is complete, without waiting for it."""
        self.notice_freed_memory()
        self.order.wait(HOST, clock)
        self.unfinished.finish_known(HOST)

    def finish_all(self) -> None:
        self.notice_freed_memory()
        self.order.wait_for_all_streams()
        self.unfinished.finish_all()

    def launch(
        self,
        operation: str,
        reads: Iterable[Tensor] = (),
        writes: Iterable[Tensor] = (),
        *,
        actor: int | None = None,
        kind: EventKind | None = EventKind.OPERATOR,
        **numbers: int,
    ) -> None:
        """Note an operation of a stream (or ``HOST``), and check what it reads and writes.

        The current stream is the default. Without a kind, the log gets no entry; ``numbers`` are the bytes
        and messages of the entry.
        """
        self.notice_freed_memory()
        actor = self.current_stream if actor is None else actor
        place = code_place()
        number = self.order.launch(actor)
        if kind is not None:
            self.log(kind, operation, actor, place, **numbers)
        for tensors, is_write in ((reads, False), (writes, True)):
            for tensor in tensors:
                self._access(tensor, is_write, actor, number, operation, place)

    def _access(
        self, tensor: Tensor, is_write: bool, actor: int, number: int, operation: str, place: str
    ) -> None:
        block = self.memory.of(tensor)
        if block is None or not tensor.numel():
            return
        if block.is_free:
            self.found.use_after_free(operation, block)
            return
        access = Access(*byte_range(tensor), is_write, actor, number, operation, place)
        for earlier in block.conflicts(access, self.order.is_ordered):
            self.found.race(access, earlier, block)
        block.add(access)

    def allocate(self, tensor: Tensor, *, is_pinned: bool = False) -> None:
        self.memory.add(tensor.untyped_storage(), self.current_stream, code_place(), is_pinned=is_pinned)

    def holds(self, tensor: Tensor) -> bool:
        block = self.memory.of(tensor)
        return block is not None and not block.is_pinned

    def holds_pinned(self, tensor: Tensor) -> bool:
        block = self.memory.of(tensor)
        return block is not None and block.is_pinned

    def record_stream(self, tensor: Tensor, stream: int) -> None:
        """Note that the memory of a tensor is not reused before the work on a stream is complete."""
        self.log(EventKind.RECORD_STREAM, "record_stream", stream)
        block = self.memory.of(tensor)
        if block is not None:
            block.recorded.add(stream)

    def notice_freed_memory(self) -> None:
        """Check the memory that was given back since the last call."""
        for block in self.memory.take_expired():
            self.give_back(block)

    def give_back(self, block: Block) -> None:
        """Check that the streams that have used a block are ordered before all later uses of its memory.

        The rule is strict: the stream of the memory must have waited when the memory is given back, not only
        when it gets its next work. Otherwise the code would be right only until somebody adds an operator.
        """
        if block.is_free:
            return
        self.memory.give_back(block)
        if block.is_pinned:
            return  # The allocator of page-locked memory waits for all streams that use it.
        known = self.order.completed_before_reuse(block.stream, block.recorded)
        for actor, access in block.last.items():
            if actor != block.stream and known.get(actor, 0) < access.number:
                self.found.freed_in_use(block, access, code_place())

    def refuse_freed(self, operation: str, tensor: Tensor) -> None:
        """Report an operator on memory that was given back, and end it: there is nothing to compute with."""
        block = self.memory.of(tensor)
        if block is not None and block.is_free and tensor.numel():
            raise RuntimeError(f"virtual_cuda: {self.found.use_after_free(operation, block)}")
