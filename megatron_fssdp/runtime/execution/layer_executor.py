"""Executes a strategy's plans for one MoE layer.

Shape letters: T tokens, D devices, E experts, G experts present on a device, X expert-tensor-parallel
peers.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from megatron_fssdp.collectives.plan_agreement import check_agreement
from megatron_fssdp.collectives.rows.uneven_all_to_all import gather_counts
from megatron_fssdp.collectives.sparse.sparse_transfer import StartedTransfer
from megatron_fssdp.planning.dispatch.token_dispatch import TokenDispatch
from megatron_fssdp.planning.loads.load_history import LoadHistory
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.transfer.message_size import CUDA_MESSAGE_BYTES
from megatron_fssdp.runtime.exchange.expert_groups import ExpertGroups
from megatron_fssdp.runtime.exchange.smart_schedule import ExpertCompute, SmartSchedule
from megatron_fssdp.runtime.exchange.token_exchange import DispatchRecord, plan_exchange
from megatron_fssdp.runtime.execution.iteration_clock import IterationClock
from megatron_fssdp.runtime.execution.layer_iteration import LayerIteration
from megatron_fssdp.runtime.execution.layer_load import LayerLoad
from megatron_fssdp.runtime.execution.layer_stopwatch import LayerStopwatch
from megatron_fssdp.runtime.experts.expert_layout import ExpertLayout, ExpertWeights, ParametersByExpert
from megatron_fssdp.runtime.replicas.local_experts import LocalExperts
from megatron_fssdp.runtime.replicas.materialization import (
    GradientsOfExperts,
    Materialization,
    call_in_backward,
    in_backward,
)
from megatron_fssdp.runtime.replicas.replica_weights import ReplicaWeights
from megatron_fssdp.strategies.strategy import LayerContext, LayerPlan, Strategy

CHUNK_BYTES = CUDA_MESSAGE_BYTES
"""Most bytes of a transfer's message, which memory is accounted with."""


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """One forward pass through the layer: its exchange and its weights, and the plan that they follow."""

    exchange: DispatchRecord
    materialization: Materialization
    plan: LayerPlan


