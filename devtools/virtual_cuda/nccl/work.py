"""Handles of NCCL operations, and the gloo operations that move their data."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from devtools.virtual_cuda.books.stream_order import Clock
from devtools.virtual_cuda.books.virtual_device import VirtualDevice

Start = Callable[[], Callable[[], None]]


class VirtualWork:
    def __init__(self, books: VirtualDevice, clock: Clock, *, stops_host: bool) -> None:
        self._books, self._clock, self._stops_host = books, clock, stops_host

    def wait(self, timeout: Any = None) -> bool:
        """Make the current stream wait for the operation; the host waits only for a barrier."""
        self._books.wait(self._books.current_stream, self._clock)
        if self._stops_host:
            self._books.host_sync("barrier")
        return True

    synchronize = block_current_stream = wait

    def is_completed(self) -> bool:
        """Return that the operation is complete; from then on the host knows it."""
        self._books.host_knows(self._clock)
        return True

    is_success = is_completed


@dataclass
class Operation:
    """What NCCL does in one go: a collective, a message, or several of either that were coalesced.

    ``receives`` and ``others`` start to receive or something else, and return a function that waits.
    """

    name: str = ""
    reads: list[Tensor] = field(default_factory=list)
    writes: list[Tensor] = field(default_factory=list)
    receives: list[Start] = field(default_factory=list)
    others: list[Start] = field(default_factory=list)
    num_messages: int = 0
    is_async: bool = False  # beside the current stream
    stops_host: bool = False  # The host waits for its end.

    def add(self, part: "Operation") -> None:
        self.reads += part.reads
        self.writes += part.writes
        self.receives += part.receives
        self.others += part.others
        self.num_messages += part.num_messages
        self.is_async |= part.is_async
        self.name = "batch of messages" if self.num_messages else "coalesced collectives"

    def start(self) -> list[Callable[[], None]]:
        """Start everything, and return the functions that wait."""
        return [start() for start in (*self.receives, *self.others)]


def run_on_copies(
    run: Callable[..., None], writes: Sequence[Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Callable[[], None]:
    """Call a collective on copies of its tensors, and copy its results back. Nothing is left to wait for.

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
    return lambda: None


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
