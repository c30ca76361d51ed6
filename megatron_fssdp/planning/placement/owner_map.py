"""The owner map: which device keeps each expert of each layer, and in which of the device's slots.

A slot holds the parameters and the optimizer state of one expert. A device has ``S = L*E/D`` slots over all
MoE layers of its pipeline stage together. A device may therefore own any number of one layer's experts, and
all devices still use the same memory (Hecate §4.3). If there are fewer experts of a layer than devices, a
device owns none of most layers. ``S`` is then rounded up, and some slots may be free.

Shape letters: L MoE layers, E experts, D devices.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np

from megatron_fssdp.planning.placement.array_freezing import frozen_array


@dataclass(frozen=True)
class SlotMove:
    """One expert that changes its slot.

    Attributes:
        layer: Index of the expert's layer in the owner map.
        expert: Number of the expert in its layer.
        source_device: Device that has the expert before the move.
        source_slot: Slot of that device in which the expert is.
        device: Device that has the expert after the move.
        slot: Slot of that device into which the expert goes.
    """

    layer: int
    expert: int
    source_device: int
    source_slot: int
    device: int
    slot: int


@dataclass(frozen=True, eq=False)
class OwnerMap:
    """One-to-one map from (layer, expert) to (device, slot).

    Attributes:
        device_LE: Owner of each expert of each layer, int64 ``[L, E]``, read-only.
        slot_LE: Slot of each expert on its owner, int64 ``[L, E]``, read-only.
        num_devices: Number of devices, D.

    Raises:
        ValueError: Two experts share a slot, or there are more experts than devices and they do not fill all
            slots of equal devices.
    """

    device_LE: np.ndarray
    slot_LE: np.ndarray
    num_devices: int

    def __post_init__(self) -> None:
        device_LE, slot_LE = frozen_array(self.device_LE, np.int64), frozen_array(self.slot_LE, np.int64)
        object.__setattr__(self, "device_LE", device_LE)
        object.__setattr__(self, "slot_LE", slot_LE)
        if device_LE.ndim != 2 or device_LE.shape != slot_LE.shape:
            raise ValueError(
                f"owner map: got devices of shape {device_LE.shape} and slots of shape {slot_LE.shape}, "
                "wanted [layers, experts] of both"
            )
        may_be_free = device_LE.shape[1] < self.num_devices
        if self.num_devices < 1 or (device_LE.size % self.num_devices and not may_be_free):
            raise ValueError(
                f"owner map: got {device_LE.size} experts on {self.num_devices} devices, wanted the same "
                "number of slots on every device; use a number of experts that the devices can share evenly"
            )
        places = self._places
        in_range = ((slot_LE >= 0) & (slot_LE < self.slots_per_device)).all()
        in_range &= ((device_LE >= 0) & (device_LE < self.num_devices)).all()
        # As many experts as slots that use no slot twice fill all of them.
        if not in_range or len(np.unique(places)) != len(places):
            raise ValueError(
                f"owner map: got slots that are missing or used twice, wanted every one of the "
                f"{self.slots_per_device} slots of all {self.num_devices} devices used once"
                f"{', or free' if may_be_free else ''}"
            )

    @classmethod
    def even(cls, num_layers: int, num_experts: int, num_devices: int) -> "OwnerMap":
        """The map with which a training starts: each device owns E/D consecutive experts of every layer.

        This is Megatron's own map. Slots are numbered layer by layer. Megatron does not support fewer experts
        than devices. Then every expert of a layer is on another device, and a layer's owners are those of the
        layer before, each one device further. So every device owns equally many experts of all layers
        together, or one less.

        Args:
            num_layers: Number of MoE layers of the pipeline stage, L.
            num_experts: Number of experts of a layer, E.
            num_devices: Number of devices of the expert-parallel group, D.

        Raises:
            ValueError: There are more experts than devices, but not a multiple of them.
        """
        if num_devices < 1 or (num_experts > num_devices and num_experts % num_devices):
            raise ValueError(
                f"num_experts is {num_experts}: wanted a multiple of the {num_devices} devices of the "
                "expert-parallel group, or fewer experts than devices"
            )
        layer_L1, expert = np.arange(num_layers)[:, None], np.arange(num_experts)
        if num_experts < num_devices:
            device_LE = (expert * num_devices // max(num_experts, 1) + layer_L1) % num_devices
            slots = _rank_among_equal(device_LE.reshape(-1))
            return cls(device_LE, slots.reshape(device_LE.shape), num_devices)
        local = num_experts // num_devices
        device_LE = np.tile(expert // local, (num_layers, 1))
        return cls(device_LE, layer_L1 * local + expert % local, num_devices)

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

    @cached_property
    def _places(self) -> np.ndarray:
        """Number of every expert's slot among the slots of all devices, int64 ``[L * E]``."""
        return (self.device_LE * max(self.slots_per_device, 1) + self.slot_LE).reshape(-1)

    @property
    def is_even(self) -> bool:
        """Whether this is Megatron's own map, with all experts in Megatron's order."""
        even = OwnerMap.even(self.num_layers, self.num_experts, self.num_devices)
        return np.array_equal(self.device_LE, even.device_LE) and np.array_equal(self.slot_LE, even.slot_LE)

    def slots_on(self, device: int, layer: int) -> dict[int, int]:
        """Slots of the experts of one layer that a device owns: expert -> slot, ascending by expert."""
        experts = np.flatnonzero(self.device_LE[layer] == device)
        return {int(expert): int(self.slot_LE[layer, expert]) for expert in experts}

    def expert_in(self, device: int, slot: int) -> tuple[int, int]:
        """The (layer, expert) in a slot of a device."""
        return self._contents[device, slot]

    @cached_property
    def _contents(self) -> dict[tuple[int, int], tuple[int, int]]:
        """The (layer, expert) in every slot: (device, slot) -> (layer, expert)."""
        return {
            (int(self.device_LE[layer, expert]), int(self.slot_LE[layer, expert])): (layer, expert)
            for layer in range(self.num_layers)
            for expert in range(self.num_experts)
        }

    def with_owners(self, device_LE: np.ndarray) -> "OwnerMap":
        """A map with new owners in which experts that stay on their device also stay in their slot.

        Experts that come to a device take the slots that other experts leave, and free slots, both in
        ascending order.

        Args:
            device_LE: New owner of every expert, integers ``[L, E]``.

        Raises:
            ValueError: The shape is not that of this map, or a device gets more experts than it has slots
                for.
        """
        device_LE = np.asarray(device_LE, dtype=np.int64)
        if device_LE.shape != self.device_LE.shape:
            raise ValueError(
                f"device_LE has shape {device_LE.shape}, wanted {self.device_LE.shape}, the shape of the map"
            )
        if ((device_LE < 0) | (device_LE >= self.num_devices)).any():
            raise ValueError(f"device_LE has a device outside 0 to {self.num_devices - 1}: wanted only those")
        slots, moves = self.slot_LE.reshape(-1).copy(), (device_LE != self.device_LE).reshape(-1)
        is_open = np.ones(self.num_devices * self.slots_per_device, bool)
        is_open[self._places[~moves]] = False
        room_D = is_open.reshape(self.num_devices, -1).sum(axis=1)
        comes = np.flatnonzero(moves)
        comes = comes[np.argsort(device_LE.reshape(-1)[comes], kind="stable")]
        to = device_LE.reshape(-1)[comes]
        got_D = np.bincount(to, minlength=self.num_devices)
        if (got_D > room_D).any():
            device = int((got_D > room_D).argmax())
            raise ValueError(
                f"device {device} gets {int(got_D[device])} experts and has {int(room_D[device])} slots for "
                "them: wanted at most as many experts as slots, of which every device keeps its number"
            )
        first_D = np.cumsum(room_D) - room_D
        slots[comes] = np.flatnonzero(is_open)[first_D[to] + _rank_among_equal(to)] % max(
            self.slots_per_device, 1
        )
        slot_LE = slots.reshape(device_LE.shape)
        return OwnerMap(device_LE, slot_LE, self.num_devices)

    def moves_to(self, target: "OwnerMap") -> tuple[SlotMove, ...]:
        """The moves that turn this map into ``target``, ordered by layer, then expert.

        Args:
            target: The wanted map of the same experts and devices.
        """
        differs = (self.device_LE != target.device_LE) | (self.slot_LE != target.slot_LE)
        return tuple(
            SlotMove(
                layer=int(layer),
                expert=int(expert),
                source_device=int(self.device_LE[layer, expert]),
                source_slot=int(self.slot_LE[layer, expert]),
                device=int(target.device_LE[layer, expert]),
                slot=int(target.slot_LE[layer, expert]),
            )
            for layer, expert in np.argwhere(differs)
        )

    def digest(self) -> bytes:
        """A 16-byte hash by which ranks compare their maps."""
        return blake2b(
            self.device_LE.tobytes() + self.slot_LE.tobytes() + bytes([self.num_devices % 256]),
            digest_size=16,
        ).digest()

    def as_lists(self) -> dict[str, Any]:
        """The map as plain lists and numbers, for a checkpoint. :meth:`from_lists` is the inverse."""
        return {
            "device_LE": self.device_LE.tolist(),
            "slot_LE": self.slot_LE.tolist(),
            "num_devices": self.num_devices,
        }

    @classmethod
    def from_lists(cls, lists: Mapping[str, Any]) -> "OwnerMap":
        """The map from what :meth:`as_lists` returned."""
        return cls(
            np.array(lists["device_LE"], dtype=np.int64),
            np.array(lists["slot_LE"], dtype=np.int64),
            int(lists["num_devices"]),
        )


def _rank_among_equal(values: np.ndarray) -> np.ndarray:
    """How many equal values come before each one, int64 of the same length.

    Args:
        values: Non-negative integers, one-dimensional.
    """
    order = np.argsort(values, kind="stable")
    number = np.bincount(values)
    first = np.cumsum(number) - number
    rank = np.empty(len(values), np.int64)
    rank[order] = np.arange(len(values)) - first[values[order]]
    return rank
