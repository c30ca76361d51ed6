"""The contents of a transfer's messages: weights from the owners, or sums of gradients to the owners."""

from collections import defaultdict
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fssdp.collectives.messages import wait_for


class GatherCargo:
    """Contents of SparseAllGather: chunks of weights arrive in their final memory and are sent on from there.

    ``storage`` has the flat tensor ``[num_elements]`` of every expert that this device sends or receives. The
    last chunk of an expert can be shorter than ``chunk_elements``.
    """

    is_gather = True

    def __init__(self, storage: Mapping[int, Tensor], chunk_elements: int) -> None:
        self._storage, self._chunk_elements = storage, chunk_elements
        # Posted messages by (expert, chunk): the buffer to fill and the work handle.
        self.inbox: defaultdict[tuple[int, int], list[tuple[Tensor, dist.Work]]] = defaultdict(list)

    def receive_buffer(self, expert: int, chunk: int) -> Tensor:
        """Tensor for a chunk that will arrive: its place in the expert's flat tensor."""
        return self._chunk(self._storage, expert, chunk)

    def settle(self, expert: int, chunk: int) -> None:
        """Wait for the messages of a chunk and process them; a second call does nothing."""
        wait_for(work for _, work in self.inbox.pop((expert, chunk), ()))

    def outgoing(self, expert: int, chunk: int) -> Tensor:
        """Tensor to send: the chunk, after it has arrived."""
        self.settle(expert, chunk)
        return self._chunk(self._storage, expert, chunk)

    def _chunk(self, flats: Mapping[int, Tensor], expert: int, chunk: int) -> Tensor:
        return flats[expert][chunk * self._chunk_elements : (chunk + 1) * self._chunk_elements]


class ReductionCargo(GatherCargo):
    """Contents of SparseReduceScatter: adds the children's parts to this device's part, chunk by chunk.

    A device's children are the devices that send it their parts. The order of a sum is this device's own
    part first, then the children in the order of the plan, so the same plan gives the same bits. Parts in
    bf16 and fp16 are added in fp32 and rounded once, when a device passes its sum on.

    Args:
        partial: This device's own flat part ``[num_elements]`` of every expert that it holds. The part of an
            expert whose sum ends here is optional.
        results: Flat tensor ``[num_elements]`` to fill for every expert whose sum ends here.
        chunk_elements: Number of elements in a chunk.
        dtype: Data type of the parts.
    """

    is_gather = False

    def __init__(
        self,
        partial: Mapping[int, Tensor],
        results: Mapping[int, Tensor],
        chunk_elements: int,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(partial, chunk_elements)
        self._results, self._dtype = results, dtype
        self._sums: dict[tuple[int, int], Tensor] = {}

    def receive_buffer(self, expert: int, chunk: int) -> Tensor:
        """New tensor with the size of the chunk and the dtype of the parts."""
        flats = self._results if expert in self._results else self._storage
        return torch.empty_like(self._chunk(flats, expert, chunk), dtype=self._dtype)

    def settle(self, expert: int, chunk: int) -> None:
        """Wait for the children's parts of a chunk, add them and free the memory in which they arrived."""
        arrivals, wide = self.inbox.pop((expert, chunk), ()), accumulation_dtype(self._dtype)
        total = None
        if arrivals and expert in self._storage:
            total = self._chunk(self._storage, expert, chunk).to(wide, copy=True)
        for buffer, work in arrivals:
            work.wait()
            total = buffer.to(wide) if total is None else total.add_(buffer)
        if total is None:
            return
        if expert in self._results:
            self._chunk(self._results, expert, chunk).copy_(total)
        else:
            self._sums[expert, chunk] = total.to(self._dtype)

    def outgoing(self, expert: int, chunk: int) -> Tensor:
        """Sum of the chunk over this device and all devices whose parts arrive through it."""
        own = super().outgoing(expert, chunk)
        return self._sums.pop((expert, chunk), own)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The data type in which values of ``dtype`` are added: fp32 for bf16 and fp16, otherwise ``dtype``."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
