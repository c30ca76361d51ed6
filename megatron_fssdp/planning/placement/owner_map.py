"""Which slot of which device holds each expert: owned slots of all layers, and slots of resident replicas.

A device has ``S = L*E/D`` owned slots over all MoE layers of its pipeline stage together, so it may own any
number of one layer's experts (Hecate §4.3). If there are fewer experts of a layer than devices, ``S`` is
rounded up, and some slots may be free. Resident replicas (FlexMoE) have W slots of each device for each
layer, numbered after its owned slots, layer by layer.

Shape letters: L MoE layers of a pipeline stage, E experts, D devices, W slots.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np

from megatron_fssdp.planning.arrays import frozen_array
from megatron_fssdp.planning.placement.placement import ExpertPlacement, even_owners


class SlotMove(NamedTuple):
    """One expert of a layer (its index in the map) whose content goes from one device's slot to another's."""

    layer: int
    expert: int
    source_device: int
    source_slot: int
    device: int
    slot: int


@dataclass(frozen=True, eq=False)
class OwnerMap:
    """One-to-one map from (layer, expert) to (device, slot), both int64 ``[L, E]`` and read-only.

    Raises:
        ValueError: Two experts share a slot, or a slot is free although experts are more than devices.
    """

    device_LE: np.ndarray
    slot_LE: np.ndarray
    num_devices: int

    def __post_init__(self) -> None:
        for name in ("device_LE", "slot_LE"):
            object.__setattr__(self, name, frozen_array(getattr(self, name), np.int64))
        device_LE, slot_LE = self.device_LE, self.slot_LE
        may_be_free = device_LE.shape[1] < self.num_devices
        if device_LE.shape != slot_LE.shape or (device_LE.size % self.num_devices and not may_be_free):
            raise ValueError(
                f"owner map: got {device_LE.size} experts in {slot_LE.size} slots of {self.num_devices} "
                "devices, wanted the same number of slots on every device; use a number of experts that the "
                "devices can share evenly"
            )
        in_range = (slot_LE >= 0) & (slot_LE < self.slots_per_device)
        in_range &= (device_LE >= 0) & (device_LE < self.num_devices)
        # As many experts as slots that use no slot twice fill all of them.
        if (
            not in_range.all()
            or len(np.unique(device_LE * self.slots_per_device + slot_LE)) != device_LE.size
        ):
            raise ValueError(
                f"owner map: got slots that are missing or used twice, wanted every one of the "
                f"{self.slots_per_device} slots of all {self.num_devices} devices used once"
                f"{', or free' if may_be_free else ''}"
            )

    @classmethod
    def even(cls, num_layers: int, num_experts: int, num_devices: int) -> "OwnerMap":
        """The map with which a training starts: every layer's experts as in :func:`even_owners`.

        With fewer experts than devices, each layer's owners are one device further than those of the layer
        before, so that memory stays even. Slots are numbered layer by layer.
        """
        device_LE = np.tile(even_owners(num_experts, num_devices), (num_layers, 1))
        if num_experts < num_devices:
            device_LE = (device_LE + np.arange(num_layers)[:, None]) % num_devices
        slot_LE = np.empty_like(device_LE)
        for device in range(num_devices):
            owned_LE = device_LE == device
            slot_LE[owned_LE] = np.arange(np.count_nonzero(owned_LE))
        return cls(device_LE, slot_LE, num_devices)

    @property
    def num_layers(self) -> int:
        """Number of MoE layers of the pipeline stage, L."""
        return self.device_LE.shape[0]

    @property
    def num_experts(self) -> int:
        """Number of experts of a layer, E."""
        return self.device_LE.shape[1]

    @property
    def slots_per_device(self) -> int:
        """Number of slots of a device, S."""
        return -(-self.device_LE.size // self.num_devices)

    @property
    def is_even(self) -> bool:
        """Whether this is Megatron's own map."""
        return not self.moves_to(OwnerMap.even(self.num_layers, self.num_experts, self.num_devices))

    def slots_on(self, device: int, layer: int) -> dict[int, int]:
        """Slots of the experts of one layer that a device owns: expert -> slot, ascending by expert."""
        experts = np.flatnonzero(self.device_LE[layer] == device)
        return {int(expert): int(self.slot_LE[layer, expert]) for expert in experts}

    def with_owners(self, device_LE: np.ndarray) -> "OwnerMap":
        """A map with new owners, integers ``[L, E]``, or a ValueError if a device has too few slots.

        Experts that stay on their device stay in their slot. Others take open slots in ascending order.
        """
        device_LE = np.asarray(device_LE, dtype=np.int64)
        slot_LE, stays_LE = self.slot_LE.copy(), device_LE == self.device_LE
        for device in np.unique(device_LE[~stays_LE]).tolist():
            is_here_LE = device_LE == device
            comes_LE = is_here_LE & ~stays_LE
            open_slots = np.setdiff1d(np.arange(self.slots_per_device), slot_LE[is_here_LE & stays_LE])
            number = np.count_nonzero(comes_LE)
            if number > len(open_slots) or not 0 <= device < self.num_devices:
                raise ValueError(
                    f"device {device} gets {number} experts and has {len(open_slots)} slots for them: wanted "
                    f"a device from 0 to {self.num_devices - 1}, and at most as many experts as slots, of "
                    "which every device keeps its number"
                )
            slot_LE[comes_LE] = open_slots[:number]
        return OwnerMap(device_LE, slot_LE, self.num_devices)

    def moves_to(self, target: "OwnerMap") -> tuple[SlotMove, ...]:
        """The moves that turn this map into another one of the same experts, by layer, then expert."""
        differs = (self.device_LE != target.device_LE) | (self.slot_LE != target.slot_LE)
        maps = (self.device_LE, self.slot_LE, target.device_LE, target.slot_LE)
        moves = np.stack([*np.nonzero(differs), *(places_LE[differs] for places_LE in maps)], axis=1)
        return tuple(map(SlotMove._make, moves.tolist()))

    def digest(self) -> bytes:
        """A 16-byte hash by which ranks compare their maps."""
        return blake2b(self.device_LE.tobytes() + self.slot_LE.tobytes(), digest_size=16).digest()

    def as_lists(self) -> dict[str, Any]:
        """The map as plain lists and numbers, for a checkpoint."""
        lists = {"device_LE": self.device_LE.tolist(), "slot_LE": self.slot_LE.tolist()}
        return {**lists, "num_devices": self.num_devices}

    @classmethod
    def from_lists(cls, lists: Mapping[str, Any]) -> "OwnerMap":
        """The inverse of :meth:`as_lists`."""
        return cls(lists["device_LE"], lists["slot_LE"], int(lists["num_devices"]))


