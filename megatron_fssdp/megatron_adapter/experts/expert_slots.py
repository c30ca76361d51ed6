"""The expert Parameters of a pipeline stage as numbered slots, and the expert that each slot holds.

Shape letters: L MoE layers of the stage, E experts of a layer, D devices of the expert-parallel group.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from megatron_fssdp.megatron_adapter.experts import gradient_sync
from megatron_fssdp.megatron_adapter.experts.slot_experts import SlotExperts
from megatron_fssdp.planning.placement.owner_map import OwnerMap
from megatron_fssdp.runtime.experts.expert_layout import ExpertLayout, ExpertParameters
from megatron_fssdp.runtime.layers.slot_layer import SlotLayer


@dataclass(frozen=True, eq=False)
class _RegisteredLayer:
    """One MoE layer as Megatron built it.

    Attributes:
        layer: The layer on this rank.
        experts: Megatron's expert module, which registered the Parameters.
        parameters: Parameters of each local expert, ``E/D`` entries.
        computes: What computes the experts in the layer's slots.
    """

    layer: SlotLayer
    experts: torch.nn.Module
    parameters: tuple[ExpertParameters, ...]
    computes: SlotExperts


class ExpertSlots:
    """Slots of this rank: numbered places that each hold one expert of the pipeline stage.

    A slot is an index over the Parameters that Megatron registered. The Parameters stay where they are;
    a re-shard moves their contents. Slots are numbered layer by layer, in the order in which the layers
    were built, over all model chunks of this rank. The :class:`OwnerMap` says which expert is in which
    slot. Two layers, four experts and two devices, after a re-shard (``layer.expert``)::

        Parameters of    |  layer 0  |  layer 1  |
        slot             |  0  |  1  |  2  |  3  |
        device 0 holds   | 0.0 | 0.1 | 0.2 | 1.3 |   three experts of layer 0
        device 1 holds   | 1.0 | 0.3 | 1.2 | 1.1 |   one expert of layer 0
    """

    def __init__(self) -> None:
        self._layers: list[_RegisteredLayer] = []
        self._owners: OwnerMap | None = None

    def add_layer(
        self,
        layer: SlotLayer,
        experts: torch.nn.Module,
        parameters: Sequence[ExpertParameters],
        computes: SlotExperts,
    ) -> int:
        """Register a built layer.

        Args:
            layer: The layer on this rank.
            experts: Megatron's expert module, which registered the Parameters.
            parameters: Parameters of each local expert, ``E/D`` entries.
            computes: What computes the experts in the layer's slots.

        Returns:
            Index of the layer in the owner map.

        Raises:
            RuntimeError: Owners have moved already.
        """
        if self._owners is not None:
            raise RuntimeError(
                "MoE layer: got a layer that was built after a re-shard, wanted all layers before the first "
                "re-shard; build the whole model before training"
            )
        self._layers.append(_RegisteredLayer(layer, experts, tuple(parameters), computes))
        return len(self._layers) - 1

    def __bool__(self) -> bool:
        return bool(self._layers)

    @property
    def owners(self) -> OwnerMap:
        """The current owner map. Before the first re-shard, it is Megatron's even distribution."""
        if self._owners is not None:
            return self._owners
        context = self._layers[0].layer.context
        return OwnerMap.even(len(self._layers), context.num_experts, context.num_devices)

    @property
    def layer_numbers(self) -> tuple[int, ...]:
        """Megatron's number of every layer of the owner map."""
        return tuple(layer.layer.context.layer for layer in self._layers)

    @property
    def layers(self) -> list[SlotLayer]:
        """Every layer of the owner map."""
        return [one.layer for one in self._layers]

    @property
    def parameters(self) -> list[ExpertParameters]:
        """The Parameters of every slot of this rank, in the order of slots, ``L*E/D`` entries."""
        return [parameters for layer in self._layers for parameters in layer.parameters]

    def adopt(self, owners: OwnerMap) -> None:
        """Tell all layers who owns which expert from now on.

        Args:
            owners: The new owner map. The slots hold its experts already.
        """
        slots = self.parameters
        layout = ExpertLayout.of(slots[0])
        everyone = [one.computes for one in self._layers]
        for index, one in enumerate(self._layers):
            owned = owners.slots_on(one.layer.groups.device, index)
            parameters = {expert: slots[slot] for expert, slot in owned.items()}
            one.layer.own(owners.device_LE[index], parameters, layout)
            one.computes.share_modules(everyone)
            gradient_sync.belong_to(one.layer, chain.from_iterable(parameters.values()))
        self._owners = owners

    def await_parameters(self, layer: int) -> None:
        """Finish the parameter all-gathers that DDP overlaps, for the slots that hold a layer's experts.

        Args:
            layer: Index of the layer in the owner map.
        """
        registered_in = {layer}
        if self._owners is not None:
            device = self._layers[layer].layer.groups.device
            per_layer = self._owners.slots_per_device // len(self._layers)
            registered_in = {slot // per_layer for slot in self._owners.slots_on(device, layer).values()}
        for index in sorted(registered_in):
            gradient_sync.await_parameters(self._layers[index].experts)
