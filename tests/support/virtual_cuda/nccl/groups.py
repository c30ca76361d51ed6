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

from tests.support.virtual_cuda.books.findings import EventKind, FindingKind
from tests.support.virtual_cuda.books.virtual_device import VirtualDevice
from tests.support.virtual_cuda.nccl.backends import Backends, CoalescingBackend
from tests.support.virtual_cuda.nccl.collectives import COLLECTIVES, Collective
from tests.support.virtual_cuda.nccl.work import (
    CoalescedWork,
    VirtualWork,
    run_on_copies,
    start_message,
)
from tests.support.virtual_cuda.posing.patches import Patches


@dataclass
class _Communicator:
    """A communicator of NCCL.

    Attributes:
        stream: Number of its stream.
        coalesced: The operations that are being coalesced; None outside of coalescing.
    """

    stream: int
    coalesced: CoalescedWork | None = None


class NcclGroups:
    """The process groups of a virtual device."""

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
        return CoalescingBackend() if is_nccl else self._originals["_get_backend"](group, device)

    # ---------------------------------------------------------------- collectives

    def _method(self, method: str, collective: Collective) -> Callable[..., Any]:
        """What replaces a method of process groups."""

        def call(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            original = self._originals[method]
            reads, writes = collective.touched(group, *args, **kwargs)
            if not self._backends.is_nccl(group):
                return self._on_gloo(
                    collective.name, reads, writes, partial(original, group, *args, **kwargs)
                )

            def on_gloo(*args: Any, **kwargs: Any) -> None:
                if collective.run is None:
                    original(group, *args, **kwargs).wait()
                else:
                    collective.run(self._originals, group, *args, **kwargs)

            self._check(collective.name, [*reads, *writes])
            run = partial(run_on_copies, on_gloo, writes, args, kwargs)
            is_async = all(getattr(option, "asyncOp", True) for option in (*args, *kwargs.values()))
            communicator = self._communicator(group)
            if communicator.coalesced is None:
                stops = method == "barrier"
                return self._issue(
                    communicator, collective.name, reads, writes, run, is_async=is_async, stops_host=stops
                )
            communicator.coalesced.reads += reads
            communicator.coalesced.writes += writes
            communicator.coalesced.collectives.append(run)
            communicator.coalesced.is_async |= is_async
            return None

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

    def _issue(
        self,
        communicator: _Communicator,
        name: str,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        run: Callable[[], None],
        *,
        is_async: bool,
        kind: EventKind = EventKind.COLLECTIVE,
        num_messages: int = 0,
        stops_host: bool = False,
    ) -> VirtualWork | None:
        """Note an operation of a communicator, and do it."""
        books = self._books
        stream = communicator.stream if is_async else books.current_stream
        if is_async:
            books.order.wait(stream, books.snapshot(books.current_stream))
        num_bytes = sum(tensor.nbytes for tensor in _without_repetition([*reads, *writes]))
        books.launch(
            name, reads, writes, actor=stream, kind=kind, num_bytes=num_bytes, num_messages=num_messages
        )
        run()
        if is_async:
            # Torch keeps the tensors alive until a stream waits, also without a handle.
            books.unfinished.finish_later(stream, [*reads, *writes].clear)
            return VirtualWork(books, books.order.snapshot(stream), stops_host=stops_host)
        if stops_host:
            books.host_sync(name)
        return None

    def _communicator(self, group: ProcessGroup, pair: str = "") -> _Communicator:
        key = group.group_name + pair
        if key not in self._communicators:
            described = group.group_desc not in ("", "undefined")
            name = f"the NCCL stream of group {group.group_desc if described else group.group_name}{pair}"
            self._communicators[key] = _Communicator(self._books.add_stream(name))
        return self._communicators[key]

    def _check(self, name: str, tensors: Sequence[Tensor]) -> None:
        if any(not self._books.holds(tensor) for tensor in tensors):
            self._books.found.in_nccl(FindingKind.NCCL_CPU, name)
        if any(not tensor.is_contiguous() for tensor in tensors):
            self._books.found.in_nccl(FindingKind.NCCL_NOT_CONTIGUOUS, name)

    # ---------------------------------------------------------------- messages

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
        self._check(direction, tensors)
        start = partial(start_message, self._originals, group, direction, tensors[0], peer)
        coalesced = self._communicator(group).coalesced
        if coalesced is None:
            return self._single_message(direction, group, reads, writes, peer, start)
        coalesced.reads += reads
        coalesced.writes += writes
        (coalesced.sends if direction == "send" else coalesced.receives).append(start)
        coalesced.is_async = True
        return None

    def _single_message(
        self,
        direction: str,
        group: ProcessGroup,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        peer: int,
        start: Callable[[], Callable[[], None]],
    ) -> Any:
        """A message outside of a batch, which waits for the other rank only when a stream waits for it."""
        first, second = sorted((group.rank(), peer))
        communicator = self._communicator(group, f", ranks {first} and {second}")
        finishes: list[Callable[[], None]] = []
        work = self._issue(
            communicator,
            direction,
            reads,
            writes,
            lambda: finishes.append(start()),
            is_async=True,
            kind=EventKind.P2P_BATCH,
            num_messages=1,
        )
        self._books.unfinished.finish_later(communicator.stream, finishes[0])
        return work

    def _start_coalescing(self, group: ProcessGroup, device: torch.device) -> None:
        if self._backends.is_nccl(group):
            self._communicator(group).coalesced = CoalescedWork()
        else:
            self._originals["_start_coalescing"](group, device)

    def _end_coalescing(self, group: ProcessGroup, device: torch.device) -> Any:
        if not self._backends.is_nccl(group):
            return self._originals["_end_coalescing"](group, device)
        communicator = self._communicator(group)
        coalesced, communicator.coalesced = communicator.coalesced, None
        assert coalesced is not None
        is_p2p = coalesced.num_messages > 0
        return self._issue(
            communicator,
            "batch of messages" if is_p2p else "coalesced collectives",
            coalesced.reads,
            coalesced.writes,
            coalesced.run,
            is_async=coalesced.is_async,
            kind=EventKind.P2P_BATCH if is_p2p else EventKind.COLLECTIVE,
            num_messages=coalesced.num_messages,
        )


def _as_method(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        return function(group, *args, **kwargs)

    return method


def _without_repetition(tensors: Sequence[Tensor]) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())
