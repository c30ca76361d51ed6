"""Which spare slot holds which replica: replicas that stay have Parameters of their own.

Beside the slots of the experts that it owns, every device has ``m`` spare slots a layer. They
are numbered after the owned ones, layer by layer.

Shape letters: L MoE layers of a pipeline stage, D devices, E experts, m spare slots a layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_fssdp.planning.placement.array_freezing import frozen_array
from megatron_fssdp.planning.placement.owner_map import OwnerMap, SlotMove
from megatron_fssdp.planning.placement.placement import ExpertPlacement

EMPTY = -1
"""In place of an expert's number."""


@dataclass(frozen=True, eq=False)
class ResidentMap:
    """(layer, device, spare slot) -> expert.

    Attributes:
        expert_LDm: Expert in every spare slot, or :data:`EMPTY`; int64 ``[L, D, m]``, read-only.

    Raises:
        ValueError: A device holds an expert twice.
    """

    expert_LDm: np.ndarray

    def __post_init__(self) -> None:
        object.__setattr__(self, "expert_LDm", frozen_array(self.expert_LDm, np.int64))
        for (layer, device), experts_m in self._devices():
            held = experts_m[experts_m != EMPTY].tolist()
            if len(set(held)) < len(held):
                raise ValueError(
                    f"layer {layer}, device {device}: got experts {held} in its spare slots, wanted each once"
                )

    @classmethod
    def empty(cls, num_layers: int, num_devices: int, slots: int) -> "ResidentMap":
        """Nothing in any slot."""
        return cls(np.full((num_layers, num_devices, slots), EMPTY, np.int64))

    @property
    def slots(self) -> int:
        """Spare slots of a device in a layer, m."""
        return self.expert_LDm.shape[2]

    def placement(self, layer: int, owner_E: np.ndarray) -> ExpertPlacement:
        """A layer's owners and the replicas in spare slots."""
        num_devices = self.expert_LDm.shape[1]
        present_ED = ExpertPlacement.owners_only(owner_E, num_devices).present_ED.copy()
        device_P, slot_P = np.nonzero(self.expert_LDm[layer] != EMPTY)
        present_ED[self.expert_LDm[layer, device_P, slot_P], device_P] = True
        return ExpertPlacement(owner_E, present_ED, slots=self.slots)

    def held_by(self, device: int, layer: int) -> dict[int, int]:
        """A device's replicas of a layer, ascending by expert, and the spare slot (from 0) of each."""
        experts = self.expert_LDm[layer, device].tolist()
        return {expert: experts.index(expert) for expert in sorted(experts) if expert != EMPTY}

    def holding(self, placements: Sequence[ExpertPlacement]) -> "ResidentMap":
        """The map for other replicas: those that stay keep their slots, new ones take the lowest free slots.

        Args:
            placements: Of every layer.

        Raises:
            ValueError: A device gets more replicas of a layer than it has spare slots.
        """
        expert_LDm = self.expert_LDm.copy()
        for (layer, device), old_m in self._devices():
            placement = placements[layer]
            replicas = set(placement.experts_on(device)) - set(np.flatnonzero(placement.owner_E == device))
            if len(replicas) > self.slots:
                raise ValueError(
                    f"layer {layer}, device {device}: got {len(replicas)} replicas, wanted at most "
                    f"{self.slots}, its spare slots"
                )
            new = sorted(replicas - set(old_m.tolist()))
            for slot, expert in enumerate(old_m.tolist()):
                if expert not in replicas:
                    expert_LDm[layer, device, slot] = new.pop(0) if new else EMPTY
        return ResidentMap(expert_LDm)

    def copies_to(self, new: "ResidentMap", owners: OwnerMap) -> list[SlotMove]:
        """What has to be copied from owners into spare slots so that this map becomes ``new``."""
        copies = []
        changed = (new.expert_LDm != self.expert_LDm) & (new.expert_LDm != EMPTY)
        for layer, device, slot in np.argwhere(changed).tolist():
            expert = int(new.expert_LDm[layer, device, slot])
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
        num_layers, num_devices, _ = self.expert_LDm.shape
        return [
            ((layer, device), self.expert_LDm[layer, device])
            for layer in range(num_layers)
            for device in range(num_devices)
        ]
