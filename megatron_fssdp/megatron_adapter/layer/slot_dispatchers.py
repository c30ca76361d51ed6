"""The dispatchers of a layer: Megatron's own, or an optional one, built for slots instead of experts."""

import copy
from functools import cache
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_fssdp.megatron_adapter.layer.strategy_session import StrategySession
from megatron_fssdp.runtime.layers.expert_groups import ExpertGroups
from megatron_fssdp.runtime.layers.slot_pass import SlotPass


class SlotDispatchers:
    """Makes a layer's dispatcher for the slots of a pass, once for each number of slots and kind.

    Args:
        layer: The layer, as Megatron built it.
        session: Session of the strategy.
        groups: Process groups of the layer.
        pg_collection: Megatron's process groups.
    """

    def __init__(
        self, layer: Any, session: StrategySession, groups: ExpertGroups, pg_collection: ProcessGroupCollection
    ) -> None:
        self._layer, self._session, self._groups = layer, session, groups
        self._pg_collection = pg_collection
        self._stock = type(layer.token_dispatcher)
        self._made: dict[tuple[str, int], Any] = {}
        self.divided: Any = None

    def of(self, one: SlotPass) -> Any:
        """The dispatcher of a pass."""
        kind = "megatron"
        key = kind, one.slots.slots_per_device
        if key not in self._made:
            self._made[key] = self._make(*key)
        return self._made[key]

    def own_tokens(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The tokens that this rank dispatches."""
        return hidden_states

    def route(self, hidden_states: torch.Tensor, padding_mask: torch.Tensor | None) -> Any:
        raise NotImplementedError

    def _make(self, kind: str, num_slots: int) -> Any:
        layer, groups = self._layer, self._groups
        config = copy.copy(layer.config)
        config.num_moe_experts = num_slots * groups.num_devices
        # The router has padded the map of experts already.
        config.moe_pad_expert_input_to_capacity = False
        first = groups.device * num_slots
        made = _with_remap(self._stock)(
            num_slots, list(range(first, first + num_slots)), config, self._pg_collection
        )
        made.slot_layer = layer.slot_layer
        if layer.shared_expert_overlap:
            made.set_shared_experts(layer.shared_experts)
        return made


@cache
def _with_remap(dispatcher: type) -> type:
    """A class of dispatchers whose first phase turns the routing of experts into the routing of slots."""

    class SlotDispatcher(dispatcher):  # type: ignore[misc]
        def dispatch_preprocess(
            self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
        ) -> Any:
            return super().dispatch_preprocess(hidden_states, *self.slot_layer.remap(routing_map, probs))

    SlotDispatcher.__name__ = SlotDispatcher.__qualname__ = f"Slot{dispatcher.__name__}"
    return SlotDispatcher
