"""The contents of a transfer's messages: weights from the owners, or sums of gradients to the owners."""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fssdp.collectives.messages import wait_for
from megatron_fssdp.collectives.sparse.wavefront import Message


class Cargo(ABC):
    """Provides the tensors of messages and processes the messages that arrive.

    Args:
        chunk_elements: Number of elements in a chunk; the last chunk can be shorter.

    Attributes:
        inbox: By (expert, chunk), the messages that have been posted: the buffer to fill and its work handle.
    """

    def __init__(self, chunk_elements: int) -> None:
        self._chunk_elements = chunk_elements
        self.inbox: defaultdict[tuple[int, int], list[tuple[Tensor, dist.Work]]] = defaultdict(list)

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
        wait_for(work for _, work in self.inbox.pop((expert, chunk), ()))

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
    """

    def __init__(
        self,
        partial: Mapping[int, Tensor],
        results: Mapping[int, Tensor],
        chunk_elements: int,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(chunk_elements)
        self._partial, self._results, self._dtype = partial, results, dtype
        self._sums: dict[tuple[int, int], Tensor] = {}

    def receive_buffer(self, message: Message) -> Tensor:
        """New tensor with the size of the chunk and the dtype of the parts."""
        flats = self._results if message.expert in self._results else self._partial
        flat = flats[message.expert]
        return torch.empty_like(self._chunk(flat, message.chunk), dtype=self._dtype)

    def settle(self, expert: int, chunk: int) -> None:
        """Wait for the children's parts of a chunk, add them and free the memory in which they arrived."""
        arrivals = self.inbox.pop((expert, chunk), ())
        total = None
        if arrivals and expert in self._partial:
            own = self._chunk(self._partial[expert], chunk)
            total = own.to(accumulation_dtype(self._dtype), copy=True)
        for buffer, work in arrivals:
            work.wait()
            total = buffer.to(accumulation_dtype(self._dtype)) if total is None else total.add_(buffer)
        if total is None:
            return
        if expert in self._results:
            self._chunk(self._results[expert], chunk).copy_(total)
        else:
            self._sums[expert, chunk] = total.to(self._dtype)

    def outgoing(self, message: Message) -> Tensor:
        """Sum of the chunk over this device and all devices whose parts arrive through it."""
        self.settle(message.expert, message.chunk)
        total = self._sums.pop((message.expert, message.chunk), None)
        return self._chunk(self._partial[message.expert], message.chunk) if total is None else total


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The data type in which values of ``dtype`` are added: fp32 for bf16 and fp16, otherwise ``dtype``."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
