"""Megatron's MoE layer with a strategy's dispatcher and experts.

Router, shared experts, latent projections, recompute and checkpoint keys are inherited from Megatron's layer.
Only the parts that depend on the placement of experts are replaced.
"""

from itertools import chain
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.cuda_graphs import is_graph_capturing
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

from megatron_fssdp.collectives.failure_place import naming_failures
from megatron_fssdp.megatron_adapter.checkpoints.expert_checkpoint import follow_owners
from megatron_fssdp.megatron_adapter.experts import gradient_sync
from megatron_fssdp.megatron_adapter.experts.bound_experts import BoundExperts
from megatron_fssdp.megatron_adapter.experts.expert_parameters import expert_parameters
from megatron_fssdp.megatron_adapter.layer.hybrid_layers import numbers_before
from megatron_fssdp.megatron_adapter.layer.placement_dispatcher import PlacementTokenDispatcher
from megatron_fssdp.megatron_adapter.layer.recomputed_layers import keep_exchanges_of_checkpoints
from megatron_fssdp.megatron_adapter.layer.segmented_dispatcher import SegmentedTokenDispatcher
from megatron_fssdp.megatron_adapter.layer.strategy_session import StrategySession
from megatron_fssdp.megatron_adapter.routing.divided_tokens import DividedTokens, OneRank
from megatron_fssdp.megatron_adapter.routing.topology_aware_router import install_gate
from megatron_fssdp.megatron_adapter.support.replaced_settings import DISPATCH_REPLACEMENTS, replace_settings
from megatron_fssdp.planning.placement.placement import even_owners
from megatron_fssdp.runtime.exchange.exchange_selection import exchange_of
from megatron_fssdp.strategies.layer_plan import LayerContext


