"""The owner map of a pipeline stage, with Megatron's numbers of its layers.

Slots are counted over the stage's MoE layers in the order of the map, ``E/D`` of each: slot
``a*E/D + j`` of a device is the j-th local expert of the module that Megatron registered for
layer ``a`` of the map, whatever expert of whatever layer it holds.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_fssdp.planning.placement.owner_map import OwnerMap


@dataclass(frozen=True)
class SlotContent:
    """The expert that a slot holds.

    Attributes:
        layer_number: Megatron's number of the expert's layer, from 1.
        expert: Its number in that layer.
    """

    layer_number: int
    expert: int


@dataclass(frozen=True, eq=False)
class StageOwners:
    """Who keeps which expert of a pipeline stage.

    Attributes:
        owners: Over the stage's MoE layers, of all its model chunks.
        layer_numbers: Megatron's global number of each layer of the map, from 1; layers of
            multi-token prediction are counted after the decoder's.

    Raises:
        ValueError: Not one number for every layer of the map.
    """

    owners: OwnerMap
    layer_numbers: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer_numbers", tuple(int(number) for number in self.layer_numbers))
        if (
            len(self.layer_numbers) != self.owners.num_layers
            or len(set(self.layer_numbers)) != self.owners.num_layers
        ):
            raise ValueError(
                f"layer numbers: got {self.layer_numbers}, wanted one of its own for each of the "
                f"{self.owners.num_layers} layers of the owner map"
            )

    def contents(self, device: int, layer: int) -> tuple[SlotContent, ...]:
        """What the local experts of a module hold, in their order.

        Args:
            device: Rank in the expert-parallel group.
            layer: Index in the map of the layer that the module was registered for.
        """
        local = self.owners.num_experts // self.owners.num_devices
        held = (self.owners.expert_in(device, layer * local + index) for index in range(local))
        return tuple(SlotContent(self.layer_numbers[index], expert) for index, expert in held)

    def registered(self, device: int, layer: int) -> tuple[SlotContent, ...]:
        """What the same local experts hold in stock Megatron."""
        local = self.owners.num_experts // self.owners.num_devices
        return tuple(SlotContent(self.layer_numbers[layer], device * local + index) for index in range(local))

    def as_lists(self) -> dict[str, Any]:
        """Plain numbers, to keep in a checkpoint; :meth:`from_lists` is the inverse."""
        return {"layer_numbers": list(self.layer_numbers), **self.owners.as_lists()}

    @classmethod
    def from_lists(cls, lists: Mapping[str, Any]) -> "StageOwners":
        """The stage's owners of :meth:`as_lists`."""
        return cls(OwnerMap.from_lists(lists), tuple(lists["layer_numbers"]))
