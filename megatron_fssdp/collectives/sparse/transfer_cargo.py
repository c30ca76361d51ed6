"""The contents of a transfer's messages: weights from the owners, or sums of gradients to the owners."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fssdp.collectives.messages import wait_for
from megatron_fssdp.planning.transfer.message_size import ALIGNMENT_BYTES

Parts = Sequence[Tensor]
"""Contiguous tensors whose elements, one after the other, are those of an expert."""


class Message(NamedTuple):
    """One chunk of one expert that a device sends to or receives from a peer, a rank of the group."""

    peer: int
    expert: int
    chunk: int


class Arrivals:
    """Messages that a device receives in one step: all whose contents it passes on, or all others.

    Pieces and works are those of the messages. Sums have, for the first sender of each expert, then for the
    second ones, …, a tensor in which their messages lie one after the other.
    """

    def __init__(self, pieces: dict[Message, list[Tensor]]) -> None:
        self.pieces, self.works = pieces, list[dist.Work]()
        self.buffers, self.rows = list[Tensor](), dict[tuple[int, int], slice]()


class GatherCargo:
    """Contents of SparseAllGather: weights arrive in their final memory and are sent on from there.

    ``contents`` has the parts of every expert that this device sends or receives. Of the ``elements`` that
    travel, a chunk has ``chunk_elements``, or fewer if it is the last one.
    """

    is_gather = True

    def __init__(self, contents: Mapping[int, Parts], elements: range, chunk_elements: int) -> None:
        self._contents = {e: [part.view(-1) for part in parts] for e, parts in contents.items()}
        self._elements, self._chunk_elements = elements, chunk_elements

    def arrivals(self, messages: Sequence[Message]) -> Arrivals:
        """Places for messages that will arrive in a step: those of their elements."""
        return Arrivals({message: self._pieces(message.expert, message.chunk) for message in messages})

    def settle(self, arrived: Arrivals) -> None:
        """Wait for the messages of a step, and process them."""
        wait_for(arrived.works)

    def outgoing(self, messages: Sequence[Message]) -> list[list[Tensor]]:
        """The pieces of messages to send, after what arrived for them has been settled."""
        return [self._pieces(message.expert, message.chunk) for message in messages]

    def _chunk(self, number: int) -> range:
        return self._elements[number * self._chunk_elements : (number + 1) * self._chunk_elements]

    def cut(self, parts: Parts, chunk: int) -> list[Tensor]:
        """The parts of an expert that are in a chunk, cut where it begins and ends."""
        elements, pieces, begin = self._chunk(chunk), [], 0
        for part in parts:
            size = part.numel()
            first, last = max(elements.start - begin, 0), min(elements.stop - begin, size)
            if first < last:
                pieces.append(part if last - first == size else part[first:last])
            begin += size
        return pieces

    def _pieces(self, expert: int, chunk: int) -> list[Tensor]:
        return self.cut(self._contents[expert], chunk)


class ReductionCargo(GatherCargo):
    """Contents of SparseReduceScatter: adds the children's parts to this device's part, chunk by chunk.

    A device's children are the devices that send it their parts. Their sum is formed in the order of the
    plan and then added to this device's part, so the same plan gives the same bits. Parts in bf16 and fp16
    are added in fp32, and rounded when a device passes its sum on. All messages of a step are added together,
    because the number of kernels would otherwise grow with the number of experts.

    ``partial`` has this device's own parts, of ``sizes`` elements, of every expert whose sum it passes on,
    which are not changed. ``totals`` has the tensors, to which the sums are added, of every expert whose sum
    ends here. They can have other borders than the parts. Those on the device ``meta`` drop their sums.
    ``dtype`` is that of messages.
    """

    is_gather = False

    def __init__(
        self,
        partial: Mapping[int, Parts],
        totals: Mapping[int, Parts],
        elements: range,
        chunk_elements: int,
        sizes: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(partial, elements, chunk_elements)
        self._totals = {e: [part.view(-1) for part in parts] for e, parts in totals.items()}
        self._borders = [torch.empty(size, device="meta") for size in sizes]
        self._dtype, self._device = dtype, device
        self._sums: dict[tuple[int, int], list[Tensor]] = {}  # to pass on

    def arrivals(self, messages: Sequence[Message]) -> Arrivals:
        """New memory for messages that will arrive in a step."""
        senders: dict[tuple[int, int], list[Message]] = {}
        for message in messages:
            senders.setdefault((message.expert, message.chunk), []).append(message)
        arrived, ends = Arrivals({}), list[int]()
        # The experts with the most senders come first, so that each sum of all n-th senders' messages begins
        # at the first element.
        by_number = sorted(senders, key=lambda row: -len(senders[row]))
        begin = 0
        for row in by_number:
            length = len(self._chunk(row[1]))
            arrived.rows[row] = slice(begin, begin + length)
            begin += self._padded(length)
            for n in range(len(senders[row])):
                ends[n : n + 1] = [begin]
        arrived.buffers = [torch.empty(end, dtype=self._dtype, device=self._device) for end in ends]
        for row in by_number:
            for buffer, message in zip(arrived.buffers, senders[row], strict=False):
                arrived.pieces[message] = self._split(buffer[arrived.rows[row]], row[1])
        return arrived

    def settle(self, arrived: Arrivals) -> None:
        """Wait for the parts of a step, add them and free the memory in which they arrived."""
        super().settle(arrived)
        if not arrived.buffers:
            return
        total = arrived.buffers[0].to(accumulation_dtype(self._dtype))
        for buffer in arrived.buffers[1:]:
            total[: buffer.numel()].add_(buffer)
        arrived.buffers.clear()
        pairs: list[tuple[Tensor, Tensor]] = []
        for (expert, chunk), place in arrived.rows.items():
            chunk_sum = total[place]
            if expert in self._totals:
                into = self.cut(self._totals[expert], chunk)
                pieces = chunk_sum.split([piece.numel() for piece in into])
                pairs += [pair for pair in zip(into, pieces, strict=True) if not pair[0].is_meta]
            else:
                sums = self._sums[expert, chunk] = self._split(chunk_sum, chunk)
                pairs += zip(sums, self._pieces(expert, chunk), strict=True)
        if pairs:
            torch._foreach_add_(*map(list, zip(*pairs, strict=True)))

    def outgoing(self, messages: Sequence[Message]) -> list[list[Tensor]]:
        """Sums of chunks over this device and all devices whose parts arrive through it."""
        own = super().outgoing(messages)
        sums = [
            self._sums.pop((message.expert, message.chunk), pieces)
            for message, pieces in zip(messages, own, strict=True)
        ]
        wide = [piece for pieces in sums for piece in pieces]
        if all(piece.dtype is self._dtype for piece in wide):
            return sums
        lengths = [self._padded(piece.numel()) for piece in wide]
        memory = torch.empty(sum(lengths), dtype=self._dtype, device=self._device).split(lengths)
        sent = [room[: piece.numel()] for room, piece in zip(memory, wide, strict=True)]
        torch._foreach_copy_(sent, wide)
        left = iter(sent)
        return [[next(left) for _ in pieces] for pieces in sums]

    def _split(self, flat: Tensor, chunk: int) -> list[Tensor]:
        """The pieces of a chunk that lies in one tensor."""
        return list(flat.split([piece.numel() for piece in self.cut(self._borders, chunk)]))

    def _padded(self, num_elements: int) -> int:
        step = ALIGNMENT_BYTES // self._dtype.itemsize
        return -(-num_elements // step) * step


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The data type in which values of ``dtype`` are added: fp32 for bf16 and fp16, otherwise ``dtype``."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
