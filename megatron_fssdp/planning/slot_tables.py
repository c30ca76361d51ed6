"""Which expert is in which numbered slot of a device, and to which slot a source sends its tokens.

Device d of D has U slots, with the numbers d*U … d*U + U - 1. An expert is in at most one slot of a device.

A share table belongs to one source. It is int64 ``[J, E]``, with J = ``ROWS``: the n-th token, from 0, that
the source routes to expert e goes to slot ``table_JE[n % J, e]``. Even dispatch and dispatch to owners are
tables; exact shares are not.

Shape letters: J rows of a share table, D devices, E experts, U slots of a device, P pairs of both.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_fssdp.planning.arrays import frozen_array
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology

ROWS = 64
"""Rows of a share table, J: a power of two, so that the remainder ``n % J`` is a mask of bits."""


@dataclass(frozen=True, eq=False)
class SlotTable:
    """The expert in every slot of one layer, -1 if it is empty: ``expert_DU``, int64 ``[D, U]``, read-only.

    A device's own experts are in its first slots, its replicas in its last ones, both ascending.
    """

    expert_DU: np.ndarray

    def __post_init__(self) -> None:
        object.__setattr__(self, "expert_DU", frozen_array(self.expert_DU, np.int64))

    @classmethod
    def of(cls, placement: ExpertPlacement, num_replica_slots: int, multiple: int = 1) -> "SlotTable":
        """The slots of a placement: the most experts that a device owns, and the replica slots.

        Empty slots round U up to a multiple of ``multiple``. More replicas than replica slots are a
        ValueError.
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
        """Slots of each device, U."""
        return int(self.expert_DU.shape[1])

    @property
    def num_slots(self) -> int:
        """Number of slots of all devices, D*U."""
        return int(self.expert_DU.size)

    @cached_property
    def num_experts(self) -> int:
        """Number of experts, E; every one is in a slot of its owner."""
        return int(self.expert_DU.max()) + 1

    @property
    def are_experts(self) -> bool:
        """Whether each slot has the expert of its number, so that nothing has to be remapped."""
        return np.array_equal(self.expert_DU.reshape(-1), np.arange(self.num_slots))

    @cached_property
    def slot_ED(self) -> np.ndarray:
        """Slot in which each device has each expert, -1 where it is absent; int64 ``[E, D]``, read-only."""
        slot_ED = np.full((self.num_experts, self.num_devices), -1, np.int64)
        device, place = np.nonzero(self.expert_DU >= 0)
        slot_ED[self.expert_DU[device, place], device] = device * self.slots_per_device + place
        return frozen_array(slot_ED, np.int64)


def even_table(slots: SlotTable, placement: ExpertPlacement, topology: Topology, source: int) -> np.ndarray:
    """The table of even dispatch, ``[J, E]`` (Hecate, §4.4): nearest holders first, in equal parts.

    A source that has the expert keeps its tokens. Otherwise the holders in its node take turns, and if there
    are none, all holders. Sources begin with different holders.
    """
    present_ED = placement.present_ED
    in_node_ED = present_ED & (topology.node_of_device_D == topology.node_of_device[source])
    chosen_ED = np.where(in_node_ED.any(axis=1, keepdims=True), in_node_ED, present_ED)
    here_E = present_ED[:, source]
    chosen_ED[here_E] = False
    chosen_ED[here_E, source] = True
    num_E = chosen_ED.sum(axis=1)
    expert_P, device_P = np.nonzero(chosen_ED)
    first_E = np.cumsum(num_E) - num_E
    slot_P = slots.slot_ED[expert_P, device_P]
    table_JE = np.repeat(slot_P[first_E][None], ROWS, axis=0)
    (split,) = np.nonzero(num_E > 1)
    turn = (np.arange(ROWS)[:, None] + source + split) % num_E[split]
    table_JE[:, split] = slot_P[first_E[split] + turn]
    return table_JE


def owner_table(slots: SlotTable, placement: ExpertPlacement, source: int) -> np.ndarray:
    """The table ``[J, E]`` of owners; replicas serve only their own device (FasterMoE, §4.1)."""
    device_E = np.where(placement.present_ED[:, source], source, placement.owner_E)
    slot_E = slots.slot_ED[np.arange(placement.num_experts), device_E]
    return np.repeat(slot_E[None], ROWS, axis=0)
