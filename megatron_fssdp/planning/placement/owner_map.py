"""Who keeps which expert of which layer, and in which slot: parameters and optimizer state.

A device has ``S = L*E/D`` slots over all MoE layers of its pipeline stage together, so a
layer's shard on a device may hold any number of experts while memory stays even (Hecate §4.3).

Shape letters: L MoE layers of a pipeline stage, E experts, D devices, S slots of a device.
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
        layer: Index of the expert's layer in the map.
        expert: Its number in the layer.
        source_device: Where it is.
        source_slot: In which slot there.
        device: Where it goes.
        slot: Into which slot there.
    """

    layer: int
    expert: int
    source_device: int
    source_slot: int
    device: int
    slot: int


@dataclass(frozen=True, eq=False)
class OwnerMap:
    """(layer, expert) -> (device, slot), one to one.

    Attributes:
        device_LE: Device that keeps each expert, int64 ``[L, E]``, read-only.
        slot_LE: Its slot there, int64 ``[L, E]``, read-only.
        num_devices: D.

    Raises:
        ValueError: Two experts share a slot, or the experts do not fill all slots of equal devices.
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
        if self.num_devices < 1 or device_LE.size % self.num_devices:
            raise ValueError(
                f"owner map: got {device_LE.size} experts on {self.num_devices} devices, wanted the same "
                "number of slots on every device"
            )
        places = device_LE.reshape(-1) * max(self.slots_per_device, 1) + slot_LE.reshape(-1)
        in_range = ((slot_LE >= 0) & (slot_LE < self.slots_per_device)).all()
        if not in_range or not np.array_equal(np.sort(places), np.arange(device_LE.size)):
            raise ValueError(
                f"owner map: got slots that are missing or used twice, wanted every one of the "
                f"{self.slots_per_device} slots of all {self.num_devices} devices used once"
            )

    @classmethod
    def even(cls, num_layers: int, num_experts: int, num_devices: int) -> "OwnerMap":
        """Megatron's own map: E/D consecutive experts of every layer a device, slots layer by layer."""
        if num_devices < 1 or num_experts % num_devices:
            raise ValueError(
                f"num_experts is {num_experts}: wanted a multiple of the {num_devices} devices of the "
                "expert-parallel group"
            )
        local = num_experts // num_devices
        expert = np.arange(num_experts)
        device_LE = np.tile(expert // max(local, 1), (num_layers, 1))
        slot_LE = np.arange(num_layers)[:, None] * local + expert % max(local, 1)
        return cls(device_LE, slot_LE, num_devices)

    @property
    def num_layers(self) -> int:
        """L."""
        return self.device_LE.shape[0]

    @property
    def num_experts(self) -> int:
        """E."""
        return self.device_LE.shape[1]

    @property
    def slots_per_device(self) -> int:
        """S."""
        return self.device_LE.size // self.num_devices

    @property
    def is_even(self) -> bool:
        """Whether every layer is split as Megatron does, in Megatron's order."""
        even = OwnerMap.even(self.num_layers, self.num_experts, self.num_devices)
        return np.array_equal(self.device_LE, even.device_LE) and np.array_equal(self.slot_LE, even.slot_LE)

    def slots_on(self, device: int, layer: int) -> dict[int, int]:
        """Slot of each expert of a layer that a device keeps, ascending by expert."""
        experts = np.flatnonzero(self.device_LE[layer] == device)
        return {int(expert): int(self.slot_LE[layer, expert]) for expert in experts}

    def expert_in(self, device: int, slot: int) -> tuple[int, int]:
        """(layer, expert) that a slot holds."""
        return self._contents[device, slot]

    @cached_property
    def _contents(self) -> dict[tuple[int, int], tuple[int, int]]:
        return {
            (int(self.device_LE[layer, expert]), int(self.slot_LE[layer, expert])): (layer, expert)
            for layer in range(self.num_layers)
            for expert in range(self.num_experts)
        }

    def with_owners(self, device_LE: np.ndarray) -> "OwnerMap":
        """The map with new owners, in which an expert that stays on its device stays in its slot.

        Experts that come to a device take the slots that others leave, both in ascending order.

        Args:
            device_LE: New device of every expert, integers ``[L, E]``.
        """
        device_LE = np.asarray(device_LE, dtype=np.int64)
        if device_LE.shape != self.device_LE.shape:
            raise ValueError(
                f"device_LE has shape {device_LE.shape}, wanted {self.device_LE.shape}, that of the map"
            )
        slot_LE = self.slot_LE.copy()
        moves = device_LE != self.device_LE
        for device in range(self.num_devices):
            left = np.sort(self.slot_LE[moves & (self.device_LE == device)])
            comes = moves & (device_LE == device)
            if int(comes.sum()) != len(left):
                raise ValueError(
                    f"device {device} gets {int(comes.sum())} experts and gives {len(left)} away: wanted as "
                    "many, every device keeps its number of slots"
                )
            slot_LE[comes] = left
        return OwnerMap(device_LE, slot_LE, self.num_devices)

    def moves_to(self, target: "OwnerMap") -> tuple[SlotMove, ...]:
        """The experts whose slot differs in ``target``, by layer, then expert."""
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
        """Hash by which ranks compare maps."""
        return blake2b(
            self.device_LE.tobytes() + self.slot_LE.tobytes() + bytes([self.num_devices % 256]),
            digest_size=16,
        ).digest()

    def as_lists(self) -> dict[str, Any]:
        """Plain numbers, to keep in a checkpoint; :meth:`from_lists` is the inverse."""
        return {
            "device_LE": self.device_LE.tolist(),
            "slot_LE": self.slot_LE.tolist(),
            "num_devices": self.num_devices,
        }

    @classmethod
    def from_lists(cls, lists: Mapping[str, Any]) -> "OwnerMap":
        """The map of :meth:`as_lists`."""
        return cls(
            np.array(lists["device_LE"], dtype=np.int64),
            np.array(lists["slot_LE"], dtype=np.int64),
            int(lists["num_devices"]),
        )
