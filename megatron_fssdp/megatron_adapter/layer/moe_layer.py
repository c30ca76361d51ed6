"""Megatron's MoE layer with experts in slots, and the hooks of the transformer layer around it.

Router, dispatcher, experts, shared experts, latent projections, recompute, CUDA graphs and checkpoint keys
are Megatron's. This class builds the dispatcher for slots instead of experts, remaps the routing, lets the
experts compute what is in the slots, and calls the runtime where weights and gradients of replicas travel.
"""

from collections.abc import Callable
from functools import partial
from itertools import chain, pairwise
from typing import Any, Self, cast

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.cuda_graphs import is_graph_capturing
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.strategy.strategy_settings import FasterMoEKeys
from megatron_fssdp.megatron_adapter.experts import gradient_sync
from megatron_fssdp.megatron_adapter.experts.expert_slots import ExpertSlots
from megatron_fssdp.megatron_adapter.experts.named_copies import keep_names
from megatron_fssdp.megatron_adapter.experts.slot_experts import SlotExperts
from megatron_fssdp.megatron_adapter.layer.slot_dispatchers import (
    SlotDispatchers,
    gate_of,
    refuse_own_methods,
)
from megatron_fssdp.megatron_adapter.layer.strategy_session import StrategySession
from megatron_fssdp.megatron_adapter.routing.topology_aware_gate import TopologyAwareTopK, install_gate
from megatron_fssdp.megatron_adapter.support.limits import slot_multiple
from megatron_fssdp.megatron_adapter.wrapping import wrap
from megatron_fssdp.planning.placement.placement import even_owners
from megatron_fssdp.runtime.experts.expert_layout import LocalExperts
from megatron_fssdp.runtime.layers.expert_groups import ExpertGroups
from megatron_fssdp.runtime.layers.pass_binder import SlotPass
from megatron_fssdp.runtime.slots.autograd_points import in_backward
from megatron_fssdp.strategies.layer_plan import LayerContext


