"""What the messages of a wavefront carry: weights on the way out, sums of gradients on the way back."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fssdp.collectives.sparse.wavefront import Message

_Inbox = dict[tuple[int, int], list[tuple[Tensor, dist.Work]]]


class Cargo(Protocol):
    """Supplies the memory of messages and takes note of arrivals."""

    def receive_buffer(self, message: Message) -> Tensor:
        """Memory for a message to come."""

    def expect(self, message: Message, buffer: Tensor, work: dist.Work) -> None:
        """Note that ``work`` fills ``buffer``."""

    def settle(self, expert: int, chunk: int) -> None:
        """Wait for what comes in for a chunk and digest it; nothing to do the second time."""

    def outgoing(self, message: Message) -> Tensor:
        """What to send; settles the chunk first."""


class GatherCargo:
    """Chunks land in their final storage and are passed on from there.

    Args:
        storage: Flat tensor of every expert that is sent or received here.
        chunk_elements: Elements in a chunk; the last one may be shorter.
    """

    def __init__(self, storage: Mapping[int, Tensor], chunk_elements: int) -> None:
        self._storage = storage
        self._chunk_elements = chunk_elements
        self._inbox: _Inbox = {}

    def receive_buffer(self, message: Message) -> Tensor:
        """The chunk's place in the expert."""
        return _chunk(self._storage[message.expert], message.chunk, self._chunk_elements)

    def expect(self, message: Message, buffer: Tensor, work: dist.Work) -> None:
        """Note that ``work`` fills ``buffer``."""
        self._inbox.setdefault((message.expert, message.chunk), []).append((buffer, work))

    def settle(self, expert: int, chunk: int) -> None:
        """Wait until the chunk is here."""
        for _, work in self._inbox.pop((expert, chunk), ()):
            work.wait()

    def outgoing(self, message: Message) -> Tensor:
        """The chunk where it lies."""
        self.settle(message.expert, message.chunk)
        return self.receive_buffer(message)


class ReductionCargo:
    """Adds what the children sent to this device's own part, chunk by chunk.

    The order of a sum is this device's own part first, then the children in the order of
    the plan, so the same plan gives the same bits. bf16 and fp16 are added in fp32 and
    rounded once when a device passes its sum on.

    Args:
        partial: This device's own flat part of every expert that it holds; of experts whose sum
            ends here it may be left out.
        results: Flat tensor to fill for every expert whose sum ends here.
        chunk_elements: Elements in a chunk; the last one may be shorter.
        dtype: Dtype of the parts.
        has_children: Tells whether parts of an expert arrive here.
    """

    def __init__(
        self,
        partial: Mapping[int, Tensor],
        results: Mapping[int, Tensor],
        chunk_elements: int,
        dtype: torch.dtype,
        has_children: Callable[[int], bool],
    ) -> None:
        self._partial = partial
        self._results = results
        self._chunk_elements = chunk_elements
        self._dtype = dtype
        self._has_children = has_children
        self._inbox: _Inbox = {}
        self._sums: dict[tuple[int, int], Tensor] = {}

    def receive_buffer(self, message: Message) -> Tensor:
        """New memory of a chunk's size, in the dtype of the parts."""
        flat = self._results.get(message.expert, self._partial.get(message.expert))
        assert flat is not None
        return torch.empty_like(_chunk(flat, message.chunk, self._chunk_elements), dtype=self._dtype)

    def expect(self, message: Message, buffer: Tensor, work: dist.Work) -> None:
        """Note that ``work`` fills ``buffer``."""
        self._inbox.setdefault((message.expert, message.chunk), []).append((buffer, work))

    def settle(self, expert: int, chunk: int) -> None:
        """Wait for the children's parts and add them; the memory they came in is free again."""
        arrivals = self._inbox.pop((expert, chunk), None)
        if arrivals is None:
            return
        dtype = accumulation_dtype(self._dtype)
        total = self._own(expert, chunk).to(dtype, copy=True) if expert in self._partial else None
        for buffer, work in arrivals:
            work.wait()
            total = buffer.to(dtype) if total is None else total.add_(buffer)
        assert total is not None
        if expert in self._results:
            _chunk(self._results[expert], chunk, self._chunk_elements).copy_(total)
        else:
            self._sums[expert, chunk] = total.to(self._dtype)

    def outgoing(self, message: Message) -> Tensor:
        """The sum of this device and those below it."""
        if not self._has_children(message.expert):
            return self._own(message.expert, message.chunk)
        self.settle(message.expert, message.chunk)
        return self._sums.pop((message.expert, message.chunk))

    def _own(self, expert: int, chunk: int) -> Tensor:
        return _chunk(self._partial[expert], chunk, self._chunk_elements)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of ``dtype`` are added."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def check_cargo(
    tensors: Mapping[int, Tensor],
    wanted: Collection[int],
    num_elements: int,
    dtype: torch.dtype | None,
    device: torch.device,
    what: str,
) -> None:
    """Raise ValueError unless ``tensors`` has exactly the wanted experts, flat and of the right kind."""
    if set(tensors) != set(wanted):
        raise ValueError(
            f"{what} has experts {sorted(tensors)}, wanted {sorted(wanted)}: those of this rank that the "
            "plan moves"
        )
    for expert, tensor in tensors.items():
        got: dict[str, Any] = {"shape": tuple(tensor.shape), "device type": tensor.device.type}
        want: dict[str, Any] = {"shape": (num_elements,), "device type": device.type}
        if dtype is not None:
            got["dtype"], want["dtype"] = tensor.dtype, dtype
        if got != want or not tensor.is_contiguous():
            contiguous = "contiguous" if tensor.is_contiguous() else "not contiguous"
            raise ValueError(f"{what}[{expert}] is {contiguous} with {got}, wanted contiguous with {want}")


def _chunk(flat: Tensor, chunk: int, chunk_elements: int) -> Tensor:
    return flat[chunk * chunk_elements : (chunk + 1) * chunk_elements]
