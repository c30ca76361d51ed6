"""Executes a strategy's plans for one MoE layer.

Shape letters: T tokens, D devices, E experts, G experts present on a device, R rows that a
rank receives, M model dimension, X expert-tensor-parallel peers.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch

from megatron_fssdp.collectives.sparse.sparse_transfer import StartedTransfer
from megatron_fssdp.collectives.stream_lane import advance_transfers
from megatron_fssdp.planning.dispatch.token_dispatch import TokenDispatch
from megatron_fssdp.planning.loads.load_history import LoadHistory
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.runtime.clocks.iteration_clock import IterationClock
from megatron_fssdp.runtime.clocks.layer_stopwatch import LayerStopwatch
from megatron_fssdp.runtime.clocks.pass_timer import LayerTimer, PassTimer
from megatron_fssdp.runtime.exchange.arrival_order import ArrivalOrder
from megatron_fssdp.runtime.exchange.expert_groups import ExpertGroups
from megatron_fssdp.runtime.exchange.row_exchanges.megatron_exchange import MegatronExchange
from megatron_fssdp.runtime.exchange.smart_schedule import ExpertCompute, SmartSchedule
from megatron_fssdp.runtime.exchange.token_exchange import DispatchRecord
from megatron_fssdp.runtime.execution import kept_exchanges
from megatron_fssdp.runtime.execution.known_exchange import ExchangedCounts, KnownExchange
from megatron_fssdp.runtime.execution.layer_iteration import LayerIteration
from megatron_fssdp.runtime.execution.layer_load import LayerLoad
from megatron_fssdp.runtime.execution.layer_planner import LayerPlanner
from megatron_fssdp.runtime.experts.expert_layout import ExpertLayout, ExpertWeights, ParametersByExpert
from megatron_fssdp.runtime.replicas.local_experts import LocalExperts
from megatron_fssdp.runtime.replicas.materialization import (
    GradientsOfExperts,
    Materialization,
    call_in_backward,
    in_backward,
)
from megatron_fssdp.runtime.replicas.replica_weights import ReplicaWeights
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.strategy import Strategy


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """One forward pass through the layer.

    Attributes:
        exchange: Where the rows go and come from.
        arrivals: Orders of the rows that this rank receives.
        materialization: Weights of the present experts, and the autograd nodes around the layer.
        plan: Plan that this pass follows. It also says whether the pass runs in steps.
    """

    exchange: DispatchRecord
    arrivals: ArrivalOrder
    materialization: Materialization
    plan: LayerPlan


@dataclass(eq=False)
class LayerExecutor:
    """One MoE layer on this rank: runs its iterations and micro-batches by the strategy's plans.

    Attributes:
        context: The data of the layer that the strategy may use.
        groups: Process groups of the layer, and the nodes of its ranks.
        experts: Experts of the layer that have Parameters on this rank.
        strategy: Strategy that plans the layer.
        clock: Clock of iterations that all layers of the model share.
        measure: Whether this rank computes the device loads, bytes and times that reports show; this costs a
            little host time in each micro-batch.
        measures_spread: Whether the ranks count how many nodes and devices the experts of a token are on;
            equal on all ranks.
        check_plans: Whether to compare the plans of all ranks before they are used.
        following: Executor of the next MoE layer, if it is on this rank.
        is_first: Whether no MoE layer on this rank runs before this one.
        most_choices: Largest number of experts that a token selects; ``None`` if it is not known. It limits
            the memory of row indices.
        fuses_gradients: Whether the experts' backward pass adds the gradients of weights to the attribute
            ``main_grad`` of the weights' tensors, see :class:`Materialization`.
        timer: Timer of the parts of this layer's passes.
        planner: Makes the layer's plans, and keeps the loads of the last iterations.
        load: Loads, bytes and times of the running iteration.
        stopwatch: Stopwatch of the layer; ``None`` while the layer is not measured.
    """

    context: LayerContext
    groups: ExpertGroups
    experts: LocalExperts
    strategy: Strategy
    clock: IterationClock = field(default_factory=IterationClock)
    measure: bool = False
    measures_spread: bool = False
    check_plans: bool = False
    following: "LayerExecutor | None" = None
    is_first: bool = True
    most_choices: int | None = None
    fuses_gradients: bool = False
    timer: LayerTimer = field(default_factory=lambda: LayerTimer(PassTimer()))
    planner: LayerPlanner = field(init=False)
    load: LayerLoad = field(init=False)
    stopwatch: LayerStopwatch | None = field(init=False, default=None)
    _iteration: LayerIteration | None = field(init=False, default=None)
    _ahead: ReplicaWeights | None = field(init=False, default=None)
    _is_launched: bool = field(init=False, default=False)
    _num_passes: int = field(init=False, default=0)
    _plain_owner_E: np.ndarray = field(init=False)
    _journal: list[StartedTransfer] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        shape = (self.context.num_devices, self.context.num_experts)
        history = LoadHistory(self.strategy.window, *shape)
        self.planner = LayerPlanner(self.strategy, self.groups, self.clock, history, self.check_plans)
        self.load = LayerLoad.empty(self.context.layer, self.context.topology.num_nodes, *shape)
        self._plain_owner_E = self.context.owner_E
        self.strategy.check(self.context)
        self.experts.check_owned(self.context.owner_E, self.groups.device)

    def own(
        self,
        owner_E: np.ndarray,
        parameters: ParametersByExpert,
        layout: ExpertLayout,
    ) -> None:
        """Set new owners; only between iterations.

        Args:
            owner_E: New owner of each expert, int64 ``[E]``.
            parameters: Parameters of each expert that this rank owns, ascending by expert.
            layout: Shapes of one expert's tensors, needed on a rank that owns no expert.

        Raises:
            ValueError: The parameters are not those of the experts that this rank owns.
        """
        experts = replace(self.experts, parameters=parameters, told_layout=layout)
        experts.check_owned(owner_E, self.groups.device)
        self.context = replace(self.context, owner_E=owner_E)
        self.experts = experts
        self._forget_iteration()

    def keep(self, placement: ExpertPlacement, residents: ParametersByExpert) -> None:
        """Set new resident replicas; only between iterations.

        Args:
            placement: Devices on which each expert has Parameters; its owners are the present owners.
            residents: Parameters of this rank's resident replicas, with the owners' contents.

        Raises:
            ValueError: The parameters are not those of this rank's replicas.
        """
        experts = replace(self.experts, residents=residents)
        experts.check_present(placement, self.groups.device)
        self.context = replace(self.context, resident=placement)
        self.experts = experts
        self._forget_iteration()

    def renumber(self, layer: int) -> None:
        """Set the layer number, which the model assigns after it has built its layers."""
        self.context = replace(self.context, layer=layer)
        self.experts = replace(self.experts, what=f"layer {layer}")
        self.load.layer = layer

    def plan_iteration(self) -> LayerPlan:
        """Make the plan of the running iteration from the loads of earlier iterations, if it does not exist.

        A forward pass of the layer calls it at its beginning: in :meth:`launch`, before the gate or, without
        a gate, in ``run_layer``. The layer before this one calls it earlier, in :meth:`plan_following`. All
        other methods need the plan and raise an error without it. On CUDA, :meth:`plan_ahead` has usually
        made the plan already, in the backward pass of the iteration before.

        The plan does not change until the iteration ends, except for one correction with the first
        micro-batch. Every micro-batch and a recomputed forward pass therefore use the same placement.
        """
        if self._iteration is None:
            num_micro_batches = self.clock.num_micro_batches
            self._iteration = LayerIteration(
                self.planner.next_plan(self.context),
                self.experts,
                self.groups,
                num_micro_batches,
                # A split transfer needs a layer before this one that never runs in steps, a separate process
                # group, and a loop that calls finish_gradients. These conditions are equal on all ranks.
                may_split=not self.is_first
                and self.groups.transfers is not None
                and self.groups.ring is None
                and not self.check_plans
                and num_micro_batches is not None,
                # On CUDA, the host must wait for a transfer's times, so they are read only for reports.
                journal=self._journal if self.measure else None,
                waiting=self.timer.waiting,
            )
        return self._iteration.plan

    def plan_following(self) -> None:
        """Plan the iteration of the following layer, at a time when the host would only wait for rows."""
        if self._next is not None:
            self._next.plan_iteration()

    def plan_ahead(self) -> None:
        """Plan the next iteration of this layer if all backward passes of the running iteration are over."""
        is_over = self._num_passes == self.clock.num_micro_batches
        if is_over and self.load.counts_DE.any():
            self.planner.plan_ahead(self.context, self.load.counts_DE)

    @property
    def history(self) -> LoadHistory:
        """Loads of the last iterations."""
        return self.planner.history

    @property
    def _running(self) -> LayerIteration:
        """The running iteration.

        Raises:
            RuntimeError: :meth:`plan_iteration` has not been called in this iteration.
        """
        if self._iteration is None:
            raise RuntimeError(
                f"{self.experts.what}: got a step of an iteration without a plan, wanted a plan first; "
                "call LayerExecutor.plan_iteration() where the layer's forward pass begins"
            )
        return self._iteration

    @property
    def _next(self) -> "LayerExecutor | None":
        """The following layer, if this layer may plan it in advance."""
        # See LayerPlanner.plan_ahead: plans that ranks compare cannot be made in advance.
        return None if self.following is None or self.following.check_plans else self.following

    def launch(self, hidden: torch.Tensor, *, first: bool = False) -> torch.Tensor:
        """Start SparseAllGather before the compute that comes before the layer, for example attention.

        Args:
            hidden: Input of that compute, any shape. It passes through an autograd node, so that the backward
                pass ends SparseReduceScatter after the same compute.
            first: Whether this is the first layer of a forward pass.

        Returns:
            ``hidden``.
        """
        self.timer.passes(hidden, "other", None)
        if self.context.num_devices == 1:
            return hidden
        plan = self.plan_iteration()
        if plan.gather_ahead and not plan.each_micro_batch and self.groups.transfers is not None:
            self._ahead = self._running.start_weights(hidden.device)
            self._is_launched = True
        if first:
            self.clock.latest = None
        if torch.is_grad_enabled() and hidden.requires_grad:
            hidden = call_in_backward(self._settle, hidden)
        if self.stopwatch is not None:
            # The span begins when the transfer is posted: what the host did until here hides nothing.
            self.stopwatch.layer_begins(hidden.device)
        return hidden

    def _settle(self) -> None:
        for layer in (self, self.following):
            if layer is not None and layer._iteration is not None:
                layer._iteration.advance_gradients()

    def advance_transfers(self, hidden: torch.Tensor | None = None) -> None:
        """Mark a point of the program, at which transfers issue their next messages (``stream_lane.py``).

        Only devices with one queue need such points. All ranks must have the same points in the same order.

        Args:
            hidden: Tensor whose gradient is complete at the corresponding point of the backward pass, any
                shape; ``None`` if the backward pass has no such point.
        """
        group = self.groups.transfers
        if group is None or not self.groups.one_queue:
            return
        advance_transfers(group)
        if hidden is not None and torch.is_grad_enabled() and hidden.requires_grad:
            hidden.register_hook(lambda gradient: advance_transfers(group))

    def recall(self) -> KnownExchange | None:
        """The exchange of the first forward pass, if this pass recomputes it under the same plan.

        All ranks recompute the same passes, so all of them get an exchange here or none does.
        """
        known = kept_exchanges.recall(self)
        plan = self._running.plan
        return known if known is not None and (plan.each_micro_batch or known.plan is plan) else None

    def begin_micro_batch(
        self,
        routing_map: torch.Tensor,
        exchange: MegatronExchange | None = None,
        known: KnownExchange | None = None,
    ) -> MicroBatch:
        """Exchange the counts, compute where this micro-batch's rows go, and start the exchange of the rows.

        Args:
            routing_map: Experts that each token of this rank selected, bool ``[T, E]``.
            exchange: Exchange of this forward pass; its ``gather`` has been called. Default: Megatron's order
                in the layer's groups.
            known: Result of :meth:`recall`. In a recomputed forward pass it replaces the exchange of counts.
        """
        if self.stopwatch is not None:
            self.stopwatch.tokens_ready()
        self.advance_transfers()
        exchange = exchange or MegatronExchange(self.groups)
        device = routing_map.device
        # On CUDA, the following layer is planned before the host waits for the counts. Later, the device
        # would wait for the host.
        iteration = self._running
        counts = known or ExchangedCounts.of(
            routing_map,
            exchange,
            iteration.plan,
            self.most_choices,
            self.plan_following,
            self._plain_owner_E if self.measures_spread else None,
        )
        counts_DE = counts.counts_DE
        if iteration.plan.each_micro_batch:
            iteration = self._of_micro_batch(counts_DE, iteration, known)
        # Transfers can run beside the dispatch only in a separate process group.
        has_own_group = self.groups.transfers is not None
        beside_dispatch = iteration.plan.each_micro_batch and has_own_group
        if beside_dispatch and not iteration.plan.in_steps:
            weights = iteration.weights_to_start()
        else:
            weights, self._ahead = self._ahead or iteration.start_weights(device), None
        is_launched, self._is_launched = self._is_launched, False
        if not iteration.is_final:
            iteration.is_final = True
            self._correct(iteration, counts_DE, weights, device)
        plan = iteration.plan
        if isinstance(counts, ExchangedCounts):
            counts = counts.start(exchange, plan, self.groups.topology)
        kept_exchanges.keep(self, counts)
        record, dispatch_of_peer = counts.exchange.record, counts.dispatch_of_peer
        self.load.num_replicas = plan.placement.num_replicas
        self.load.placements = (plan.placement,)

        def backward(gradients: GradientsOfExperts) -> None:
            iteration.take_gradients(gradients, device)
            self._count(counts_DE, dispatch_of_peer, counts.spread)

        materialization = Materialization(
            plan.placement,
            self.groups.device,
            weights,
            iteration.whole_transfer(device),
            rematerialize=plan.rematerialize,
            in_turn=not has_own_group or not (plan.gather_ahead or plan.each_micro_batch),
            beside_dispatch=beside_dispatch,
            on_backward=backward,
            after_backward=self.plan_ahead if device.type == "cuda" else None,
            gradient_sums=partial(iteration.open_sums, device) if self.fuses_gradients else None,
        )
        if plan.rematerialize and is_launched and torch.is_grad_enabled() and not in_backward():
            materialization.before = self.clock.latest
            self.clock.latest = materialization
        return MicroBatch(record, ArrivalOrder(counts.exchange.arrival_SG, device), materialization, plan)

    def while_rows_travel(self, micro_batch: MicroBatch) -> None:
        """Do what the host has to do before the experts compute, while the rows travel.

        Replicas for this micro-batch alone are gathered now, so that the rows go first.

        Args:
            micro_batch: The micro-batch whose rows travel.
        """
        if micro_batch.materialization.beside_dispatch:
            micro_batch.materialization.regather()
        _ = micro_batch.arrivals.by_expert  # This makes the index.
        self.plan_following()

    def smart_schedule(self, micro_batch: MicroBatch, compute: ExpertCompute) -> SmartSchedule | None:
        """Dispatch, experts and combine of a micro-batch in steps; ``None`` if its plan has no steps.

        Args:
            micro_batch: The result of :meth:`begin_micro_batch`; its replicas may still be in transfer.
            compute: Function that computes the experts on rows sorted by expert.
        """
        materialization, ring = micro_batch.materialization, self.groups.ring
        if not micro_batch.plan.in_steps or ring is None:
            return None
        travels_G = [expert not in materialization.weights.parameters for expert in materialization.present]
        # Most rows for replicas come from the device itself. While replicas are in transfer, the device
        # therefore computes the rows from other groups first.
        ring = replace(ring, own_last=bool(micro_batch.plan.transfer.edges) and not micro_batch.plan.resident)

        def timed(
            rows: torch.Tensor,
            probs: torch.Tensor,
            rows_per_expert: Sequence[int],
            experts: Sequence[ExpertWeights],
        ) -> torch.Tensor:
            with self.computing(rows):
                results = compute(rows, probs, rows_per_expert, experts)
            self.timer.passes(results, "dispatch", "experts")
            return results

        return SmartSchedule(
            micro_batch.exchange,
            ring,
            self.groups.expert_parallel,
            timed,
            self.plan_following,
            materialization.weights.wait,
            travels_G,
        )

    def computing(self, rows: torch.Tensor) -> AbstractContextManager[None]:
        """Context manager for the experts' forward pass; it measures the pass if the layer has a stopwatch.

        It also starts the first part of the following layer's SparseAllGather, which travels while the
        experts compute (Pro-Prophet §V-B).

        Args:
            rows: Rows that the experts compute, ``[R, M]``.
        """
        if self._next is not None and not in_backward():
            self._next._running.start_first_part(rows.device)
        self.timer.passes(rows, "experts", "dispatch")
        return nullcontext() if self.stopwatch is None else self.stopwatch.experts(rows.shape[0], rows.device)

    def computed(self, rows: torch.Tensor) -> torch.Tensor:
        """Thread the experts' results through the node at which their backward pass begins.

        The node starts the last part of the following layer's SparseReduceScatter, which travels while the
        experts run their backward pass (Pro-Prophet §V-B).

        Args:
            rows: Results of the present experts, ``[R, M]``.
        """
        self.timer.passes(rows, "combine", "experts")
        self.advance_transfers(rows)
        following = None if self._next is None else self._next._running
        if following is None or not following.splits:
            return rows
        return call_in_backward(following.gradients.send_rest, rows)

    def finish_gradients(self) -> None:
        """Bring all remaining gradients to the owners and wait; every rank of the group must call it."""
        if self._iteration is not None:
            self._iteration.finish_gradients()

    def end_iteration(self) -> LayerLoad:
        """Close the iteration: add its counts to the history, and drop its plan and its replicas.

        Returns:
            Loads, bytes and times of the iteration.

        Raises:
            RuntimeError: Some gradients have not reached the owners, so the optimizer would miss them.
        """
        load = self.drop_iteration()
        self.planner.add_counts(load.counts_DE)
        return load

    def drop_iteration(self) -> LayerLoad:
        """Close the iteration without adding its counts to the history.

        Returns:
            Loads, bytes and times of the iteration.

        Raises:
            RuntimeError: Some gradients have not reached the owners, so the optimizer would miss them.
        """
        if self._iteration is not None and not self._iteration.is_home:
            raise RuntimeError(
                f"{self.experts.what}: the iteration ended before all replicas' gradients reached their "
                "owners; call MoERuntime.finish_gradients() before reading gradients"
            )
        load = self.load
        for started in self._journal:
            load.add(started)
        self._journal.clear()
        load.forward, load.backward = self.timer.take()
        if self.stopwatch is not None:
            self.stopwatch.iteration_ends()
        self.load = LayerLoad.empty(self.context.layer, len(load.by_nodes_N), *load.counts_DE.shape)
        self._forget_iteration()
        return load

    def _forget_iteration(self) -> None:
        """Drop the plan and the replicas, after a wait for the transfers that use their memory."""
        if self._ahead is not None:
            self._ahead.settle()
        if self._iteration is not None:
            self._iteration.drop()
        self._iteration = None
        self._ahead = None
        self._is_launched = False
        self._num_passes = 0

    def _of_micro_batch(
        self, counts_DE: np.ndarray, iteration: LayerIteration, known: KnownExchange | None
    ) -> LayerIteration:
        """Plan one micro-batch; a recomputed forward pass has the same counts and gets the same plan."""
        if known is not None:
            return iteration.of_micro_batch(known.plan)
        return iteration.of_micro_batch(self.planner.after_gate(self.context, counts_DE, iteration.plan, 1))

    def _correct(
        self, iteration: LayerIteration, counts_DE: np.ndarray, weights: ReplicaWeights, device: torch.device
    ) -> None:
        """Let the strategy change the replicas, now that the exact counts are known (Hecate §4.2)."""
        num_micro_batches = iteration.num_micro_batches or 1
        plan = self.planner.after_gate(self.context, counts_DE, iteration.plan, num_micro_batches)
        if plan is not iteration.plan:
            iteration.correct(plan, weights, device)

    def _count(
        self, counts_DE: np.ndarray, dispatch_of_peer: Sequence[TokenDispatch], spread: np.ndarray | None
    ) -> None:
        self.load.counts_DE += counts_DE
        self._num_passes += 1
        if self.measure:
            self.load.measure(counts_DE, dispatch_of_peer, self._plain_owner_E, spread)
        if not self.clock.driven:
            self.end_iteration()
