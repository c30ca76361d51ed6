"""NCCL on gloo: process groups take tensors of the virtual device, and the order of their work is noted.

This is the model of NCCL. A group has one communicator, which has one stream and does its work in the order
of issue. A call with ``async_op=True`` runs on the communicator's stream, after the work that is on the
current stream; ``wait()`` makes the current stream wait. A call with ``async_op=False`` runs on the current
stream. The tensors are kept alive until the wait. A message outside of a batch has a communicator of its two
ranks. Data moves over gloo at once, in the order of issue, which is the strictest order that a GPU may
choose. Only a message outside of a batch moves when some stream waits for it. NCCL also keeps the calls of
one communicator in order if they run on different streams. Code under test must not depend on that: the order
is not noted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import _disable_current_modes

from devtools.virtual_cuda.books.findings import EventKind, FindingKind
from devtools.virtual_cuda.books.virtual_device import VirtualDevice
from devtools.virtual_cuda.nccl.backends import Backends
from devtools.virtual_cuda.nccl.collectives import COLLECTIVES, Collective
from devtools.virtual_cuda.nccl.work import Operation, VirtualWork, run_on_copies, start_message
from devtools.virtual_cuda.posing.patches import Patches


@dataclass
class _Communicator:
    """A communicator of NCCL: its stream, and the operations that are being coalesced, if any."""

    stream: int
    coalesced: Operation | None = None


class NcclGroups:
    def __init__(self, books: VirtualDevice) -> None:
        self._books = books
        self._communicators: dict[str, _Communicator] = {}
        self._backends = Backends()
        self._originals: dict[str, Callable[..., Any]] = {}

    def install(self, patches: Patches) -> None:
        """Replace the methods of process groups, and functions that make groups or ask for their backend."""
        methods: dict[str, Any] = {
            name: self._method(name, collective)
            for name, collective in COLLECTIVES.items()
            if hasattr(ProcessGroup, name)
        }
        methods |= {
            "send": partial(self._message, "send"),
            "recv": partial(self._message, "recv"),
            "recv_anysource": self._recv_anysource,
            "_start_coalescing": self._start_coalescing,
            "_end_coalescing": self._end_coalescing,
            "_get_backend": self._get_backend,
        }
        self._originals = {name: getattr(ProcessGroup, name) for name in methods}
        # A function becomes a method; a bound method would not receive the group.
        patches.put(ProcessGroup, {name: _as_method(method) for name, method in methods.items()})
        self._backends.install(patches)

    def _get_backend(self, group: ProcessGroup, device: torch.device) -> Any:
        is_nccl = self._backends.is_nccl(group)
        return self._backends.of_nccl(group) if is_nccl else self._originals["_get_backend"](group, device)

    def _method(self, method: str, collective: Collective) -> Callable[..., Any]:
        def call(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            original = self._originals[method]
            reads, writes = collective.touched(group, *args, **kwargs)
            if not self._backends.is_nccl(group):
                whole = partial(original, group, *args, **kwargs)
                return self._on_gloo(collective.name, reads, writes, whole)

            def on_gloo(*args: Any, **kwargs: Any) -> None:
                if collective.run is None:
                    original(group, *args, **kwargs).wait()
                else:
                    collective.run(self._originals, group, *args, **kwargs)

            operation = Operation(collective.name, [*reads], [*writes])
            operation.others.append(partial(run_on_copies, on_gloo, writes, args, kwargs))
            operation.is_async = all(getattr(value, "asyncOp", True) for value in (*args, *kwargs.values()))
            operation.stops_host = method == "barrier"
            return self._add(group, operation, self._communicator(group))

        return call

    def _on_gloo(
        self, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor], call: Callable[[], Any]
    ) -> Any:
        """A call of a gloo group, which copies tensors of the device to the host and back."""
        reads, writes = (
            [tensor for tensor in tensors if self._books.holds(tensor)] for tensors in (reads, writes)
        )
        if reads or writes:
            self._books.launch(f"{name} (gloo)", reads, writes)
            self._books.host_sync(f"{name} (gloo)")
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return call()

    def _add(self, group: ProcessGroup, operation: Operation, communicator: _Communicator) -> Any:
        """Do an operation, or keep it for the end of coalescing."""
        tensors = [*operation.reads, *operation.writes]
        if any(not self._books.holds(tensor) for tensor in tensors):
            self._books.found.wrong_tensor(FindingKind.NCCL_CPU, operation.name)
        if any(not tensor.is_contiguous() for tensor in tensors):
            self._books.found.wrong_tensor(FindingKind.NCCL_NOT_CONTIGUOUS, operation.name)
        coalesced = self._communicator(group).coalesced
        if coalesced is None:
            return self._issue(communicator, operation)
        coalesced.add(operation)
        return None

    def _issue(self, communicator: _Communicator, operation: Operation) -> VirtualWork | None:
        """Note an operation of a communicator, and do it."""
        books, tensors = self._books, [*operation.reads, *operation.writes]
        stream = communicator.stream if operation.is_async else books.current_stream
        if operation.is_async:
            books.order.wait(stream, books.snapshot(books.current_stream))
        books.launch(
            operation.name,
            operation.reads,
            operation.writes,
            actor=stream,
            kind=EventKind.P2P_BATCH if operation.num_messages else EventKind.COLLECTIVE,
            num_bytes=sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in tensors}.values()),
            num_messages=operation.num_messages,
        )
        finishes = operation.start()
        # A message outside of a batch waits for the other rank only when a stream waits for it.
        is_single = operation.name in ("send", "recv")
        for finish in () if is_single else finishes:
            finish()
        if operation.is_async:
            # Torch keeps the tensors alive until a stream waits, also without a handle.
            books.unfinished.finish_later(stream, tensors.clear)
            for finish in finishes if is_single else ():
                books.unfinished.finish_later(stream, finish)
            return VirtualWork(books, books.order.snapshot(stream), stops_host=operation.stops_host)
        if operation.stops_host:
            books.host_sync(operation.name)
        return None

    def _communicator(self, group: ProcessGroup, pair: str = "") -> _Communicator:
        key = group.group_name + pair
        if key not in self._communicators:
            described = group.group_desc not in ("", "undefined")
            name = f"the NCCL stream of group {group.group_desc if described else group.group_name}{pair}"
            self._communicators[key] = _Communicator(self._books.add_stream(name))
        return self._communicators[key]

    def _recv_anysource(self, group: ProcessGroup, tensors: Sequence[Tensor], tag: int = 0) -> Any:
        if self._backends.is_nccl(group):
            raise RuntimeError("NCCL cannot receive from any rank; name the sender")
        return self._originals["recv_anysource"](group, tensors, tag)

    def _message(
        self, direction: str, group: ProcessGroup, tensors: Sequence[Tensor], peer: int, tag: int = 0
    ) -> Any:
        reads, writes = (tensors, []) if direction == "send" else ([], tensors)
        if not self._backends.is_nccl(group):
            call = partial(self._originals[direction], group, tensors, peer, tag)
            return self._on_gloo(direction, reads, writes, call)
        start = partial(start_message, self._originals, group, direction, tensors[0], peer)
        operation = Operation(direction, [*reads], [*writes], num_messages=1, is_async=True)
        (operation.others if direction == "send" else operation.receives).append(start)
        first, second = sorted((group.rank(), peer))
        is_coalesced = self._communicator(group).coalesced is not None
        pair = "" if is_coalesced else f", ranks {first} and {second}"
        return self._add(group, operation, self._communicator(group, pair))

    def _start_coalescing(self, group: ProcessGroup, device: torch.device) -> None:
        if self._backends.is_nccl(group):
            self._communicator(group).coalesced = Operation()
        else:
            self._originals["_start_coalescing"](group, device)

    def _end_coalescing(self, group: ProcessGroup, device: torch.device) -> Any:
        if not self._backends.is_nccl(group):
            return self._originals["_end_coalescing"](group, device)
        communicator = self._communicator(group)
        coalesced, communicator.coalesced = communicator.coalesced, None
        assert coalesced is not None
        return self._issue(communicator, coalesced)


def _as_method(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        return function(group, *args, **kwargs)

    return method
