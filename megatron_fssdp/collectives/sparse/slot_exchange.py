"""Permutes the contents of expert slots over the devices of a group, in pieces of bounded memory.

A permutation of slots is also a permutation for every range of their elements. All moving slots therefore
advance together. Elements ``[o, o + Q)`` of each slot are packed, one uneven all-to-all takes them to their
new devices, and they are written there before the next range is read. No content has to be saved in extra
memory, however long the cycles of the permutation are::

    range of elements               [0, Q)    [Q, 2Q)         [2Q, 3Q)
    in all slots of all devices     moved     moving now      not moved yet

Shape letters: Q elements of a piece, W slots.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fssdp.planning.placement.owner_map import SlotMove

BUFFER_BYTES = 64 * 2**20
"""Largest total size of the outgoing and the incoming buffer on any device."""


@dataclass(frozen=True, eq=False)
class SlotQuantity:
    """One quantity of all slots of a device, for example Adam's first moment.

    Each rank of a ``part_group`` holds a part of each slot only. The parts are put together, and each rank
    keeps its part of them::

        elements of a slot   0 ......................... num_elements
        rank 0 holds         |aaaaaaaaaaaaa|
        rank 1 holds                       |bbbbbbbbbbbbbbbb|
        read, on all ranks   |aaaaaaaaaaaaabbbbbbbbbbbbbbbbb|

    """

    name: str  # in messages
    num_elements: int  # of one slot, equal on all devices
    dtype: torch.dtype
    device: torch.device
    # The parts of each slot that this rank holds: position of the first element in the slot, flat elements.
    parts_W: Sequence[Sequence[tuple[int, Tensor]]]
    # Ranks that hold the parts, with every element on exactly one of them; None if this rank holds all.
    part_group: dist.ProcessGroup | None = None

    def read(self, slots: Sequence[int], start: int, out_WQ: Tensor) -> None:
        """Fill row ``i`` of ``out_WQ``, ``[W, Q]``, with Q elements of slot ``slots[i]`` from ``start`` on.

        Every device of the exchange calls it equally often, even where no slot moves (W is 0 there).
        Collective over ``part_group`` if it is set.
        """
        if self.part_group is not None:
            out_WQ.zero_()
        for piece, target in self._overlaps(slots, start, out_WQ):
            target.copy_(piece)
        if self.part_group is not None and len(slots):
            # Elements of other ranks are zero here, so the sum collects all parts. The sum is taken over
            # integers because -0.0 + 0.0 is 0.0, which would lose the sign.
            dist.all_reduce(out_WQ.view(torch.int32), group=self.part_group)

    def write(self, slots: Sequence[int], start: int, rows_WQ: Tensor) -> None:
        """Write the elements that belong to this rank's parts, and ignore the others."""
        for piece, source in self._overlaps(slots, start, rows_WQ):
            piece.copy_(source)

    def _overlaps(self, slots: Sequence[int], start: int, rows_WQ: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the ranges of this rank's parts that lie in a piece, with the same ranges of its rows."""
        for slot, row_Q in zip(slots, rows_WQ, strict=True):
            for offset, part in self.parts_W[slot]:
                first = max(offset, start)
                last = min(offset + part.numel(), start + row_Q.numel())
                if first < last:
                    yield part[first - offset : last - offset], row_Q[first - start : last - start]


@torch.no_grad()
def exchange_slots(
    group: dist.ProcessGroup,
    moves: Sequence[SlotMove],
    quantities: Sequence[SlotQuantity],
    *,
    are_copies: bool = False,
) -> None:
    """Move or copy the contents of slots to other slots of the group's devices, one quantity at a time.

    Every rank of the group must call it with the same moves, and with quantities of the same names, sizes and
    dtypes in the same order. Ranks where nothing moves run as many all-to-alls.

    Args:
        group: Process group of the ranks; device ``d`` of the moves is group rank ``d``.
        moves: Moves of which every slot is a source once and a destination once. With ``are_copies``, sources
            keep their contents, and a slot is a destination once, or a source any number of times.
        quantities: Quantities that each slot has.
        are_copies: Whether sources keep their contents.

    Raises:
        ValueError: The moves are not a permutation, or copies overwrite a source. The error is raised before
            any communication.
    """
    num_devices, device = dist.get_world_size(group), dist.get_rank(group)
    left = sorted((move.source_device, move.source_slot) for move in moves)
    filled = sorted((move.device, move.slot) for move in moves)
    if len(set(filled)) < len(filled) or (set(left) & set(filled) if are_copies else left != filled):
        wanted = "none of them as a source" if are_copies else "the same as the sources"
        raise ValueError(
            f"moves: got source slots {left} and destination slots {filled} as (device, slot), wanted each "
            f"destination once and {wanted}; take them from OwnerMap.moves_to or ResidentMap.copies_to"
        )
    if not moves:
        return
    # Both sides list the slots that travel between two devices by destination slot.
    leaving = sorted((m for m in moves if m.source_device == device), key=lambda m: (m.device, m.slot))
    coming = sorted((m for m in moves if m.device == device), key=lambda m: (m.source_device, m.slot))
    sends = Counter(move.device for move in leaving)
    receives = Counter(move.source_device for move in coming)
    sends_D, receives_D = ([of[peer] for peer in range(num_devices)] for of in (sends, receives))
    most_slots = max(Counter(device for device, _ in slots).most_common(1)[0][1] for slots in (left, filled))
    for quantity in quantities:
        # The device with the most moving slots limits the elements of a slot that move at once.
        most_elements = BUFFER_BYTES // (2 * most_slots * quantity.dtype.itemsize)
        piece = max(1, min(quantity.num_elements, most_elements))
        kind: Any = {"dtype": quantity.dtype, "device": quantity.device}
        outgoing = torch.empty(len(leaving) * piece, **kind)
        incoming = torch.empty(len(coming) * piece, **kind)
        for start in range(0, quantity.num_elements, piece):
            length = min(piece, quantity.num_elements - start)
            outgoing_WQ = outgoing[: len(leaving) * length].view(-1, length)
            incoming_WQ = incoming[: len(coming) * length].view(-1, length)
            quantity.read([move.source_slot for move in leaving], start, outgoing_WQ)
            dist.all_to_all_single(incoming_WQ, outgoing_WQ, receives_D, sends_D, group=group)
            quantity.write([move.slot for move in coming], start, incoming_WQ)
