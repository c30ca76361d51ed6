"""The owner map of a pipeline stage, together with Megatron's numbers of its layers.

Slots are counted over the stage's MoE layers in the order of the map, with ``E/D`` slots for each layer
(E experts of a layer, D devices). Slot ``a*E/D + j`` of a device is the j-th local expert of the module
that Megatron registered for layer ``a`` of the map. After a re-shard, it may hold any expert of any
layer of the stage.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_fssdp.planning.placement.owner_map import OwnerMap


class SlotContent(NamedTuple):
    """The expert that a slot holds: Megatron's number of its layer, from 1, and its number, from 0."""

    layer_number: int
    expert: int


@dataclass(frozen=True, eq=False)
class StageOwners:
    """Which device owns which expert of a pipeline stage.

    Attributes:
        owners: Owner map over the MoE layers of all model chunks of the stage.
        layer_numbers: Megatron's global number of each layer of the owner map, counted from 1. Layers of
            multi-token prediction are counted after the decoder's layers.

    Raises:
        ValueError: The layer numbers do not match the layers of the owner map, or a number appears twice.
    """

    owners: OwnerMap
    layer_numbers: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer_numbers", tuple(int(number) for number in self.layer_numbers))
        if not len(self.layer_numbers) == len(set(self.layer_numbers)) == self.owners.num_layers:
            raise ValueError(
                f"layer numbers: got {self.layer_numbers}, wanted {self.owners.num_layers} different "
                "numbers, one for each layer of the owner map"
            )

    def contents(self, device: int, layer: int) -> tuple[SlotContent, ...]:
        """Return the experts that the slots of one expert module hold, in the order of slots.

        Args:
            device: Rank in the expert-parallel group.
            layer: Index, in the owner map, of the layer for which Megatron registered the module.
        """
        local = self.owners.num_experts // self.owners.num_devices
        held = (self.owners.expert_in(device, layer * local + index) for index in range(local))
        return tuple(SlotContent(self.layer_numbers[index], expert) for index, expert in held)

    def as_lists(self) -> dict[str, Any]:
        """Return plain lists of numbers for a checkpoint; :meth:`from_lists` is the inverse."""
        return {"layer_numbers": list(self.layer_numbers), **self.owners.as_lists()}

    @classmethod
    def from_lists(cls, lists: Mapping[str, Any]) -> "StageOwners":
        """Rebuild the stage's owners from the result of :meth:`as_lists`."""
        return cls(OwnerMap.from_lists(lists), tuple(lists["layer_numbers"]))