class StrategyMoELayer(MoELayer):
    """An MoE layer whose experts are placed by a strategy.

    A layer that Megatron has built becomes one by :meth:`of`, wherever its class was imported from. Its
    public methods are Megatron's steps of a forward pass, in this order; ``combine`` stays Megatron's own.
    """

    @classmethod
    def of(
        cls, layer: MoELayer, session: StrategySession, number: int = 1, is_predicted: bool = False
    ) -> Self:
        """Let a built layer join a session, before DDP wraps its model. Collective over its groups.

        It has a ``number`` in the model, and ``is_predicted`` in a layer of multi-token prediction.
        """
        kind = type(layer)
        layer.__class__ = cls if kind is MoELayer else type(cls.__name__, (cls, kind), {})
        joined = cast(Self, layer)
        joined._join(session, number, is_predicted)
        return joined

    def _join(self, session: StrategySession, number: int, is_predicted: bool) -> None:
        config, pg_collection = self.config, groups_of(self)
        settings = session.check_model(config)
        refuse_own_methods(self, ("route", "preprocess", "dispatch", "postprocess"), "object")
        self._slot_experts = SlotExperts(self.experts, self.num_local_experts, self.ep_group)
        local = self._slot_experts.parameters
        groups = session.expert_groups(self.ep_group, pg_collection.expt_tp, pg_collection.tp_ep)
        owner_E = even_owners(config.num_moe_experts, groups.num_devices)
        context = LayerContext(
            number,
            owner_E,
            groups.topology,
            shares_evenly=settings.captures_preprocess,
            delays_gradients=settings.delays,
        )
        self.slot_layer = session.runtime.add_layer(
            context,
            groups,
            LocalExperts(
                f"layer {context.layer}",
                dict(zip(self.local_expert_indices, local, strict=True)),
                num_trained=self._slot_experts.places.num_trained,
                await_parameters=self._await_parameters,
                await_gradients=gradient_sync.await_gradients,
            ),
            on_pass=self._bind,
            on_home=gradient_sync.start_waiting,
            least_slots=session.least_slots(settings),
            slot_multiple=slot_multiple(settings, groups.num_devices),
        )
        gradient_sync.take_over(chain.from_iterable(local), self.slot_layer, session.runtime.finish_gradients)
        keys = session.settings
        if isinstance(keys, FasterMoEKeys) and keys.leaving_share is not None:
            gate = TopologyAwareTopK(owner_E, groups.device, groups.topology, keys.leaving_share)
            install_gate(gate_of(self), gate)
        self._session = session
        self._checked_in: int | None = None  # The iteration in which the experts' module was last looked at.
        moves = groups.transfers is not None or session.strategy.moves_owners
        self._is_unseen = moves and groups.num_devices > 1  # in an iteration
        self._has_computed = False  # since the experts' module was last called
        # Megatron calls the module; its hooks run as ever, and the slots' experts compute.
        self.experts.forward = self._compute
        self.experts.register_forward_hook(self._check_computed)
        self.experts.backward_dw = self._backward_dw
        self._dispatchers = SlotDispatchers(self, session, settings, groups, pg_collection)
        # Layers of multi-token prediction keep their owners, because their checkpoint keys have another form.
        self._index: int | None = None
        if not is_predicted:
            self._index = session.slots.add_layer(self.slot_layer, self._slot_experts)
            keep_names(self.experts, session.slots)
        session.runtime.timer.is_usable = not config.overlap_moe_expert_parallel_comm

    @property
    def slots(self) -> ExpertSlots:
        """The slots of the pipeline stage, whose owner map says which expert is where."""
        return self._session.slots

    def _await_parameters(self) -> None:
        if self._index is None:
            gradient_sync.await_parameters(self.experts)
        else:
            self._session.slots.await_parameters(self._index)

    def _bind(self, slot_pass: SlotPass) -> None:
        iteration = self._session.runtime.clock.iteration
        if iteration is None or iteration != self._checked_in:
            self._slot_experts.places.check_unchanged(self.experts)
            self._dispatchers.check_unchanged()
            if self._is_unseen and iteration is not None:  # Its weights are loaded by now.
                self._is_unseen = False
                self._slot_experts.places.check_shared(self.ep_group)
            if torch.is_grad_enabled():
                self._checked_in = iteration
        keeps_weights = slot_pass.is_shared and not slot_pass.plan.rematerialize
        self._slot_experts.bind(slot_pass.parameters_U, for_iteration=keeps_weights)
        self.token_dispatcher = self._dispatchers.of(slot_pass)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run Megatron's forward pass. An error gets a note with the number of the layer."""
        try:
            return super().forward(*args, **kwargs)
        except Exception as error:
            error.add_note(f"in the forward pass of MoE layer {self.slot_layer.local.context.layer}")
            raise

    def route(self, hidden_states: torch.Tensor, padding_mask: torch.Tensor | None = None) -> Any:
        """Run the gate, on this rank's part of the tokens where tensor-parallel ranks have the same ones."""
        if not self._dispatchers.divides_tokens or is_graph_capturing():
            return super().route(hidden_states, padding_mask)
        return self._dispatchers.route(hidden_states, padding_mask)

    def preprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Provide the slots of this pass; Megatron's method then permutes the tokens for the dispatch."""
        layer = self.slot_layer
        if is_graph_capturing():
            layer.prepare_capture(training=self.training)
        else:
            layer.mark(hidden_states, "dispatch", "other")
            layer.prepare(routing_map)
        if self._dispatchers.divides_tokens:
            hidden_states = self._dispatchers.own_tokens(hidden_states)
        # If the map is None, a CUDA graph has done this and what Megatron's method does.
        routing_map, probs = layer.remap(routing_map, probs)
        return super().preprocess(hidden_states, probs, routing_map)

    def dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> Any:
        """Send the tokens; the next layer is prepared while they travel."""
        sent = super().dispatch(self.slot_layer.enter_dispatch(hidden_states), probs)
        self.slot_layer.rows_travel()
        return sent

    def _compute(
        self, rows: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor, **buffers: Any
    ) -> tuple[torch.Tensor, None]:
        layer, self._has_computed = self.slot_layer, True
        in_steps = getattr(self.token_dispatcher, "compute_in_steps", None)
        late = layer.await_weights(rows)
        if in_steps is None:
            output, _ = self._slot_experts.compute(rows, tokens_per_expert, probs, **buffers)
        else:
            output = in_steps(rows, probs, self._slot_experts.compute, *late)
        return layer.leave_experts(output), None

    def _check_computed(self, *_: Any) -> None:
        if not self._has_computed:  # Owned experts alone have computed the rows of all slots.
            raise ConfigurationError(
                "experts: got another forward pass of the expert module, wanted one that calls the one "
                "before; put hooks, which see rows by slot, on the module, or use --moe-strategy none"
            )
        self._has_computed = False

    def _backward_dw(self) -> None:
        self._slot_experts.backward_dw()
        self.slot_layer.gradients.weight_gradients_computed()

    def postprocess(self, output: torch.Tensor, shared_expert_output: torch.Tensor | None) -> torch.Tensor:
        """End the pass; the next layer's SparseAllGather starts."""
        return self.slot_layer.finish(super().postprocess(output, shared_expert_output))


