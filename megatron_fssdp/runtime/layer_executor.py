"""Executes a strategy's plans for one MoE layer.

Shape legend: T tokens of this rank, D devices, E experts.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from megatron_fssdp.collectives.plan_agreement import check_agreement
from megatron_fssdp.collectives.sparse_transfer import SparseTransfer, StartedTransfer
from megatron_fssdp.collectives.transfer_cargo import accumulation_dtype
from megatron_fssdp.collectives.uneven_all_to_all import gather_counts
from megatron_fssdp.planning.load_history import LoadHistory
from megatron_fssdp.planning.message_size import CUDA_MESSAGE_BYTES, message_bytes
from megatron_fssdp.planning.placement import ExpertPlacement
from megatron_fssdp.planning.token_dispatch import TokenDispatch
from megatron_fssdp.planning.transfer_plan import TransferPlan, additional_transfer
from megatron_fssdp.runtime.expert_groups import ExpertGroups
from megatron_fssdp.runtime.expert_layout import ExpertLayout, ExpertWeights
from megatron_fssdp.runtime.iteration_clock import IterationClock
from megatron_fssdp.runtime.layer_load import LayerLoad
from megatron_fssdp.runtime.layer_stopwatch import LayerStopwatch
from megatron_fssdp.runtime.materialization import (
    GradientsOfExperts,
    Materialization,
    call_in_backward,
    in_backward,
)
from megatron_fssdp.runtime.pipelined_experts import ExpertCompute, ExpertPipeline
from megatron_fssdp.runtime.replica_gradients import ReplicaGradients
from megatron_fssdp.runtime.replica_weights import ReplicaWeights
from megatron_fssdp.runtime.resident_gradients import ResidentGradients
from megatron_fssdp.runtime.token_exchange import DispatchRecord, plan_exchange
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
class _Iteration:
    """One layer's running iteration: the plan in force and what hangs on it.

    Attributes:
        plan: Frozen after the first micro-batch, so that a recomputed forward meets it again.
        transfer: All of the plan's replicas; bound to the process group at its first use.
        weights: Replicas kept for the whole iteration, if they are; perhaps only a part of them so far.
        is_final: Whether the exact counts of a micro-batch have been seen.
        num_passes: Backward passes through replicas that stay.
        sums: Of the gradients of those, once there are any to be summed.
    """

    plan: LayerPlan
    transfer: SparseTransfer | None = None
    weights: ReplicaWeights | None = None
    is_final: bool = False
    num_passes: int = 0
    sums: ResidentGradients | None = None


@dataclass(eq=False)
class LayerExecutor:
    """One MoE layer on this rank: asks the strategy, keeps the loads, starts micro-batches.

    Attributes:
        context: What the strategy may know of the layer.
        groups: Process group and topology.
        parameters: Parameters of each expert this rank owns, by expert, in the order of
            :class:`ExpertWeights`. The tensors stay Megatron's own.
        residents: The same of the replicas that stay here from iteration to iteration.
        strategy: Decides.
        clock: Who ends iterations.
        layout: Shapes of one expert's tensors; by default those of this rank's parameters.
            A rank that owns no expert of the layer has to be told.
        measure: Whether to work out the device loads, bytes and times that reports show; they
            cost a little host time per micro-batch.
        check_plans: Compare the plans of all ranks before using them.
        following: The layer that runs after this one, if it is on this rank.
        is_first: Whether no layer on this rank runs before it.
    """

    context: LayerContext
    groups: ExpertGroups
    parameters: Mapping[int, Sequence[torch.nn.Parameter]]
    strategy: Strategy
    clock: IterationClock = field(default_factory=IterationClock)
    layout: ExpertLayout | None = None
    measure: bool = False
    check_plans: bool = False
    following: "LayerExecutor | None" = None
    is_first: bool = True
    residents: Mapping[int, Sequence[torch.nn.Parameter]] = field(default_factory=dict)
    history: LoadHistory = field(init=False)
    load: LayerLoad = field(init=False)
    stopwatch: LayerStopwatch | None = field(init=False, default=None)
    _iteration: _Iteration | None = field(init=False, default=None)
    _ahead: ReplicaWeights | None = field(init=False, default=None)
    _is_launched: bool = field(init=False, default=False)
    _plain_owner_E: np.ndarray = field(init=False)
    _gradients: ReplicaGradients = field(init=False, default_factory=ReplicaGradients)
    _journal: list[StartedTransfer] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        shape = (self.context.num_devices, self.context.num_experts)
        self.history = LoadHistory(self.strategy.window, *shape)
        self.load = LayerLoad.empty(self.context.layer, *shape)
        self._plain_owner_E = self.context.owner_E
        self.strategy.check(self.context)
        self.own(self.context.owner_E, self.parameters, self.layout)

    def own(
        self,
        owner_E: np.ndarray,
        parameters: Mapping[int, Sequence[torch.nn.Parameter]],
        layout: ExpertLayout | None = None,
    ) -> None:
        """Take over new owners, between iterations.

        Args:
            owner_E: Device that keeps each expert.
            parameters: Parameters of each expert that this rank owns, ascending by expert.
            layout: Shapes of one expert's tensors, for a rank that owns none.

        Raises:
            ValueError: The parameters are not those of the experts that this rank owns.
        """
        owned = tuple(np.flatnonzero(owner_E == self.groups.device).tolist())
        if tuple(parameters) != owned:
            raise ValueError(
                f"layer {self.context.layer}: got parameters of experts {tuple(parameters)}, "
                f"wanted those this rank owns, {owned}"
            )
        self.context = replace(self.context, owner_E=owner_E)
        self.parameters = parameters
        self.layout = layout
        self._iteration = None
        self.layout_of_all()

    def keep(self, placement: ExpertPlacement, residents: Mapping[int, Sequence[torch.nn.Parameter]]) -> None:
        """Take over replicas that stay, between iterations.

        Args:
            placement: Where experts have Parameters; the owners are the present ones.
            residents: Parameters of this rank's replicas, with the owners' contents.

        Raises:
            ValueError: The parameters are not those of this rank's replicas.
        """
        here = placement.experts_on(self.groups.device)
        if sorted({*self.parameters, *residents}) != list(here):
            raise ValueError(
                f"layer {self.context.layer}: got parameters of experts {sorted(self.parameters)} and of "
                f"replicas {sorted(residents)}, wanted those of the experts that are here, {list(here)}"
            )
        self.context = replace(self.context, resident=placement)
        self.residents = residents
        self._iteration = None

    def renumber(self, layer: int) -> None:
        """Take the layer number that the model assigns after building its layers."""
        self.context = replace(self.context, layer=layer)
        self.load.layer = layer

    def prepare(self) -> LayerPlan:
        """The plan of the running iteration, made from the iterations before it.

        Frozen until the iteration ends, but for one calibration with the first micro-batch,
        so that every micro-batch and a recomputed forward use the same placement.
        """
        return self._running().plan

    def plan_following(self) -> None:
        """Plan the layer after this one; for a moment in which the host would only wait."""
        if self._next is not None:
            self._next.prepare()

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
        iteration = self._running()
        plan = iteration.plan
        if plan.gather_ahead and not plan.each_micro_batch and self.groups.transfers is not None:
            self._ahead = self._start_weights(iteration, hidden.device)
            self._is_launched = True
        if first:
            self.clock.latest = None
        if torch.is_grad_enabled() and hidden.requires_grad:
            hidden = call_in_backward(self._settle, hidden)
        return hidden

    def _settle(self) -> None:
        for layer in (self, self.following):
            if layer is not None:
                layer._advance_gradients()

    def _advance_gradients(self) -> None:
        self._gradients.settle()
        if self._iteration is not None and self._iteration.sums is not None:
            self._iteration.sums.advance()

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
        iteration = self._running()
        if iteration.plan.each_micro_batch:
            iteration = self._planned_by(counts_DE, iteration.plan)
        weights, self._ahead = self._ahead or self._start_weights(iteration, routing_map.device), None
        is_launched, self._is_launched = self._is_launched, False
        if not iteration.is_final:
            iteration.is_final = True
            self._calibrate(iteration, counts_DE, weights, routing_map.device)
        plan = iteration.plan
        dispatch_of_peer = plan.dispatch(counts_XDE, self.groups.topology)
        exchange = plan_exchange(routing_map, dispatch_of_peer, plan.placement, groups.device, groups.peer)
        self.load.num_replicas = plan.placement.num_replicas
        self.load.placements = (plan.placement,)

        def backward(done: Materialization, gradients: GradientsOfExperts) -> None:
            if plan.resident:
                self._sum_residents(iteration, routing_map.device)
            else:
                self._send_home(plan, done, gradients)
            self._count(counts_DE, dispatch_of_peer)

        materialization = Materialization(
            plan.placement,
            self.groups.device,
            weights.layout,
            weights.parameters,
            weights,
            self._transfer(iteration, routing_map.device),
            rematerialize=plan.rematerialize,
            # Without a group of their own, transfers must not run beside the dispatch.
            beside_dispatch=plan.each_micro_batch and self.groups.transfers is not None,
            on_backward=backward,
        )
        if plan.rematerialize and is_launched and torch.is_grad_enabled() and not in_backward():
            materialization.before = self.clock.latest
            self.clock.latest = materialization
        return MicroBatch(exchange, materialization, plan)

    def pipeline(self, micro_batch: MicroBatch, compute: ExpertCompute) -> ExpertPipeline | None:
        """Dispatch, experts and combine of a micro-batch in steps, if the groups say so.

        Args:
            micro_batch: What :meth:`begin_micro_batch` said; its weights need not have been waited for.
            compute: The experts.
        """
        if self.groups.ring is None:
            return None
        materialization, ring = micro_batch.materialization, self.groups.ring
        travels_G = [expert not in materialization.parameters for expert in materialization.present]
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

        return ExpertPipeline(
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
            self._next.gather_early(device)
        return nullcontext() if self.stopwatch is None else self.stopwatch.experts(num_rows, device)

    def computed(self, rows: torch.Tensor) -> torch.Tensor:
        """Thread the experts' results through the point where their backward pass begins.

        Meanwhile the rest of the following layer's gradients travels (Pro-Prophet §V-B).

        Args:
            rows: Results of the present experts.
        """
        following = self._next
        if following is None or not following._splits(following.prepare()):
            return rows
        return call_in_backward(following._gradients.send_rest, rows)

    def gather_early(self, device: torch.device) -> None:
        """Start the part of SparseAllGather that runs beside the experts of the layer before."""
        iteration = self._running()
        plan = iteration.plan
        if iteration.weights is None and self._splits(plan) and (part := self._part(plan.split.gather)):
            iteration.weights = ReplicaWeights(self.layout_of_all(), self.parameters)
            iteration.weights.start(self._bind(plan.transfer, device, part))

    def finish_gradients(self) -> None:
        """Bring home what is still here or under way; every rank of the group has to."""
        if self._iteration is not None and self._iteration.sums is not None:
            self._iteration.sums.finish()
        elif self._iteration is not None and self._iteration.transfer is not None:
            self._gradients.send_sums([self._iteration.transfer], self.layout_of_all(), self.parameters)
        self._gradients.send_rest()
        self._gradients.settle()

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
        sums = None if self._iteration is None else self._iteration.sums
        if self._gradients.num_unsent or self._gradients.in_flight or not (sums is None or sums.is_finished):
            raise RuntimeError(
                f"layer {self.context.layer}: the iteration ended with replicas' gradients not yet at their "
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

    def _running(self) -> _Iteration:
        if self._iteration is None:
            plan = self.strategy.before_gate(self.context, self.history)
            self._check_agreement(plan)
            self._iteration = _Iteration(plan)
        return self._iteration

    def _start_weights(self, iteration: _Iteration, device: torch.device) -> ReplicaWeights:
        if iteration.weights is not None:
            if missing := iteration.weights.num_missing:
                iteration.weights.start(self._bind(iteration.plan.transfer, device, missing))
            return iteration.weights
        if iteration.plan.resident:
            local = {**self.parameters, **self.residents}
            iteration.weights = ReplicaWeights.present(self.layout_of_all(), local)
            return iteration.weights
        weights = ReplicaWeights(self.layout_of_all(), self.parameters)
        weights.start(self._transfer(iteration, device))
        if self.clock.num_micro_batches is not None and not iteration.plan.rematerialize:
            iteration.weights = weights
        return weights

    def _splits(self, plan: LayerPlan) -> bool:
        """Whether transfers of a plan may be split; the same on all ranks.

        They need a layer before this one, room beside other collectives, and somebody who promises to wait
        for them.
        """
        return (
            plan.is_split
            and not self.is_first
            and self.groups.transfers is not None
            and self.groups.ring is None
            and not self.check_plans
            and self.clock.num_micro_batches is not None
        )

    def _part(self, share: float) -> int:
        """Elements in a share of an expert; one at least is left over."""
        return min(round(share * self.layout_of_all().numel), self.layout_of_all().numel - 1)

    def _planned_by(self, counts_DE: np.ndarray, planned: LayerPlan) -> _Iteration:
        """One micro-batch's own plan; a recomputed forward has the same counts and finds it again."""
        plan = self.strategy.after_gate(self.context, counts_DE, planned, 1)
        self._check_agreement(plan)
        return _Iteration(plan, is_final=True)

    def _calibrate(
        self, iteration: _Iteration, counts_DE: np.ndarray, weights: ReplicaWeights, device: torch.device
    ) -> None:
        """Let the strategy add replicas now that the gate has spoken (Hecate §4.2)."""
        planned = iteration.plan.placement
        plan = self.strategy.after_gate(
            self.context, counts_DE, iteration.plan, self.clock.num_micro_batches or 1
        )
        if plan is iteration.plan:
            return
        self._check_agreement(plan)
        weights.extend(self._bind(additional_transfer(planned, plan.placement, self.groups.topology), device))
        iteration.plan = plan
        iteration.transfer = None

    def _send_home(self, plan: LayerPlan, done: Materialization, gradients: GradientsOfExperts) -> None:
        if done.alone:
            return
        num_micro_batches = self.clock.num_micro_batches
        if num_micro_batches is not None and plan.life.sums_gradients(num_micro_batches):
            self._gradients.accumulate(done.layout, gradients)
            if self._gradients.num_unsent >= num_micro_batches:
                self._gradients.send_sums(self._parts_home(plan, done), done.layout, done.parameters)
        else:
            self._gradients.send(self._parts_home(plan, done), done.layout, done.parameters, gradients)
        if num_micro_batches is None or self.groups.transfers is None:
            self._gradients.settle()

    def _sum_residents(self, iteration: _Iteration, device: torch.device) -> None:
        """All-reduce gradients among holders after the iteration's last backward pass."""
        if self.clock.num_micro_batches is None:
            raise RuntimeError(
                f"layer {self.context.layer}: got a backward pass with replicas that stay and nobody who "
                "says how many passes an iteration has; call MoERuntime.begin_iteration(num_micro_batches)"
            )
        if iteration.sums is None:
            layout = self.layout_of_all()
            transfer = self._bind(iteration.plan.transfer, device, dtype=accumulation_dtype(layout.dtype))
            iteration.sums = ResidentGradients(transfer, layout, {**self.parameters, **self.residents})
        iteration.num_passes += 1
        if iteration.num_passes == self.clock.num_micro_batches and self.groups.transfers is not None:
            iteration.sums.reduce()

    def _parts_home(self, plan: LayerPlan, done: Materialization) -> list[SparseTransfer]:
        later = self._part(plan.split.reduce) if self._splits(plan) else 0
        if not later:
            return [done.transfer]
        device, transfer = done.transfer.device, plan.transfer
        return [
            self._bind(transfer, device, done.layout.numel - later),
            self._bind(transfer, device, later),
        ]

    def layout_of_all(self) -> ExpertLayout:
        """Shapes of one expert's tensors."""
        # Asked anew each time: a model may be converted to another dtype after it is built.
        layouts = {ExpertLayout.of(tensors) for tensors in self.parameters.values()}
        if self.layout is not None:
            layouts.add(self.layout)
        if len(layouts) != 1:
            raise ValueError(
                f"layer {self.context.layer}: got {len(layouts)} expert layouts "
                f"{sorted(map(str, layouts))}, wanted one for all experts; a rank that owns none of them "
                "needs the layout argument"
            )
        return layouts.pop()

    def _transfer(self, iteration: _Iteration, device: torch.device) -> SparseTransfer:
        if iteration.transfer is None:
            iteration.transfer = self._bind(iteration.plan.transfer, device)
        return iteration.transfer

    def _bind(
        self,
        plan: TransferPlan,
        device: torch.device,
        num_elements: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> SparseTransfer:
        layout = self.layout_of_all()
        return SparseTransfer(
            self.groups.transfers or self.groups.expert_parallel,
            plan,
            num_elements=layout.numel if num_elements is None else num_elements,
            dtype=dtype or layout.dtype,
            device=device,
            chunk_bytes=message_bytes(on_cuda=device.type == "cuda"),
            # On CUDA the host waits for a transfer's times, so they are taken only for reports.
            journal=self._journal if self.measure else None,
            what=f"layer {self.context.layer}",
        )

    def _check_agreement(self, plan: LayerPlan) -> None:
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
        load = self.load
        load.counts_DE += counts_DE
        if self.measure:
            for dispatch in dispatch_of_peer:
                load.device_D += dispatch.device_tokens_D()
                load.cross_node_tokens += dispatch.cross_node_tokens()
            load.owner_D += np.bincount(
                self._plain_owner_E, weights=counts_DE.sum(axis=0), minlength=self.context.num_devices
            ).astype(np.int64)
        if not self.clock.driven:
            self.end_iteration()
