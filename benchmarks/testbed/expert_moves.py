"""Moves owners and resident replicas between two iterations, as the Megatron adapter does.

Parameters are really moved. In addition, the testbed sends as many bytes as Adam's two moments have in fp32.

Shape letters: L layers, D devices, E experts.
"""

from collections.abc import Sequence
from functools import partial

import torch

from megatron_fssdp.collectives.sparse.slot_exchange import SlotQuantity, exchange_slots
from megatron_fssdp.planning.placement.owner_map import OwnerMap, ResidentMap, SlotMove
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.runtime.experts.expert_layout import ExpertLayout, ParametersByExpert
from megatron_fssdp.runtime.layers.moe_runtime import MoERuntime
from megatron_fssdp.strategies.layer_planning import StageLoads, moved_before

MOMENTS = 2


class ExpertMoves:
    """Lets a strategy decide between iterations, and moves experts accordingly."""

    def __init__(self, runtime: MoERuntime) -> None:
        self._runtime, self._strategy = runtime, runtime.strategy
        layers = runtime.layers
        first = layers[0]
        self._group, self._device = first.groups.expert_parallel, first.groups.device
        self._owners = OwnerMap.even(
            len(layers), first.local.context.num_experts, first.local.context.num_devices
        )
        self._resident_map = ResidentMap.empty(len(layers), first.local.context.num_devices, 0)
        slots = [tensors for layer in layers for tensors in layer.local.experts.parameters.values()]
        self._layout = ExpertLayout.of(slots[0])
        resident_slots = self._strategy.resident_slots
        if resident_slots:
            self._resident_map = ResidentMap.empty(
                len(layers), first.local.context.num_devices, resident_slots
            )
            num_resident = len(layers) * resident_slots
            slots += [
                [torch.nn.Parameter(torch.zeros_like(t)) for t in slots[0]] for _ in range(num_resident)
            ]
        self._slots = slots
        weights = [self._flattened(tensors) for tensors in slots]
        # The moments are never read, so one tensor is used for all slots.
        moments = [torch.zeros(MOMENTS * self._layout.numel)] * len(slots)
        self._quantities = [
            SlotQuantity(name, rows[0].numel(), rows[0].dtype, rows[0].device, [[(0, row)] for row in rows])
            for name, rows in (("parameters", weights), ("moments", moments))
        ]

    def before(self, iteration: int) -> list[ParametersByExpert]:
        """Move experts after ``iteration`` iterations are complete and before the next one begins.

        Returns:
            Parameters of all experts on this device, for each layer.
        """
        layers = self._runtime.layers
        contexts, histories = [layer.local.context for layer in layers], [layer.history for layer in layers]
        loads = partial(StageLoads.of, contexts, histories)
        moved = moved_before(self._strategy, iteration, loads, self._owners)
        if isinstance(moved, OwnerMap):
            self._reshard(moved)
        elif moved is not None:
            self._replicate(moved)
        return [layer.local.experts.all_parameters for layer in layers]

    def _reshard(self, new: OwnerMap) -> None:
        layers = self._runtime.layers
        self._exchange(self._owners.moves_to(new))
        self._owners = new
        for index, layer in enumerate(layers):
            owned = new.slots_on(self._device, index)
            tensors = {expert: self._slots[slot] for expert, slot in owned.items()}
            layer.own(new.device_LE[index], tensors)

    def _replicate(self, placements: Sequence[ExpertPlacement]) -> None:
        layers = self._runtime.layers
        new = self._resident_map.holding(placements)
        self._exchange(self._resident_map.copies_to(new, self._owners), are_copies=True)
        self._resident_map = new
        for index, (layer, placement) in enumerate(zip(layers, placements, strict=True)):
            first = self._owners.slots_per_device + index * new.slots
            held = new.held_by(self._device, index)
            layer.keep(placement, {expert: self._slots[first + slot] for expert, slot in held.items()})

    def _exchange(self, moves: Sequence[SlotMove], *, are_copies: bool = False) -> None:
        exchange_slots(self._group, moves, self._quantities, are_copies=are_copies)

    def _flattened(self, tensors: Sequence[torch.nn.Parameter]) -> torch.Tensor:
        storage = tensors[0].untyped_storage()
        if storage.nbytes() == self._layout.num_bytes:  # another stack has already flattened them
            return torch.empty(0, dtype=self._layout.dtype, device=tensors[0].device).set_(storage)
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        for tensor, view in zip(tensors, self._layout.unpack(flat), strict=True):
            tensor.data = view
        return flat
