"""Permutes the contents of expert slots over the devices of a group, in pieces of bounded memory.

A permutation of slots is, for every range of elements, a permutation by itself. So all
moving slots advance together: elements ``[o, o + c)`` of each are packed, one uneven
all-to-all takes them to their new devices, and they are written there before the next
range is read. Nothing has to be set aside however long the cycles of the permutation are.

Shape letters: Q elements of a piece, W slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fssdp.planning.placement.owner_map import SlotMove

DEFAULT_BUFFER_BYTES = 64 * 2**20


class SlotQuantity(Protocol):
    """One quantity that every slot holds as a flat sequence of elements, for example its parameters."""

    @property
    def name(self) -> str:
        """What it is called in messages."""
        ...

    @property
    def num_elements(self) -> int:
        """Elements of one slot; the same for all slots of all devices."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of all slots' elements."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the elements are."""
        ...

    def read(self, slots: Sequence[int], start: int, out_WQ: Tensor) -> None:
        """Fill row ``i`` of ``out_WQ`` with the elements from ``start`` on of ``slots[i]``.

        Called as often on every device of the group, also where no slot moves (W is 0 there).
        It may communicate, over another group than the exchange's.
        """
        ...

    def write(self, slots: Sequence[int], start: int, rows_WQ: Tensor) -> None:
        """Put row ``i`` of ``rows_WQ`` into the elements from ``start`` on of ``slots[i]``."""
        ...


@dataclass(frozen=True)
class _Traffic:
    """What one device sends and receives, by peer and then by the slot at the destination."""

    outgoing_slots: tuple[int, ...]
    outgoing_splits: list[int]
    incoming_slots: tuple[int, ...]
    incoming_splits: list[int]

    @classmethod
    def of(cls, moves: Sequence[SlotMove], device: int, num_devices: int) -> "_Traffic":
        leaving = sorted((m for m in moves if m.source_device == device), key=lambda m: (m.device, m.slot))
        coming = sorted((m for m in moves if m.device == device), key=lambda m: (m.source_device, m.slot))
        return cls(
            tuple(move.source_slot for move in leaving),
            [sum(move.device == peer for move in leaving) for peer in range(num_devices)],
            tuple(move.slot for move in coming),
            [sum(move.source_device == peer for move in coming) for peer in range(num_devices)],
        )


@torch.no_grad()
def exchange_slots(
    group: dist.ProcessGroup,
    moves: Sequence[SlotMove],
    quantities: Sequence[SlotQuantity],
    *,
    buffer_bytes: int = DEFAULT_BUFFER_BYTES,
    are_copies: bool = False,
) -> None:
    """Move the contents of slots to other slots of the group's devices, or copy them there.

    Every rank of the group calls it with the same moves, with quantities of the same names,
    sizes and dtypes in the same order, and the same ``buffer_bytes``; all then make the same
    number of all-to-alls, also those on which nothing moves.

    Args:
        group: The ranks; device ``d`` of the moves is rank ``d`` of it.
        moves: A permutation of the slots that they name: each of these is left once and filled once; with
            ``are_copies`` each is filled once or left, as often as one likes, but not both.
        quantities: What a slot holds; each is read and written through its own methods.
        buffer_bytes: Bound on the memory that the exchange takes on any device: one outgoing and one
            incoming buffer, together at most this large, for one quantity at a time. What a
            quantity's own ``read`` or the communication library takes comes on top.
        are_copies: Slots that are left keep what they hold.

    Raises:
        ValueError: The moves are no permutation of slots of the group, or copies overwrite what is
            copied, or not even one element of all moving slots fits into the buffers. Raised before any
            communication.
    """
    num_devices, device = dist.get_world_size(group), dist.get_rank(group)
    (_check_copies if are_copies else _check_permutation)(moves)
    _check_devices(moves, num_devices)
    if not moves:
        return
    most_slots = max(
        max(sum(move.device == peer for move in moves), sum(move.source_device == peer for move in moves))
        for peer in range(num_devices)
    )
    pieces = [_piece_elements(quantity, most_slots, buffer_bytes) for quantity in quantities]
    traffic = _Traffic.of(moves, device, num_devices)
    for quantity, piece in zip(quantities, pieces, strict=True):
        _exchange_quantity(group, traffic, quantity, piece)


def _exchange_quantity(
    group: dist.ProcessGroup, traffic: _Traffic, quantity: SlotQuantity, piece: int
) -> None:
    num_out, num_in = len(traffic.outgoing_slots), len(traffic.incoming_slots)
    outgoing = torch.empty(num_out * piece, dtype=quantity.dtype, device=quantity.device)
    incoming = torch.empty(num_in * piece, dtype=quantity.dtype, device=quantity.device)
    for start in range(0, quantity.num_elements, piece):
        length = min(piece, quantity.num_elements - start)
        outgoing_WQ = outgoing[: num_out * length].view(num_out, length)
        incoming_WQ = incoming[: num_in * length].view(num_in, length)
        quantity.read(traffic.outgoing_slots, start, outgoing_WQ)
        dist.all_to_all_single(
            incoming_WQ, outgoing_WQ, traffic.incoming_splits, traffic.outgoing_splits, group=group
        )
        quantity.write(traffic.incoming_slots, start, incoming_WQ)


def _piece_elements(quantity: SlotQuantity, most_slots: int, buffer_bytes: int) -> int:
    """Elements of one slot to move at once; the same on all devices, so it is the fullest one's."""
    bytes_per_element = 2 * most_slots * quantity.dtype.itemsize
    if buffer_bytes < bytes_per_element:
        raise ValueError(
            f"buffer_bytes: got {buffer_bytes}, wanted at least {bytes_per_element}: one element of "
            f"{quantity.name} of the {most_slots} slots that leave one device and of as many that come there"
        )
    return max(1, min(quantity.num_elements, buffer_bytes // bytes_per_element))


def _check_permutation(moves: Sequence[SlotMove]) -> None:
    left = sorted((move.source_device, move.source_slot) for move in moves)
    filled = sorted((move.device, move.slot) for move in moves)
    if left != filled or len(set(left)) < len(left):
        raise ValueError(
            f"moves: got slots {left} that are left and {filled} that are filled (device, slot), wanted the "
            "same slots, each once; take the moves from OwnerMap.moves_to"
        )


def _check_copies(moves: Sequence[SlotMove]) -> None:
    left = sorted({(move.source_device, move.source_slot) for move in moves})
    filled = sorted((move.device, move.slot) for move in moves)
    if len(set(filled)) < len(filled) or set(left) & set(filled):
        raise ValueError(
            f"copies: got slots {left} that are read and {filled} that are filled (device, slot), wanted "
            "each filled once and none of them read; take the copies from ResidentMap.copies_to"
        )


def _check_devices(moves: Sequence[SlotMove], num_devices: int) -> None:
    devices = {move.source_device for move in moves} | {move.device for move in moves}
    if devices and not 0 <= min(devices) <= max(devices) < num_devices:
        raise ValueError(
            f"moves: got devices {min(devices)} to {max(devices)}, wanted 0 to {num_devices - 1}, the ranks "
            "of the group"
        )
