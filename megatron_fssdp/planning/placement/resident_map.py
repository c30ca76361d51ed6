"""Which resident slot holds which resident replica (FlexMoE).

Resident replicas outlive iterations and have Parameters and optimizer states of their own. Every device has
W resident slots for each layer, in addition to the slots of the experts that it owns. Resident slots are
numbered after the owned slots, layer by layer.

Shape letters: L MoE layers of a pipeline stage, D devices, W slots, E experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_fssdp.planning.placement.array_freezing import frozen_array
from megatron_fssdp.planning.placement.owner_map import OwnerMap, SlotMove
from megatron_fssdp.planning.placement.placement import ExpertPlacement

EMPTY = -1
"""Stands for an expert's number in a resident slot that holds no expert."""


@dataclass(frozen=True, eq=False)
class ResidentMap:
    """Map from (layer, device, resident slot) to an expert.

    Attributes:
        expert_LDW: Expert in every resident slot, or :data:`EMPTY`; int64 ``[L, D, W]``, read-only.

    Raises:
        ValueError: A device holds the same expert of a layer twice.
    """

    expert_LDW: np.ndarray

    def __post_init__(self) -> None:
        object.__setattr__(self, "expert_LDW", frozen_array(self.expert_LDW, np.int64))
        for (layer, device), experts_W in self._devices():
            held = experts_W[experts_W != EMPTY].tolist()
            if len(set(held)) < len(held):
                raise ValueError(
                    f"layer {layer}, device {device}: got experts {held} in its resident slots, wanted each "
                    "once"
                )

    @classmethod
    def empty(cls, num_layers: int, num_devices: int, slots: int) -> "ResidentMap":
        """A map in which all resident slots are empty.

        Args:
            num_layers: Number of MoE layers of the pipeline stage, L.
            num_devices: Number of devices, D.
            slots: Number of resident slots of a device for each layer, m.
        """
        return cls(np.full((num_layers, num_devices, slots), EMPTY, np.int64))

    @property
    def slots(self) -> int:
        """Number of resident slots of a device for each layer, m."""
        return self.expert_LDW.shape[2]

    def placement(self, layer: int, owner_E: np.ndarray) -> ExpertPlacement:
        """The placement of one layer: its owners, and its replicas in resident slots.

        Args:
            layer: Index of the layer in the map.
            owner_E: Owner of every expert of the layer, integers ``[E]``.
        """
        num_devices = self.expert_LDW.shape[1]
        present_ED = ExpertPlacement.owners_only(owner_E, num_devices).present_ED.copy()
        device_P, slot_P = np.nonzero(self.expert_LDW[layer] != EMPTY)
        present_ED[self.expert_LDW[layer, device_P, slot_P], device_P] = True
        return ExpertPlacement(owner_E, present_ED, slots=self.slots)

    def held_by(self, device: int, layer: int) -> dict[int, int]:
        """Resident replicas of a device in one layer: expert -> resident slot (from 0), sorted by expert."""
        experts = self.expert_LDW[layer, device].tolist()
        return {expert: experts.index(expert) for expert in sorted(experts) if expert != EMPTY}

    def holding(self, placements: Sequence[ExpertPlacement]) -> "ResidentMap":
        """A map that holds the replicas of other placements.

        Replicas that are already in this map keep their slots. New replicas take the lowest free slots.

        Args:
            placements: The wanted placement of every layer.

        Raises:
            ValueError: A device gets more replicas of a layer than it has resident slots.
        """
        expert_LDW = self.expert_LDW.copy()
        for (layer, device), old_W in self._devices():
            placement = placements[layer]
            replicas = set(placement.experts_on(device)) - set(np.flatnonzero(placement.owner_E == device))
            if len(replicas) > self.slots:
                raise ValueError(
                    f"layer {layer}, device {device}: got {len(replicas)} replicas, wanted at most "
                    f"{self.slots}, the number of its resident slots"
                )
            new = sorted(replicas - set(old_W.tolist()))
            for slot, expert in enumerate(old_W.tolist()):
                if expert not in replicas:
                    expert_LDW[layer, device, slot] = new.pop(0) if new else EMPTY
        return ResidentMap(expert_LDW)

    def copies_to(self, new: "ResidentMap", owners: OwnerMap) -> list[SlotMove]:
        """The copies from owners into resident slots that turn this map into ``new``.

        Args:
            new: The wanted map.
            owners: Owners and their slots.
        """
        copies = []
        changed = (new.expert_LDW != self.expert_LDW) & (new.expert_LDW != EMPTY)
        for layer, device, slot in np.argwhere(changed).tolist():
            expert = int(new.expert_LDW[layer, device, slot])
            copies.append(
                SlotMove(
                    layer,
                    expert,
                    int(owners.device_LE[layer, expert]),
                    int(owners.slot_LE[layer, expert]),
                    device,
                    owners.slots_per_device + layer * self.slots + slot,
                )
            )
        return copies

    def _devices(self) -> list[tuple[tuple[int, int], np.ndarray]]:
        """Every ((layer, device), experts in the resident slots of that device, ``[W]``)."""
        num_layers, num_devices, _ = self.expert_LDW.shape
        return [
            ((layer, device), self.expert_LDW[layer, device])
            for layer in range(num_layers)
            for device in range(num_devices)
        ]
