"""Handles of NCCL operations, and the gloo operations that move their data."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from tests.support.virtual_cuda.books.stream_order import Clock
from tests.support.virtual_cuda.books.virtual_device import VirtualDevice


class VirtualWork:
    """Replaces the handle of an NCCL operation."""

    def __init__(self, books: VirtualDevice, clock: Clock, *, stops_host: bool) -> None:
        self._books, self._clock, self._stops_host = books, clock, stops_host

    def wait(self, timeout: Any = None) -> bool:
        """Make the current stream wait for the operation; the host waits only for a barrier."""
        self._books.wait(self._books.current_stream, self._clock)
        if self._stops_host:
            self._books.host_sync("barrier")
        return True

    def synchronize(self) -> None:
        """Make the current stream wait for the operation."""
        self.wait()

    def block_current_stream(self) -> None:
        """Make the current stream wait for the operation."""
        self.wait()

    def is_completed(self) -> bool:
        """Return that the operation is complete; from then on the host knows it."""
        self._books.host_knows(self._clock)
        return True

    def is_success(self) -> bool:
        """Return that the operation has not failed."""
        return True

    def exception(self) -> None:
        """Return that there is no exception."""


@dataclass
class CoalescedWork:
    """Operations between the begin and the end of coalescing, which start together.

    Attributes:
        reads: Tensors that they read.
        writes: Tensors that they write.
        receives: Functions that start to receive, and return a function that waits.
        sends: Functions that start to send, and return a function that waits.
        collectives: Functions that do a collective and wait.
        is_async: Whether one of them was asked to run beside the current stream.
    """

    reads: list[Tensor] = field(default_factory=list)
    writes: list[Tensor] = field(default_factory=list)
    receives: list[Callable[[], Callable[[], None]]] = field(default_factory=list)
    sends: list[Callable[[], Callable[[], None]]] = field(default_factory=list)
    collectives: list[Callable[[], None]] = field(default_factory=list)
    is_async: bool = False

    @property
    def num_messages(self) -> int:
        """Number of messages, sent and received."""
        return len(self.receives) + len(self.sends)

    def run(self) -> None:
        """Do everything and wait."""
        for finish in [start() for start in (*self.receives, *self.sends)]:
            finish()
        for run in self.collectives:
            run()


def run_on_copies(
    run: Callable[..., None], writes: Sequence[Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Call a collective on copies of its tensors, and copy its results back.

    gloo's threads hold tensors a little longer than the call. With copies, the moment at which memory is
    given back does not depend on them.
    """
    copies: dict[int, Tensor] = {}

    def copy(value: Any) -> Any:
        if isinstance(value, Tensor):
            return copies.setdefault(id(value), value.detach().clone())
        return value

    with _disable_current_modes(), torch._C.DisableTorchFunction():
        copied_args, copied_kwargs = pytree.tree_map(copy, (tuple(args), dict(kwargs)))
        run(*copied_args, **copied_kwargs)
        for tensor in writes:
            tensor.data.copy_(copies[id(tensor)])


def start_message(
    originals: Mapping[str, Callable[..., Any]],
    group: ProcessGroup,
    direction: str,
    tensor: Tensor,
    peer: int,
) -> Callable[[], None]:
    """Start to send or to receive a copy of a tensor; the returned function waits and fills the tensor.

    NCCL ignores tags. It matches the messages between two ranks by their order.
    """
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        copy = tensor.detach().clone()
        work = originals[direction](group, [copy], peer, 0)

    def finish() -> None:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            work.wait()
            if direction == "recv":
                tensor.data.copy_(copy)

    return finish