@dataclass(eq=False)
class LayerExecutor:
    """One MoE layer on this rank: asks the strategy, keeps the loads, starts micro-batches.

    Attributes:
        context: What the strategy may know of the layer.
        groups: Process group and topology.
        experts: The experts of the layer that have Parameters on this rank.
        strategy: Decides.
        clock: Who ends iterations.
        measure: Whether to work out the device loads, bytes and times that reports show; they
            cost a little host time per micro-batch.
        check_plans: Compare the plans of all ranks before using them.
        following: The layer that runs after this one, if it is on this rank.
        is_first: Whether no layer on this rank runs before it.
    """

    context: LayerContext
    groups: ExpertGroups
    experts: LocalExperts
    strategy: Strategy
    clock: IterationClock = field(default_factory=IterationClock)
    measure: bool = False
    check_plans: bool = False
    following: "LayerExecutor | None" = None
    is_first: bool = True
    history: LoadHistory = field(init=False)
    load: LayerLoad = field(init=False)
    stopwatch: LayerStopwatch | None = field(init=False, default=None)
    _iteration: LayerIteration | None = field(init=False, default=None)
    _ahead: ReplicaWeights | None = field(init=False, default=None)
    _is_launched: bool = field(init=False, default=False)
    _plain_owner_E: np.ndarray = field(init=False)
    _journal: list[StartedTransfer] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        shape = (self.context.num_devices, self.context.num_experts)
        self.history = LoadHistory(self.strategy.window, *shape)
        self.load = LayerLoad.empty(self.context.layer, *shape)
        self._plain_owner_E = self.context.owner_E
        self.strategy.check(self.context)
        self.experts.check_owned(self.context.owner_E, self.groups.device)

    def own(
        self,
        owner_E: np.ndarray,
        parameters: ParametersByExpert,
        layout: ExpertLayout,
    ) -> None:
        """Take over new owners, between iterations.

        Args:
            owner_E: Device that keeps each expert.
            parameters: Parameters of each expert that this rank owns, ascending by expert.
            layout: Shapes of one expert's tensors, for a rank that owns none.

        Raises:
            ValueError: The parameters are not those of the experts that this rank owns.
        """
        experts = replace(self.experts, parameters=parameters, told_layout=layout)
        experts.check_owned(owner_E, self.groups.device)
        self.context = replace(self.context, owner_E=owner_E)
        self.experts = experts
        self._iteration = None

    def keep(self, placement: ExpertPlacement, residents: ParametersByExpert) -> None:
        """Take over resident replicas, between iterations.

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
        self._iteration = None

    def renumber(self, layer: int) -> None:
        """Take the layer number that the model assigns after building its layers."""
        self.context = replace(self.context, layer=layer)
        self.experts = replace(self.experts, what=f"layer {layer}")
        self.load.layer = layer

    def plan_iteration(self) -> LayerPlan:
        """Make the plan of the running iteration from the iterations before it, unless it is made already.

        This is the only place that makes it. It is called where a forward pass of the layer begins: by
        :meth:`launch`, by whoever runs the gate or, without a gate, by ``run_layer``. The layer before this
        one calls it earlier, by :meth:`plan_following`. Everything else needs a plan and raises without one.

        The plan is frozen until the iteration ends, except for one calibration with the first micro-batch.
        So every micro-batch and a recomputed forward pass use the same placement.
        """
        if self._iteration is None:
            plan = self.strategy.before_gate(self.context, self.history)
            self._check(plan)
            num_micro_batches = self.clock.num_micro_batches
            self._iteration = LayerIteration(
                plan,
                self.experts,
                self.groups,
                num_micro_batches,
                # Parts need a layer before this one, room beside other collectives, and somebody who promises
                # to wait for them; alike on all ranks.
                may_split=not self.is_first
                and self.groups.transfers is not None
                and self.groups.ring is None
                and not self.check_plans
                and num_micro_batches is not None,
                # On CUDA the host waits for a transfer's times, so they are taken only for reports.
                journal=self._journal if self.measure else None,
            )
        return self._iteration.plan

    def plan_following(self) -> None:
        """Plan the iteration of the following layer while the host would only wait for rows."""
        if self._next is not None:
            self._next.plan_iteration()

    @property
    def _running(self) -> LayerIteration:
        """The running iteration.

        Raises:
            RuntimeError: It is not planned yet.
        """
        if self._iteration is None:
            raise RuntimeError(
                f"{self.experts.what}: got a step of an iteration without a plan, wanted it planned; "
                "call LayerExecutor.plan_iteration() where the layer's forward pass begins"
            )
        return self._iteration

    @property
    def _next(self) -> "LayerExecutor | None":
        """The following layer, if it may be planned now and here."""
        # Comparing plans is a collective that may raise: not while others are under way.
        return None if self.following is None or self.following.check_plans else self.following

    def launch(self, hidden: torch.Tensor, *, first: bool = False) -> torch.Tensor:
        """Start SparseAllGather ahead of the compute that comes before the layer.

        Args:
            hidden: What that compute starts from; threaded through, so that the backward pass
                ends SparseReduceScatter after the same compute.
            first: Whether this is the first layer of a forward pass.
        """
        if self.context.num_devices == 1:
            return hidden
        if self.stopwatch is not None:
            self.stopwatch.layer_begins(hidden.device)
        plan = self.plan_iteration()
        if plan.gather_ahead and not plan.each_micro_batch and self.groups.transfers is not None:
            self._ahead = self._running.start_weights(hidden.device)
            self._is_launched = True
        if first:
            self.clock.latest = None
        if torch.is_grad_enabled() and hidden.requires_grad:
            hidden = call_in_backward(self._settle, hidden)
        return hidden

    def _settle(self) -> None:
        for layer in (self, self.following):
            if layer is not None and layer._iteration is not None:
                layer._iteration.advance_gradients()

    def begin_micro_batch(self, routing_map: torch.Tensor, groups: ExpertGroups | None = None) -> MicroBatch:
        """Exchange the counts and work out where this micro-batch's rows go.

        Args:
            routing_map: bool ``[T, E]`` assignments of this rank's tokens.
            groups: Among whom they are exchanged; by default the layer's.
        """
        if self.stopwatch is not None:
            self.stopwatch.tokens_ready()
        groups = groups or self.groups
        counts_XDE = self._gather_counts(routing_map, groups)
        # The peers of expert tensor parallelism compute together: their loads are one load.
        counts_DE = counts_XDE.sum(axis=0)
        iteration = self._running
        if iteration.plan.each_micro_batch:
            iteration = self._planned_by(counts_DE, iteration)
        device = routing_map.device
        weights, self._ahead = self._ahead or iteration.start_weights(device), None
        is_launched, self._is_launched = self._is_launched, False
        if not iteration.is_final:
            iteration.is_final = True
            self._calibrate(iteration, counts_DE, weights, device)
        plan = iteration.plan
        dispatch_of_peer = plan.dispatch(counts_XDE, self.groups.topology)
        exchange = plan_exchange(routing_map, dispatch_of_peer, plan.placement, groups.device, groups.peer)
        self.load.num_replicas = plan.placement.num_replicas
        self.load.placements = (plan.placement,)

        def backward(gradients: GradientsOfExperts) -> None:
            iteration.take_gradients(gradients, device)
            self._count(counts_DE, dispatch_of_peer)

        materialization = Materialization(
            plan.placement,
            self.groups.device,
            weights,
            iteration.whole_transfer(device),
            rematerialize=plan.rematerialize,
            # Without a group of their own, transfers must not run beside the dispatch.
            beside_dispatch=plan.each_micro_batch and self.groups.transfers is not None,
            on_backward=backward,
        )
        if plan.rematerialize and is_launched and torch.is_grad_enabled() and not in_backward():
            materialization.before = self.clock.latest
            self.clock.latest = materialization
        return MicroBatch(exchange, materialization, plan)

    def smart_schedule(self, micro_batch: MicroBatch, compute: ExpertCompute) -> SmartSchedule | None:
        """Dispatch, experts and combine of a micro-batch under the smart schedule; ``None`` without it.

        Args:
            micro_batch: The result of :meth:`begin_micro_batch`; its replicas may still be in transfer.
            compute: The experts' forward pass.
        """
        if self.groups.ring is None:
            return None
        materialization, ring = micro_batch.materialization, self.groups.ring
        travels_G = [expert not in materialization.weights.parameters for expert in materialization.present]
        # Most rows for replicas are the device's own: those from far are there to be computed meanwhile.
        ring = replace(ring, own_last=bool(micro_batch.plan.transfer.edges) and not micro_batch.plan.resident)

        def timed(
            rows: torch.Tensor,
            probs: torch.Tensor,
            rows_per_expert: Sequence[int],
            experts: Sequence[ExpertWeights],
        ) -> torch.Tensor:
            with self.computing(rows.shape[0], rows.device):
                return compute(rows, probs, rows_per_expert, experts)

        return SmartSchedule(
            micro_batch.exchange,
            ring,
            self.groups.expert_parallel,
            timed,
            self.plan_following,
            materialization.weights.wait,
            travels_G,
        )

    def computing(self, num_rows: int, device: torch.device) -> AbstractContextManager[None]:
        """To be entered around the experts' forward pass; times it while the layer is measured.

        A part of the following layer's replicas may travel meanwhile (Pro-Prophet §V-B).
        """
        if self._next is not None and not in_backward():
            self._next._running.start_first_part(device)
        return nullcontext() if self.stopwatch is None else self.stopwatch.experts(num_rows, device)

    def computed(self, rows: torch.Tensor) -> torch.Tensor:
        """Thread the experts' results through the point where their backward pass begins.

        Meanwhile the rest of the following layer's gradients travels (Pro-Prophet §V-B).

        Args:
            rows: Results of the present experts.
        """
        following = None if self._next is None else self._next._running
        if following is None or not following.splits:
            return rows
        return call_in_backward(following.gradients.send_rest, rows)

    def finish_gradients(self) -> None:
        """Bring home what is still here or under way; every rank of the group has to."""
        if self._iteration is not None:
            self._iteration.finish_gradients()

    def end_iteration(self) -> LayerLoad:
        """Close the iteration: its counts become history, its plan and its replicas are dropped.

        Raises:
            RuntimeError: Gradients are still on their way; the optimizer has not seen them.
        """
        load = self.drop_iteration()
        if load.counts_DE.any():
            self.history.append(load.counts_DE)
        return load

    def drop_iteration(self) -> LayerLoad:
        """Close the iteration as if it had not been: it leaves no history.

        Raises:
            RuntimeError: As for :meth:`end_iteration`.
        """
        if self._iteration is not None and not self._iteration.is_home:
            raise RuntimeError(
                f"{self.experts.what}: the iteration ended with replicas' gradients not yet at their "
                "owners; call MoERuntime.finish_gradients() before reading gradients"
            )
        load = self.load
        for started in self._journal:
            load.add(started)
        self._journal.clear()
        self.load = LayerLoad.empty(self.context.layer, *load.counts_DE.shape)
        self._iteration = None
        self._ahead = None
        self._is_launched = False
        return load

    def _planned_by(self, counts_DE: np.ndarray, iteration: LayerIteration) -> LayerIteration:
        """One micro-batch's own plan; a recomputed forward has the same counts and finds it again."""
        plan = self.strategy.after_gate(self.context, counts_DE, iteration.plan, 1)
        self._check(plan)
        return iteration.of_micro_batch(plan)

    def _calibrate(
        self, iteration: LayerIteration, counts_DE: np.ndarray, weights: ReplicaWeights, device: torch.device
    ) -> None:
        """Let the strategy add replicas now that the gate has spoken (Hecate §4.2)."""
        num_micro_batches = iteration.num_micro_batches or 1
        plan = self.strategy.after_gate(self.context, counts_DE, iteration.plan, num_micro_batches)
        if plan is not iteration.plan:
            self._check(plan)
            iteration.extend(plan, weights, device)

    def _check(self, plan: LayerPlan) -> None:
        """Refuse what the strategy did not declare, and plans that differ between ranks."""
        self.strategy.check_plan(self.context, plan)
        if not self.check_plans:
            return
        what = f"the placement of layer {self.context.layer}"
        if self.clock.iteration is not None:
            what += f" in iteration {self.clock.iteration}"
        for group in (self.groups.expert_parallel, self.groups.expert_tensor_parallel):
            if group is not None:
                check_agreement(plan.placement.digest(), group, what)

    def _gather_counts(self, routing_map: torch.Tensor, groups: ExpertGroups) -> np.ndarray:
        """int64 ``[X, D, E]`` on the host; X expert-tensor-parallel peers."""
        counts = gather_counts(routing_map.sum(dim=0), groups.expert_parallel)
        peers = groups.expert_tensor_parallel
        counts = counts.unsqueeze(0) if peers is None else gather_counts(counts.view(-1), peers)
        return counts.cpu().numpy().reshape(-1, self.context.num_devices, self.context.num_experts)

    def _count(self, counts_DE: np.ndarray, dispatch_of_peer: Sequence[TokenDispatch]) -> None:
        self.load.counts_DE += counts_DE
        if self.measure:
            self.load.measure(counts_DE, dispatch_of_peer, self._plain_owner_E)
        if not self.clock.driven:
            self.end_iteration()
