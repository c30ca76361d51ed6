"""The expert Parameters of a pipeline stage as slots, and the expert that each one holds.

Shape letters: L MoE layers of the stage, E experts, D devices.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_fssdp.megatron_adapter.experts import gradient_sync
from megatron_fssdp.planning.placement.owner_map import OwnerMap
from megatron_fssdp.runtime.execution.layer_executor import LayerExecutor
from megatron_fssdp.runtime.experts.expert_layout import ExpertLayout

Parameters = Sequence[torch.nn.Parameter]


@dataclass(frozen=True, eq=False)
class _SlotLayer:
    """One MoE layer as Megatron built it."""

    executor: LayerExecutor
    experts: torch.nn.Module
    parameters: tuple[Parameters, ...]


class ExpertSlots:
    """A slot is an index over Megatron's own Parameters; what moves is their contents.

    Slots are numbered layer by layer in the order in which the layers were built, over all
    model chunks of this rank.
    """

    def __init__(self) -> None:
        self._layers: list[_SlotLayer] = []
        self._owners: OwnerMap | None = None

    def add_layer(
        self, executor: LayerExecutor, experts: torch.nn.Module, parameters: Sequence[Parameters]
    ) -> int:
        """Register a built layer.

        Args:
            executor: The layer on this rank.
            experts: Megatron's module that registered the Parameters.
            parameters: Of each local expert.

        Returns:
            The layer's index in the owner map.
        """
        if self._owners is not None:
            raise RuntimeError("a layer was added after owners moved; build the whole model before training")
        self._layers.append(_SlotLayer(executor, experts, tuple(parameters)))
        return len(self._layers) - 1

    def __bool__(self) -> bool:
        return bool(self._layers)

    @property
    def owners(self) -> OwnerMap:
        """The owner map in force; Megatron's even one at first."""
        if self._owners is not None:
            return self._owners
        context = self._layers[0].executor.context
        return OwnerMap.even(len(self._layers), context.num_experts, context.num_devices)

    @property
    def layer_numbers(self) -> tuple[int, ...]:
        """Megatron's number of every layer of the map."""
        return tuple(layer.executor.context.layer for layer in self._layers)

    @property
    def executors(self) -> list[LayerExecutor]:
        """The layers of the map."""
        return [layer.executor for layer in self._layers]

    @property
    def parameters(self) -> list[Parameters]:
        """The Parameters of each slot of this rank."""
        return [parameters for layer in self._layers for parameters in layer.parameters]

    def adopt(self, owners: OwnerMap) -> None:
        """Let the layers work with new owners; the slots' contents are in place already."""
        slots = self.parameters
        layout = ExpertLayout.of(slots[0])
        for index, layer in enumerate(self._layers):
            executor = layer.executor
            owned = owners.slots_on(executor.groups.device, index)
            executor.own(
                owners.device_LE[index], {expert: slots[slot] for expert, slot in owned.items()}, layout
            )
        self._owners = owners

    def await_parameters(self, layer: int) -> None:
        """Finish the parameter all-gathers that DDP overlaps, for the slots that a layer's experts are in."""
        registered_in = {layer}
        if self._owners is not None:
            device = self._layers[layer].executor.groups.device
            per_layer = self._owners.slots_per_device // len(self._layers)
            registered_in = {slot // per_layer for slot in self._owners.slots_on(device, layer).values()}
        for index in sorted(registered_in):
            gradient_sync.await_parameters(self._layers[index].experts)
