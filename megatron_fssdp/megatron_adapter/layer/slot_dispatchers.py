"""The dispatchers of a layer: Megatron's own, or an optional one, built for slots instead of experts."""

import copy
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.router import Router

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.dispatchers.deduplicated import DeduplicatedTokenDispatcher
from megatron_fssdp.dispatchers.known_splits import KnownSplitsDispatcher
from megatron_fssdp.dispatchers.parm.parm_dispatcher import DividedGate, ParmDispatcher
from megatron_fssdp.dispatchers.parm.schedule_selector import ScheduleSelector, have_equal_tokens
from megatron_fssdp.dispatchers.smart_schedule import SmartScheduleTokenDispatcher
from megatron_fssdp.megatron_adapter.layer.strategy_session import StrategySession
from megatron_fssdp.megatron_adapter.support.limits import check_slots, keeps_flex
from megatron_fssdp.megatron_adapter.support.megatron_settings import MegatronSettings
from megatron_fssdp.runtime.layers.expert_groups import ExpertGroups
from megatron_fssdp.runtime.layers.pass_binder import SlotPass


class SlotDispatchers:
    """Makes a built layer's dispatcher for the slots of a pass, once for each number of slots and kind.

    ``divides_tokens`` says whether tensor-parallel ranks have the same tokens, which :meth:`route` divides.
    """

    def __init__(
        self,
        layer: Any,
        session: StrategySession,
        settings: MegatronSettings,
        groups: ExpertGroups,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        self._layer, self._session, self._settings = layer, session, settings
        self._groups, self._pg_collection = groups, pg_collection
        self._built = layer.token_dispatcher
        self._stock: Any = type(layer.token_dispatcher)
        num_parts = pg_collection.expt_tp.size()
        self._takes_splits = KnownSplitsDispatcher.serves(self._stock, layer.config, num_parts)
        self._made: dict[tuple[type, int], Any] = {}
        self._begun: Any = None
        self._whole_tokens: torch.Tensor | None = None
        self._own_tokens: torch.Tensor | None = None
        self.divides_tokens = have_equal_tokens(layer.config, pg_collection)
        self._selector = self._selector_of() if pg_collection.tp.size() > 1 else None
        if self.divides_tokens:
            self._gate = DividedGate(layer.router, gate_of(layer), pg_collection)
            # Megatron refuses more ranks with the same tokens without sequence parallelism.
            layer.attn_tp_group = SimpleNamespace(size=lambda: 1)

    def check_unchanged(self) -> None:
        """Refuse, by a ConfigurationError, another token dispatcher, or methods of one alone."""
        kinds = {id(self._built): self._stock} | {id(made): kind for (kind, _), made in self._made.items()}
        if type(present := self._layer.token_dispatcher) is not kinds.get(id(present)):
            raise ConfigurationError(
                f"MoE layer: got a {type(present).__name__} that became its token dispatcher after DDP had "
                "wrapped the model, wanted it before, because each number of slots has one of its class; set "
                "it before, or use --moe-strategy none"
            )
        for dispatcher in (self._built, *self._made.values()):
            if isinstance(dispatcher, ParmDispatcher):  # Its methods are those of the selected schedule.
                continue
            refuse_own_methods(dispatcher, vars(dispatcher), "token dispatcher")

    def _selector_of(self) -> ScheduleSelector | None:
        """The selector of the layer's schedule; layers of the same groups share one."""
        session, config = self._session, self._layer.config
        travel = session.strategy.travel
        is_stock = travel.schedule == "megatron" or keeps_flex(self._settings, session.strategy)
        if is_stock and not self.divides_tokens:
            return None
        devices = self._pg_collection.ep
        if devices not in session.selectors:
            session.selectors[devices] = ScheduleSelector(travel.schedule, config, self._pg_collection)
        return session.selectors[devices]

    def of(self, slot_pass: SlotPass) -> Any:
        """The dispatcher of a pass."""
        is_spread, kind = self._groups.num_devices > 1, self._stock
        if is_spread and slot_pass.plan.in_steps:
            kind = SmartScheduleTokenDispatcher
        elif is_spread and slot_pass.plan.deduplicated:
            kind = DeduplicatedTokenDispatcher
        elif self._selector is not None:
            kind = ParmDispatcher
        elif slot_pass.splits is not None and self._takes_splits:
            kind = KnownSplitsDispatcher
        key = kind, slot_pass.slots.slots_per_device
        made = self._made[key] = self._made.get(key) or self._make(*key)
        if kind is KnownSplitsDispatcher:
            made.splits = slot_pass.splits
        elif kind is ParmDispatcher:
            number = self._layer.slot_layer.local.context.layer
            made.owners_only = not self._session.strategy.may_replicate(number)
        return made

    def route(self, hidden_states: torch.Tensor, padding_mask: torch.Tensor | None) -> Any:
        """Run the gate where tensor-parallel ranks have the same tokens, on those that this rank dispatches.

        The input is ``[sequence, batch, M]``, the mask of padding tokens ``[sequence, batch]``.
        """
        slot_layer = self._layer.slot_layer
        slot_layer.passes.plan_iteration()
        self._whole_tokens = hidden_states
        self._begun = dispatcher = self._layer.token_dispatcher
        self._own_tokens, *routed = self._gate.route(dispatcher, hidden_states, padding_mask)
        load, decision = slot_layer.local.load, dispatcher.decision
        load.schedule, load.schedule_predicted_s = decision.schedule, dict(decision.predicted_s)
        sees_all = decision.schedule in ("s2", "baseline")
        slot_layer.counts.num_counting = self._pg_collection.tp.size() if sees_all else 1
        return tuple(routed)

    def own_tokens(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The tokens that this rank dispatches, of the layer's input ``[sequence, batch, M]``."""
        if self._own_tokens is None:
            return hidden_states
        own, self._own_tokens = self._own_tokens, None
        if self._layer.token_dispatcher is not self._begun:  # A plan of this micro-batch has other slots.
            self._layer.token_dispatcher.begin(self._whole_tokens)
        self._whole_tokens = None
        return own

    def _make(self, kind: Any, num_slots: int) -> Any:
        layer, groups, built = self._layer, self._groups, self._session.numbers_of_slots
        check_slots(self._settings, num_slots, groups.num_devices, built)
        built.add(num_slots)
        config = copy.copy(layer.config)
        # The router has padded the map of experts already. What is set by ``setattr`` in the config of
        # Megatron-Bridge's student changes its teacher's, too.
        vars(config).update(
            num_moe_experts=num_slots * groups.num_devices, moe_pad_expert_input_to_capacity=False
        )
        options: dict[str, Any] = {}
        if kind is ParmDispatcher:
            options = {"selector": self._selector}
        elif kind is SmartScheduleTokenDispatcher:
            options = {"ring": self._session.strategy.ring(groups.device, groups.topology)}
        elif kind is DeduplicatedTokenDispatcher:
            # Padding to the capacity adds tokens to experts that these tokens did not select.
            is_padded = layer.config.moe_pad_expert_input_to_capacity
            most = layer.config.num_moe_experts if is_padded else layer.config.moe_router_topk
            options = {"topology": groups.topology, "most_choices": most}
        local = list(range(groups.device * num_slots, (groups.device + 1) * num_slots))
        made = kind(num_slots, local, config, self._pg_collection, **options)
        if layer.shared_expert_overlap:
            made.set_shared_experts(layer.shared_experts)
        return made


def refuse_own_methods(owner: Any, names: Iterable[str], part: str) -> None:
    """Refuse, by a ConfigurationError, methods of these names that belong to an object alone."""
    own = (name for name in names if callable(vars(owner).get(name)) and hasattr(type(owner), name))
    if (name := next(own, None)) is not None:
        raise ConfigurationError(
            f"MoE layer: got a method {name} of its {part} alone, wanted that of the class, because passes "
            "with experts in slots do not call it; replace it on the class, or use --moe-strategy none"
        )


def gate_of(layer: Any) -> Any:
    """Megatron's router of a layer, which LoRA adapters of Megatron-Bridge and mcore-bridge wrap."""
    return next((module for module in layer.router.modules() if isinstance(module, Router)), layer.router)