def groups_of(layer: Any) -> ProcessGroupCollection:
    """The process groups with which Megatron has built a layer."""
    router, dispatcher, groups = gate_of(layer), layer.token_dispatcher, ProcessGroupCollection()
    groups.ep, groups.tp = layer.ep_group, layer.tp_group
    groups.expt_tp, groups.tp_ep = dispatcher.tp_group, dispatcher.tp_ep_group
    groups.cp, groups.tp_cp, groups.tp_dp_cp = router.cp_group, router.tp_cp_group, router.tp_dp_cp_group
    return groups


def install_beginnings(chunk: torch.nn.Module) -> None:
    """Call each transformer layer that contains one of our MoE layers with a beginning of our own.

    The first layer of the model chunk starts its gather there, and all mark points of clocks. Modules with
    hooks cannot be captured by CUDA graphs, so methods are wrapped. If the device has one queue for the
    kernels of all streams, each part of attention gets a hook, at which transfers issue their next messages.
    """
    layers = (module for module in chunk.modules() if isinstance(module, TransformerLayer))
    # Gemma 4's layers in mcore-bridge have experts beside ``mlp``.
    parts = ((layer, part) for layer in layers for part in layer.children())
    ours = ((layer, part) for layer, part in parts if isinstance(part, StrategyMoELayer))
    for number, (layer, moe) in enumerate(ours):
        _install_beginning(layer, moe, None if number else _with_attention(chunk, layer))


def _install_beginning(layer: TransformerLayer, moe: StrategyMoELayer, start: Any) -> None:
    slots = moe.slot_layer
    slots.local.is_first = start is not None
    if start is not None:
        _call_at_begin(start, slots.launch)
    _call_at_begin(layer, lambda hidden: slots.mark(hidden, "other", None), in_recompute=True)
    if slots.groups.one_queue:
        for part in layer.self_attention.children():
            part.register_forward_hook(partial(_advance, slots.groups))


def _with_attention(chunk: torch.nn.Module, layer: TransformerLayer) -> Any:
    """The layer, or the one before in a hybrid model, whose layers are attention, Mamba or experts alone."""
    if isinstance(layer.self_attention, IdentityOp):
        for stack in (module for module in chunk.modules() if isinstance(module, torch.nn.ModuleList)):
            for before, after in pairwise(stack):
                if after is layer:
                    return before
    return layer


def _call_at_begin(layer: Any, act: Callable[[torch.Tensor], None], in_recompute: bool = False) -> None:
    def begun(method: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_graph_capturing() and (in_recompute or not in_backward()):
            act(args[0] if args else kwargs["hidden_states"])
        return method(*args, **kwargs)

    # The combined schedule calls the parts of the layer, of which attention is the first. A replay of a CUDA
    # graph takes the place of the forward pass.
    is_combined = layer.config.overlap_moe_expert_parallel_comm
    for name in ("_forward_attention",) if is_combined else ("forward", "_te_cuda_graph_replay"):
        wrap(layer, name, begun)


def _advance(groups: ExpertGroups, part: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
    outputs = output if isinstance(output, tuple) else (output,)
    groups.advance_transfers(next((output for output in outputs if isinstance(output, torch.Tensor)), None))
