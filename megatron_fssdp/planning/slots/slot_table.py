"""Which expert is in which slot: the numbered places of the devices for one expert's weights each.

Device d of D has U slots, with the numbers d*U … d*U + U - 1. An expert is in at most one slot of a device.

Shape letters: D devices, E experts, U slots of a device.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_fssdp.planning.arrays import frozen_array
from megatron_fssdp.planning.placement.placement import ExpertPlacement


@dataclass(frozen=True, eq=False)
class SlotTable:
    """The expert in every slot of one layer.

    Attributes:
        expert_DU: Expert in each slot of each device, -1 if the slot is empty; int64 ``[D, U]``, read-only.
            A device's own experts are in its first slots, its replicas in its last ones, both ascending. The
            empty slots lie between them.
    """

    expert_DU: np.ndarray

    def __post_init__(self) -> None:
        object.__setattr__(self, "expert_DU", frozen_array(self.expert_DU, np.int64))

    @classmethod
    def of(cls, placement: ExpertPlacement, num_replica_slots: int, multiple: int = 1) -> "SlotTable":
        """The slots of a placement. U is the most experts that a device owns plus the replica slots.

        Empty slots round U up to a multiple of ``multiple``.

        Raises:
            ValueError: A device holds more replicas than it has replica slots.
        """
        replicas_D = placement.replicas_per_device_D
        if int(replicas_D.max()) > num_replica_slots:
            device = int(np.argmax(replicas_D > num_replica_slots))
            raise ValueError(
                f"device {device} holds {int(replicas_D[device])} replicas and has {num_replica_slots} slots "
                f"for them: wanted at most {num_replica_slots} replicas on each device; plan fewer replicas "
                "or give every device more replica slots"
            )
        owned_D = placement.owned_per_device_D
        slots = int(owned_D.max()) + num_replica_slots
        slots += -slots % multiple
        expert_DU = np.full((placement.num_devices, slots), -1, np.int64)
        by_owner = np.argsort(placement.owner_E, kind="stable")
        owner = placement.owner_E[by_owner]
        first_D = np.cumsum(owned_D) - owned_D
        expert_DU[owner, np.arange(owner.size) - first_D[owner]] = by_owner
        is_replica_DE = placement.present_ED.T.copy()
        is_replica_DE[placement.owner_E, np.arange(placement.num_experts)] = False
        device, expert = np.nonzero(is_replica_DE)
        end_D = np.cumsum(replicas_D)
        expert_DU[device, slots - end_D[device] + np.arange(device.size)] = expert
        return cls(expert_DU)

    @property
    def num_devices(self) -> int:
        """Number of devices, D."""
        return int(self.expert_DU.shape[0])

    @property
    def slots_per_device(self) -> int:
        """Number of slots of each device, U."""
        return int(self.expert_DU.shape[1])

    @property
    def num_slots(self) -> int:
        """Number of slots of all devices, D*U."""
        return int(self.expert_DU.size)

    @cached_property
    def num_experts(self) -> int:
        """Number of experts, E. Every expert is in a slot of its owner."""
        return int(self.expert_DU.max()) + 1

    @cached_property
    def slot_ED(self) -> np.ndarray:
        """Slot in which each device has each expert, -1 where it is absent; int64 ``[E, D]``, read-only."""
        slot_ED = np.full((self.num_experts, self.num_devices), -1, np.int64)
        device, place = np.nonzero(self.expert_DU >= 0)
        slot_ED[self.expert_DU[device, place], device] = device * self.slots_per_device + place
        return frozen_array(slot_ED, np.int64)
