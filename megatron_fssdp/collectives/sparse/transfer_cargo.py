"""The contents of a transfer's messages: weights from the owners, or sums of gradients to the owners."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fssdp.collectives.messages import wait_for
from megatron_fssdp.collectives.sparse.wavefront import Message

_Inbox = dict[tuple[int, int], list[tuple[Tensor, dist.Work]]]
"""By (expert, chunk), the messages that have been posted: the buffer to fill and its work handle."""


class Cargo(ABC):
    """Provides the tensors of messages and processes the messages that arrive.

    Args:
        chunk_elements: Number of elements in a chunk; the last chunk can be shorter.
    """

    def __init__(self, chunk_elements: int) -> None:
        self._chunk_elements = chunk_elements
        self._inbox: _Inbox = {}

    def expect(self, message: Message, buffer: Tensor, work: dist.Work) -> None:
        """Note that ``work`` fills ``buffer``."""
        self._inbox.setdefault((message.expert, message.chunk), []).append((buffer, work))

    @abstractmethod
    def receive_buffer(self, message: Message) -> Tensor:
        """Tensor for a message that will arrive."""

    @abstractmethod
    def settle(self, expert: int, chunk: int) -> None:
        """Wait for the messages of a chunk and process them; a second call does nothing."""

    @abstractmethod
    def outgoing(self, message: Message) -> Tensor:
        """Tensor to send for a message; settles the chunk first."""

    def _chunk(self, flat: Tensor, chunk: int) -> Tensor:
        return flat[chunk * self._chunk_elements : (chunk + 1) * self._chunk_elements]


class GatherCargo(Cargo):
    """Contents of SparseAllGather: chunks of weights arrive in their final memory and are sent on from there.

    Args:
        storage: Flat tensor ``[num_elements]`` of every expert that this device sends or receives.
        chunk_elements: Number of elements in a chunk; the last chunk can be shorter.
    """

    def __init__(self, storage: Mapping[int, Tensor], chunk_elements: int) -> None:
        super().__init__(chunk_elements)
        self._storage = storage

    def receive_buffer(self, message: Message) -> Tensor:
        """View of the chunk in the expert's flat tensor."""
        return self._chunk(self._storage[message.expert], message.chunk)

    def settle(self, expert: int, chunk: int) -> None:
        """Wait until the chunk has arrived."""
        wait_for(work for _, work in self._inbox.pop((expert, chunk), ()))

    def outgoing(self, message: Message) -> Tensor:
        """View of the chunk in the expert's flat tensor, after it has arrived."""
        self.settle(message.expert, message.chunk)
        return self.receive_buffer(message)


class ReductionCargo(Cargo):
    """Contents of SparseReduceScatter: adds the children's parts to this device's part, chunk by chunk.

    A device's children are the devices that send it their parts. The order of a sum is this device's own
    part first, then the children in the order of the plan, so the same plan gives the same bits. Parts in
    bf16 and fp16 are added in fp32 and rounded once, when a device passes its sum on.

    Args:
        partial: This device's own flat part ``[num_elements]`` of every expert that it holds. The part of an
            expert whose sum ends here is optional.
        results: Flat tensor ``[num_elements]`` to fill for every expert whose sum ends here.
        chunk_elements: Number of elements in a chunk; the last chunk can be shorter.
        dtype: Data type of the parts.
        has_children: Function that tells whether this device receives parts of an expert.
    """

    def __init__(
        self,
        partial: Mapping[int, Tensor],
        results: Mapping[int, Tensor],
        chunk_elements: int,
        dtype: torch.dtype,
        has_children: Callable[[int], bool],
    ) -> None:
        super().__init__(chunk_elements)
        self._partial, self._results = partial, results
        self._dtype, self._has_children = dtype, has_children
        self._sums: dict[tuple[int, int], Tensor] = {}

    def receive_buffer(self, message: Message) -> Tensor:
        """New tensor with the size of the chunk and the dtype of the parts."""
        flat = self._results.get(message.expert, self._partial.get(message.expert))
        assert flat is not None
        return torch.empty_like(self._chunk(flat, message.chunk), dtype=self._dtype)

    def settle(self, expert: int, chunk: int) -> None:
        """Wait for the children's parts of a chunk, add them and free the memory in which they arrived."""
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
            self._chunk(self._results[expert], chunk).copy_(total)
        else:
            self._sums[expert, chunk] = total.to(self._dtype)

    def outgoing(self, message: Message) -> Tensor:
        """Sum of the chunk over this device and all devices whose parts arrive through it."""
        if not self._has_children(message.expert):
            return self._own(message.expert, message.chunk)
        self.settle(message.expert, message.chunk)
        return self._sums.pop((message.expert, message.chunk))

    def _own(self, expert: int, chunk: int) -> Tensor:
        return self._chunk(self._partial[expert], chunk)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The data type in which values of ``dtype`` are added: fp32 for bf16 and fp16, otherwise ``dtype``."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def check_cargo(
    tensors: Mapping[int, Tensor],
    wanted: Collection[int],
    num_elements: int,
    dtype: torch.dtype | None,
    device: torch.device,
    what: str,
) -> None:
    """Check that ``tensors`` has exactly the wanted experts, as flat tensors of the right kind.

    Args:
        tensors: Flat tensor of each expert.
        wanted: Experts that ``tensors`` must have.
        num_elements: Number of elements that each tensor must have.
        dtype: Data type that each tensor must have; ``None`` accepts any.
        device: Device whose type each tensor must have.
        what: Name of the argument in the error message.

    Raises:
        ValueError: An expert is missing or superfluous, or a tensor has a wrong shape, dtype or device type,
            or is not contiguous.
    """
    if set(tensors) != set(wanted):
        raise ValueError(
            f"{what} has experts {sorted(tensors)}, wanted {sorted(wanted)}: the experts of this rank that "
            "the plan moves"
        )
    for expert, tensor in tensors.items():
        got: dict[str, Any] = {"shape": tuple(tensor.shape), "device type": tensor.device.type}
        want: dict[str, Any] = {"shape": (num_elements,), "device type": device.type}
        if dtype is not None:
            got["dtype"], want["dtype"] = tensor.dtype, dtype
        if got != want or not tensor.is_contiguous():
            contiguous = "contiguous" if tensor.is_contiguous() else "not contiguous"
            raise ValueError(f"{what}[{expert}] is {contiguous} with {got}, wanted contiguous with {want}")