class StrategyMoELayer(MoELayer):
    """An MoE layer whose experts are placed by a strategy.

    It is built from a layer spec like Megatron's own layer, with one more argument, ``session``. One forward
    pass takes these steps::

        launch      plan the iteration, start SparseAllGather       (overlaps attention)
        route       run the gate
        preprocess  all-gather counts, permute tokens
        dispatch    send tokens to owners and replicas
        experts     wait for replicas, run owned experts and replicas
        combine     send results back, sum them for each token

    Args:
        config: Megatron's ``TransformerConfig``.
        submodules: Builders of experts, shared experts and router.
        layer_number: Megatron's number of the layer, counted from 1; Megatron may set it later.
        pg_collection: Process groups; Megatron's global ones by default.
        is_mtp_layer: Whether the layer belongs to multi-token prediction.
        name: Name of the module instance.
        session: Session with the strategy and the runtime that all layers of the model share.

    Raises:
        ConfigurationError: The config has a feature that the strategy does not support.
    """

    def __init__(
        self,
        config: Any,
        submodules: MoESubmodules | None = None,
        layer_number: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        is_mtp_layer: bool = False,
        name: str | None = None,
        *,
        session: StrategySession,
    ) -> None:
        session.check_model(config)
        # Models without a command line come here with the settings of their config.
        replace_settings(f"strategy {session.strategy_name}", DISPATCH_REPLACEMENTS, config)
        keep_exchanges_of_checkpoints()
        if pg_collection is None:
            pg_collection = get_default_pg_collection()
        # Layers of multi-token prediction that come before this one; None for a layer of the decoder.
        self._later_layers_before = numbers_before() if not is_mtp_layer else numbers_before() or 0
        super().__init__(config, submodules, layer_number, pg_collection, is_mtp_layer, name)
        local = expert_parameters(self.experts, self.num_local_experts)
        gradient_sync.take_over(chain.from_iterable(local), session.runtime.finish_gradients)
        has_equal_tokens = pg_collection.tp.size() > 1 and not config.sequence_parallel
        dimensions = (self.ep_group, pg_collection.expt_tp, getattr(pg_collection, "expt_dp", None))
        session.agree_on_kernels([group for group in dimensions if group is not None])
        groups = session.expert_groups(
            self.ep_group,
            pg_collection.expt_tp,
            parts=getattr(pg_collection, "tp_ep", None),
            tensor_parallel=pg_collection.tp if has_equal_tokens else None,
        )
        owner_E = even_owners(config.num_moe_experts, groups.num_devices)
        # The smart schedule, which a later iteration may use, computes with separate tensors in every step.
        bound = BoundExperts(self.experts, may_fuse=groups.ring is None)
        self._compute = bound.compute
        self.executor = session.runtime.add_layer(
            LayerContext(self._global_number(), owner_E, groups.topology),
            groups,
            dict(zip(self.local_expert_indices, local, strict=True)),
            await_parameters=self._await_parameters,
            # Padding to the capacity adds tokens to experts that these tokens did not select.
            most_choices=None if config.moe_pad_expert_input_to_capacity else config.moe_router_topk,
            fuses_gradients=bound.fuses_gradients,
        )
        if (leaving_share := session.settings.leaving_share) is not None:
            install_gate(
                self.router,
                lambda: self.executor.context.owner_E,
                self.ep_group.rank(),
                groups.topology,
                leaving_share,
                session.settings.leaving_choices,
            )
        self._schedule = session.schedule_selector(
            config, groups, pg_collection.tp.size(), pg_collection.tp_dp_cp
        )
        self._divided: DividedTokens | None = None
        self._own_tokens: torch.Tensor | None = None
        if has_equal_tokens:
            self._divided = DividedTokens(self.router, pg_collection)
            self.attn_tp_group = OneRank()
        self._session, self._slots = session, session.slots
        # Layers of multi-token prediction keep their owners, because their checkpoint keys have another form.
        self._index: int | None = None
        if self._later_layers_before is None:
            self._index = session.slots.add_layer(self.executor, self.experts, local)
            follow_owners(self.experts, self._index, session.stage_owners)
        in_segments = config.overlap_moe_expert_parallel_comm
        session.runtime.timer.is_usable = not in_segments
        dispatcher = SegmentedTokenDispatcher if in_segments else PlacementTokenDispatcher
        self.token_dispatcher = dispatcher(self.executor, config, pg_collection)
        if self.shared_expert_overlap:
            self.token_dispatcher.set_shared_experts(self.shared_experts)

    def set_layer_number(self, layer_number: int) -> None:
        """Set the layer's number. Megatron calls this after it has built the layer."""
        super().set_layer_number(layer_number)
        self.executor.renumber(self._global_number())

    def _global_number(self) -> int:
        # Megatron numbers layers of multi-token prediction from 1 again. Here they come after the decoder's.
        number, before = self.layer_number or 0, self._later_layers_before
        return number if before is None else self.config.num_layers + before + number

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run Megatron's forward pass. An error gets a note with the number of the layer."""
        with naming_failures(f"the forward pass of MoE layer {self.executor.context.layer}"):
            return super().forward(*args, **kwargs)

    def launch(self, hidden_states: torch.Tensor, *, first: bool) -> torch.Tensor:
        """Start to gather this layer's replicas, at the beginning of its transformer layer.

        Args:
            hidden_states: Input of the transformer layer, ``[sequence, batch, M]``.
            first: Whether this is the first MoE layer of the model chunk.

        Returns:
            The hidden states, with an autograd node whose backward pass waits for SparseReduceScatter.
        """
        return self.executor.launch(hidden_states, first=first)

    def _await_parameters(self) -> None:
        """Finish the all-gathers of this layer's expert Parameters that DDP overlaps."""
        if self._index is None:
            gradient_sync.await_parameters(self.experts)
        else:
            self._slots.await_parameters(self._index)

    def route(self, hidden_states: torch.Tensor, padding_mask: torch.Tensor | None = None) -> Any:
        """Plan the iteration from past loads if :meth:`launch` has not done so, and run the gate.

        Args:
            hidden_states: Input of the MoE layer, ``[sequence, batch, M]``.
            padding_mask: Mask of padding tokens, bool ``[sequence, batch]``.
        """
        if is_graph_capturing():
            # A CUDA graph of the router holds the gate alone. Megatron's method ends the capture after it.
            return super().route(hidden_states, padding_mask)
        plan = self.executor.plan_iteration()
        self.executor.advance_transfers(hidden_states)
        layer = self.executor.context.layer
        self.executor.load.strategy = self._session.strategy.selected(layer)
        owners_only = not self._session.strategy.may_replicate(layer)
        decision, divided = self._schedule.of(hidden_states, owners_only=owners_only), self._divided
        if divided is not None or self.executor.groups.num_parts > 1:
            load = self.executor.load
            load.schedule = decision.schedule
            load.schedule_predicted_s = {str(name): s for name, s in decision.predicted_s.items()}
        exchange = exchange_of(
            decision.schedule,
            self.executor.groups,
            simultaneous=decision.simultaneous,
            deduplicated=plan.deduplicated,
            most_choices=self.executor.most_choices,
        )
        if divided is None:
            self.token_dispatcher.use(exchange)
            return super().route(hidden_states, padding_mask)
        self.token_dispatcher.use(
            exchange, divided.group if divided.divides_first(decision.schedule) else None
        )
        self._own_tokens, *routed = divided.route(hidden_states, padding_mask, decision.schedule)
        return tuple(routed)

    def preprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Exchange counts, and permute the tokens for dispatch."""
        self.token_dispatcher.share(hidden_states)
        if self._own_tokens is not None:
            hidden_states, self._own_tokens = self._own_tokens, None
        return super().preprocess(hidden_states, probs, routing_map)

    def routed_experts_compute(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Run the experts on this device, owned ones and replicas, on the rows that were dispatched to it."""
        dispatcher = self.token_dispatcher
        if dispatcher.has_smart_schedule:
            return dispatcher.run_smart_schedule(hidden_states, probs, self._compute), None
        rows, rows_per_expert, row_probs = dispatcher.dispatch_postprocess(hidden_states, probs)
        with self.executor.computing(rows):
            output = self._compute(rows, row_probs, rows_per_expert.tolist(), dispatcher.take_experts())
        return dispatcher.combine_preprocess(self.executor.computed(output)), None