EMPTY = -1
"""The number in a resident slot that holds no expert."""


@dataclass(frozen=True, eq=False)
class ResidentMap:
    """The expert in every resident slot, or :data:`EMPTY`: ``expert_LDW``, int64 ``[L, D, W]``."""

    expert_LDW: np.ndarray

    @classmethod
    def empty(cls, num_layers: int, num_devices: int, slots: int) -> "ResidentMap":
        """A map of empty slots, ``slots`` of each device for each layer."""
        return cls(np.full((num_layers, num_devices, slots), EMPTY, np.int64))

    @property
    def slots(self) -> int:
        """Number of resident slots of a device for each layer, W."""
        return self.expert_LDW.shape[2]

    def held_by(self, device: int, layer: int) -> dict[int, int]:
        """Resident replicas of a device in one layer: expert -> resident slot (from 0), sorted by expert."""
        experts = self.expert_LDW[layer, device].tolist()
        return {expert: experts.index(expert) for expert in sorted(experts) if expert != EMPTY}

    def holding(self, placements: Sequence[ExpertPlacement]) -> "ResidentMap":
        """A map with the replicas of other placements, one for each layer; a ValueError without enough slots.

        Replicas that stay keep their slots. New ones take the lowest free slots.
        """
        expert_LDW = self.expert_LDW.copy()
        for layer, device in np.ndindex(expert_LDW.shape[:2]):
            placement, old = placements[layer], self.expert_LDW[layer, device].tolist()
            replicas = set(placement.experts_on(device)) - set(np.flatnonzero(placement.owner_E == device))
            if len(replicas) > self.slots:
                raise ValueError(
                    f"layer {layer}, device {device}: got {len(replicas)} replicas, wanted at most "
                    f"{self.slots}, the number of its resident slots"
                )
            new = iter(sorted(replicas - set(old)))
            expert_LDW[layer, device] = [expert if expert in replicas else next(new, EMPTY) for expert in old]
        return ResidentMap(expert_LDW)

    def copies_to(self, new: "ResidentMap", owners: OwnerMap) -> list[SlotMove]:
        """The copies from owners into resident slots that turn this map into ``new``."""
        changed = (new.expert_LDW != self.expert_LDW) & (new.expert_LDW != EMPTY)
        layer, device, slot = np.nonzero(changed)
        expert, resident_slot = new.expert_LDW[changed], owners.slots_per_device + layer * self.slots + slot
        source = owners.device_LE[layer, expert], owners.slot_LE[layer, expert]
        copies = np.stack([layer, expert, *source, device, resident_slot], axis=1)
        return [SlotMove._make(copy) for copy in copies.tolist()]
