"""Replica slots in memory that the ranks of a node map: weights are put there without multiprocessors.

Such memory is allocated by all ranks together and stays, so it is for replicas that live for a pass. All
layers use the same slots, one layer after the other. Weights go straight into the slots, because a copy from
a staging area would take multiprocessors again.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_fssdp.collectives.sparse.peer_memory import SharedMemory, SymmetricMemory, WeightPuts
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.transfer.message_size import ALIGNMENT_BYTES
from megatron_fssdp.runtime.experts.expert_layout import ExpertLayout


class SlotRoom:
    """Slots for experts of one layout, which one user has at a time; equal on all ranks of the node."""

    def __init__(self, node: "NodeSlots", layout: ExpertLayout, num_slots: int, device: torch.device) -> None:
        self.num_slots, self._node, self._device = num_slots, node, device
        step = ALIGNMENT_BYTES // layout.dtype.itemsize
        arguments = node.group, (num_slots, -(-layout.numel // step) * step), node.timeout
        kind = SymmetricMemory if device.type == "cuda" else SharedMemory
        self._memory = kind(*arguments, dtype=layout.dtype, device=device)
        self._memory.of_rank = [slots[:, : layout.numel] for slots in self._memory.of_rank]
        self.slots = self._memory.of_rank[node.group.rank()]
        self._give_way: Callable[[], None] | None = None
        self._readers = set[torch.cuda.Stream]()

    def puts(self, placement: ExpertPlacement) -> WeightPuts:
        """Puts of a placement's replicas. Those of a device are in its first slots, in ascending order."""
        peers = {device: rank for rank, device in enumerate(self._node.devices)}
        slot_of: dict[tuple[int, int], int] = {}
        for device in peers:
            replicas = [
                expert for expert in placement.experts_on(device) if placement.owner_E[expert] != device
            ]
            slot_of |= {(device, expert): slot for slot, expert in enumerate(sorted(replicas))}
        del peers[self._node.devices[self._node.group.rank()]]
        return WeightPuts(self._memory, peers, slot_of)

    def take(self, give_way: Callable[[], None]) -> None:
        """Give the slots to a user, after all reads. ``give_way`` is called when another one takes them."""
        if self._give_way not in (None, give_way):
            self._give_way()
        self._give_way = give_way
        for stream in self._readers:
            torch.cuda.current_stream(self._device).wait_stream(stream)
        self._readers.clear()

    def note_reader(self) -> None:
        """Note that the current stream has read the slots."""
        if self._device.type == "cuda":
            self._readers.add(torch.cuda.current_stream(self._device))


class NodeSlots:
    """The rooms of the ranks of one node. ``devices`` are those of the group's ranks, in order."""

    def __init__(self, group: dist.ProcessGroup, devices: Sequence[int], timeout: timedelta) -> None:
        self.group, self.devices, self.timeout = group, devices, timeout
        self._rooms: dict[ExpertLayout, SlotRoom] = {}

    def room(self, layout: ExpertLayout, num_slots: int, device: torch.device) -> SlotRoom:
        """A room of at least so many slots. All ranks of the node call it alike: it may allocate one."""
        room = self._rooms.get(layout)
        if room is None or room.num_slots < num_slots:
            room = self._rooms[layout] = SlotRoom(self, layout, num_slots, device)
        return room
