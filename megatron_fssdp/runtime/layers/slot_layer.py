"""One MoE layer under a strategy: experts in slots, and the replicas' transfers beside Megatron's own passes.

Megatron's router, dispatcher and experts compute. This class says to which slots the tokens go, brings
weights into the replica slots, and sends the replicas' gradients home. The caller (Megatron's layer, a
benchmark) calls its methods at these places of a forward pass, and the backward pass comes back to them in
the opposite order::

    method           place                     forward                        backward
    launch           (end of the layer before) spAG starts
    prepare          after the gate            provides the slots
    remap            in the dispatcher         experts become slots
    enter_dispatch   before the rows leave                                    gradients complete: spRS starts
    rows_travel      after the rows have left  plans the next layer
    await_weights    before the experts        spAG ends
    leave_experts    after the experts                                        (spAG ends), sums are opened
    finish           end of the layer          next layer's spAG starts       next spRS ends, (spAG starts)

``finish`` of a layer launches the next one, so that neither CUDA graphs of attention nor a missing hook can
lose a gather. If replicas live for an iteration, SparseAllGather runs once before the first micro-batch, and
SparseReduceScatter once after the last. Steps in parentheses take place only under re-materialization
(Hecate §4.2).

Shape letters: T tokens, D devices, E experts, R rows that a rank receives, M model dimension, A rows that a
rank sends, W slots of all devices.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from megatron_fssdp.collectives.gathered_counts import gather_counts, start_counts
from megatron_fssdp.collectives.sparse.sparse_transfer import StartedTransfer
from megatron_fssdp.collectives.stream_lane import advance_transfers
from megatron_fssdp.planning.loads import LoadHistory
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.transfer.transfer_plan import additional_transfer
from megatron_fssdp.runtime.clocks.layer_stopwatch import LayerStopwatch
from megatron_fssdp.runtime.clocks.pass_timer import LayerTimer, Part, PassTimer
from megatron_fssdp.runtime.experts.expert_layout import ExpertLayout, ParametersByExpert
from megatron_fssdp.runtime.experts.local_experts import LocalExperts
from megatron_fssdp.runtime.layers.expert_groups import ExpertGroups
from megatron_fssdp.runtime.layers.home_gradients import HomeGradients
from megatron_fssdp.runtime.layers.iteration_clock import IterationClock
from megatron_fssdp.runtime.layers.layer_load import LayerLoad
from megatron_fssdp.runtime.layers.layer_planner import LayerPlanner
from megatron_fssdp.runtime.layers.pass_maker import PassMaker
from megatron_fssdp.runtime.layers.slot_counts import SlotCounts
from megatron_fssdp.runtime.layers.slot_pass import SlotPass
from megatron_fssdp.runtime.slots.autograd_points import call_in_backward, in_backward
from megatron_fssdp.runtime.slots.exact_shares import remap_exactly
from megatron_fssdp.runtime.slots.remap import remap_by_table
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.strategy import SelectsStrategies, Strategy


class SlotLayer:
    """One MoE layer on this rank. All ranks of the layer's groups call its methods in the same order.

    Args:
        context: The data of the layer that the strategy may use.
        groups: Process groups of the layer, and the nodes of its ranks.
        experts: Experts of the layer that have Parameters on this rank.
        strategy: Strategy that plans the layer.
        clock: Clock of iterations that all layers of the model share.
        measure: Whether this rank keeps the device loads, bytes and times that reports show.
        measures_spread: Whether the ranks count on how many nodes and devices the experts of a token are;
            equal on all ranks.
        check_plans: Whether to compare the plans of all ranks before they are used.
        timer: Timer of the parts of this layer's passes.
        least_slots: Replica slots that exist from the start. Further ones are added when a plan needs them.
        slot_multiple: Number of which the slots of a device are a multiple; empty slots are added.

    Attributes:
        load: Loads, bytes and times of the running iteration.
        counts: Counts of the running iteration on the device.
        stopwatch: Stopwatch of the layer; ``None`` while the layer is not measured.
        following: The next MoE layer on this rank.
        before: The MoE layer before this one on this rank.
        is_first: Whether the model chunk of this layer has no MoE layer before it.
        on_pass: Function that is called with the pass in use whenever another one comes into use. The caller
            binds its dispatcher and its experts to the slots.
        gradients: Gradients of the running iteration. If the caller's experts compute weight gradients apart
            from their backward pass, it sets ``delays_weight_gradients`` and marks them as computed.
    """

    def __init__(
        self,
        context: LayerContext,
        groups: ExpertGroups,
        experts: LocalExperts,
        strategy: Strategy,
        clock: IterationClock | None = None,
        *,
        measure: bool = False,
        measures_spread: bool = False,
        check_plans: bool = False,
        timer: LayerTimer | None = None,
        least_slots: int = 0,
        slot_multiple: int = 1,
    ) -> None:
        self.context, self.groups, self.experts, self.strategy = context, groups, experts, strategy
        self.clock = clock or IterationClock()
        self.measure = measure
        self.timer = timer or LayerTimer(PassTimer())
        self.counts = SlotCounts(context.topology, context.owner_E, measures_spread)
        self.stopwatch: LayerStopwatch | None = None
        self.following: SlotLayer | None = None
        self.before: SlotLayer | None = None
        self.is_first = True
        self.on_pass: Callable[[SlotPass], object] = lambda one: None
        history = LoadHistory(strategy.window, context.num_devices, context.num_experts)
        self.planner = LayerPlanner(strategy, groups, self.clock, history, check_plans)
        self.load = self._empty_load()
        self._journal: list[StartedTransfer] = []
        journal = self._journal if measure else None
        self._maker = PassMaker(groups, self.timer.waiting, journal, least_slots, slot_multiple)
        self._shared: SlotPass | None = None
        self._current: SlotPass | None = None
        self.gradients = HomeGradients(self.clock, self.timer, self._maker, experts)
        self.gradients.on_complete = self._prefetch_before
        self._is_counted = self._is_final = self._asks_after_gate = False
        self._is_alone = context.num_devices == 1
        strategy.check(context)
        experts.check_owned(context.owner_E, groups.device)

    @property
    def history(self) -> LoadHistory:
        """Loads of the last iterations."""
        return self.planner.history

    @property
    def plan(self) -> LayerPlan | None:
        """Plan of the running iteration, as far as it is made."""
        return None if self._shared is None else self._shared.plan

    @property
    def is_home(self) -> bool:
        """Whether no gradient of a replica is missing at its owner."""
        return self.gradients.is_home

    # Changes between iterations.

    def own(self, owner_E: np.ndarray, parameters: ParametersByExpert, layout: ExpertLayout) -> None:
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
        self._drop()
        self.context = replace(self.context, owner_E=owner_E)
        self.experts = self.gradients.experts = experts

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
        self._drop()
        self.context = replace(self.context, resident=placement)
        self.experts = self.gradients.experts = experts

    def renumber(self, layer: int) -> None:
        """Set the layer number, which the model assigns after it has built its layers."""
        self.context = replace(self.context, layer=layer)
        self.experts = self.gradients.experts = replace(self.experts, what=f"layer {layer}")
        self.load.layer = layer

    # The forward pass.

    def plan_iteration(self) -> LayerPlan:
        """Make the plan of the running iteration from the loads of earlier iterations, if it does not exist.

        It does not change until the iteration ends, except for one correction with the first micro-batch by
        strategies that ask for it. Every micro-batch and a recomputed forward pass use the same slots.
        """
        if self._shared is None:
            self._shared = self._make_pass(self.planner.next_plan(self.context), None, is_shared=True)
            self._use(self._shared)
            if isinstance(self.strategy, SelectsStrategies):
                self.load.strategy = self.strategy.selected(self.context.layer)
            self._asks_after_gate = self.strategy.asks_after_gate(self.context.layer)
        return self._shared.plan

    def launch(self, hidden: torch.Tensor | None = None) -> None:
        """Plan the iteration, and start SparseAllGather before the compute that comes before the layer.

        Args:
            hidden: A tensor of the pass, for the stopwatch; ``None`` outside of a pass.
        """
        if self._is_alone or not self.clock.driven:
            return
        plan = self.plan_iteration()
        assert self._shared is not None
        self._await_parameters()
        transfers = self._shared.transfers
        if transfers is not None and plan.gather_ahead:
            transfers.prefetch(backward=False)
        if self.stopwatch is not None and hidden is not None:
            # The span begins when the transfer is posted: what the host did until here hides nothing.
            self.stopwatch.layer_begins(hidden.device)

    def prepare(self, routing_map: torch.Tensor | None, *, training: bool) -> None:
        """Provide the slots of the coming forward pass, before its routing is remapped.

        Only strategies that plan each micro-batch, and loops that mark no iterations, need the counts here;
        then the host waits for them once.

        Args:
            routing_map: Experts that each token of this rank selected, bool ``[T, E]``; ``None`` if a CUDA
                graph has computed it.
            training: Whether the model trains; evaluations are not counted.
        """
        self._is_counted = training and not in_backward()
        if self.stopwatch is not None:
            self.stopwatch.tokens_ready()
        self.advance_transfers()
        if self._is_alone or self.clock.driven:
            plan = self.plan_iteration()
            if not plan.each_micro_batch or routing_map is None or self._is_alone:
                if routing_map is not None:
                    self._correct(routing_map)
                assert self._shared is not None
                self._begin(self._shared)
                return
        else:
            plan = self.planner.next_plan(self.context)
        assert routing_map is not None
        self._await_parameters()
        counts_DE = self._host_counts(routing_map)
        # Without reentrance, a recomputed pass fills the graph of the first one, so it must have its slots.
        own = self.gradients.own_of(counts_DE) if in_backward() else None
        if own is None:
            plan = self.planner.after_gate(self.context, counts_DE, plan, 1)
            own = self._make_pass(plan, counts_DE, is_shared=False)
            self.gradients.add_own(own)
        own.is_recomputed = in_backward()
        if self._is_counted:
            self.counts.count_on_host(counts_DE, own, self.load, self.measure)
            if not self.clock.driven:
                self.history.append(counts_DE)
                # The gate has noted the schedule of this pass already.
                noted = {name: getattr(self.load, name) for name in ("schedule", "schedule_predicted_s")}
                self.load = replace(self._empty_load(), **noted)
        self._begin(own)

    def _begin(self, one: SlotPass) -> None:
        """Use a pass. Transfers that may not run beside the dispatch end before it."""
        self._use(one)
        if one.transfers is not None and not one.plan.gather_ahead:
            one.transfers.await_weights()

    def prepare_capture(self, *, training: bool) -> None:
        """Provide the slots for a CUDA graph that is captured: its tensors keep their addresses.

        Args:
            training: Whether the model trains.
        """
        self.plan_iteration()
        self._use(self._shared)
        self._is_counted = training and not in_backward()
        self.counts.open(self._in_use, self.experts.device)

    def remap(self, routing_map: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Turn the routing of experts into the routing of slots, on the device.

        Args:
            routing_map: Experts that each token of this rank selected, bool ``[T, E]``.
            probs: Routing probabilities, ``[T, E]``.

        Returns:
            Routing map of the slots, bool ``[T, W]``, and their probabilities.
        """
        one, slot_map = self._in_use, routing_map
        if one.holders is not None:
            counts_DE = gather_counts(routing_map.sum(0), self.groups.expert_parallel)
            slot_map, probs = remap_exactly(routing_map, probs, counts_DE, one.holders, one.num_slots)
        elif one.table_EJ is not None:
            slot_map, probs = remap_by_table(routing_map, probs, one.table_EJ, one.num_slots)
        if self._is_counted:
            self.counts.add(one, routing_map, slot_map)
        return slot_map, probs

    def enter_dispatch(self, hidden: torch.Tensor) -> torch.Tensor:
        """Thread a tensor through the point at which the backward pass has the experts' gradients.

        Args:
            hidden: Rows before they are dispatched, any shape.
        """
        one = self._in_use
        if one.is_shared and not self._has_late_gradients(one):
            return hidden
        one.has_backward = torch.is_grad_enabled()
        return call_in_backward(partial(self.gradients.dispatch_is_over, one), hidden)

    def rows_travel(self) -> None:
        """Do what the host has to do while the rows travel: plan the next layer, gather late replicas.

        Replicas for this micro-batch alone are gathered now, so that the rows go first.
        """
        one = self._in_use
        if one.transfers is not None and not one.plan.rematerialize:
            one.transfers.gather()
        if self.following is not None and self.clock.driven and not in_backward():
            self.following.plan_iteration()

    def await_weights(self, rows: torch.Tensor) -> AbstractContextManager[None]:
        """Wait for the replicas' weights, immediately before the experts compute.

        Args:
            rows: Rows that the experts compute, ``[R, M]``.

        Returns:
            Context manager for the experts' forward pass, which measures it if the layer has a stopwatch.
        """
        one, following = self._in_use, self.following
        if following is not None and self.strategy.splits and self.clock.driven and not in_backward():
            following._gather_first_part()
        if one.transfers is not None:
            one.transfers.begin_use(backward=False)
            one.transfers.await_weights()
        self.mark(rows, "experts", "dispatch")
        return nullcontext() if self.stopwatch is None else self.stopwatch.experts(rows.shape[0], rows.device)

    def compute_in_steps(
        self,
        rows: torch.Tensor,
        probs: torch.Tensor,
        experts: Callable[..., Any],
        run: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        """Dispatch, compute and combine in the steps of the smart schedule (FasterMoE §4.2).

        Args:
            rows: Rows in the order of sending, ``[A, M]``.
            probs: Probabilities of these rows, ``[A]``.
            experts: Forward pass of the slots' experts.
            run: The dispatcher's method that runs the steps.

        Returns:
            Results of the rows, ``[A, M]``.
        """
        one, transfers = self._in_use, self._in_use.transfers
        if transfers is None:
            with self.await_weights(rows):
                return self.leave_experts(run(rows, probs, experts))
        transfers.begin_use(backward=False)
        expert_U = one.slots.expert_DU[self.groups.device].tolist()
        arriving = [
            slot
            for slot, expert in enumerate(expert_U)
            if expert >= 0 and expert not in self.experts.parameters
        ]
        # Most rows for replicas come from the device itself. While replicas are in transfer, the device
        # therefore computes the rows from other groups first.
        results = run(
            rows, probs, experts, own_last=True, await_weights=transfers.await_weights, in_transfer=arriving
        )
        return self.leave_experts(results)

    def leave_experts(self, rows: torch.Tensor) -> torch.Tensor:
        """Thread the experts' results through the point at which their backward pass begins.

        Args:
            rows: Results of the experts, ``[R, M]``.
        """
        one = self._in_use
        self.mark(rows, "combine", "experts")
        self.advance_transfers(rows)
        next_splits = self.following is not None and self.following._splits
        if self._has_late_gradients(one) or next_splits:
            rows = call_in_backward(partial(self._experts_begin_backward, one), rows)
        if one.transfers is not None:
            one.transfers.end_use()
        if not one.is_shared and not one.has_backward:
            self.gradients.end_own(one)
        return rows

    def finish(self, output: torch.Tensor) -> torch.Tensor:
        """End the forward pass: launch the next layer.

        Args:
            output: Output of the layer, any shape. It is threaded through the layer's first backward point.
        """
        one, following = self._in_use, self.following
        if one.holds_each_pass or (following is not None and following.groups.transfers is not None):
            output = call_in_backward(partial(self._begin_backward, one), output)
        self.mark(output, None, "combine")
        if following is not None and not following.is_first and not in_backward():
            following.launch(output)
        return output

    def mark(self, tensor: torch.Tensor, forward: Part | None, backward: Part | None) -> None:
        """Mark a border between two parts of the layer, if it is measured (:meth:`LayerTimer.passes`)."""
        if self.timer.timer.is_running:
            self.timer.passes(tensor, forward, backward)

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

    # The backward pass.

    def _begin_backward(self, one: SlotPass) -> None:
        if self.following is not None:
            self.following.settle()
        if one.holds_each_pass and one.transfers is not None:
            one.transfers.prefetch(backward=True)

    def _experts_begin_backward(self, one: SlotPass) -> None:
        following = self.following
        if following is not None and following._splits:
            assert following._shared is not None
            assert following._shared.transfers is not None
            following._shared.transfers.reduce_rest()
        if self._has_late_gradients(one):
            self.gradients.experts_begin_backward(one)

    def _prefetch_before(self) -> None:
        """Gather the weights of the layer before again, beside the compute between the layers."""
        if self.before is None or self.is_first:
            return
        shared = self.before._shared
        if shared is None or shared.transfers is None:
            return
        if shared.holds_each_pass and shared.plan.gather_ahead:
            shared.transfers.prefetch(backward=True)

    def settle(self) -> None:
        """Wait for the gradients on their way home (:meth:`HomeGradients.settle`)."""
        self.gradients.settle(self._shared)

    def finish_gradients(self) -> None:
        """Bring all remaining gradients to the owners and wait; every rank of the group must call it."""
        self.gradients.finish(self._shared)

    # Iterations.

    def end_iteration(self) -> LayerLoad:
        """Close the iteration: add its counts to the history, and drop its plan and its replicas.

        Returns:
            Loads, bytes and times of the iteration.

        Raises:
            RuntimeError: Some gradients have not reached the owners, so the optimizer would miss them.
        """
        if not self.gradients.is_home:
            raise RuntimeError(
                f"{self.experts.what}: the iteration ended before all replicas' gradients reached their "
                "owners; call MoERuntime.finish_gradients() before reading gradients"
            )
        load = self._take_load()
        self._drop()
        if load.counts_DE.any():
            self.history.append(load.counts_DE)
        return load

    def reset(self) -> None:
        """Begin the passes of the iteration anew: gradients and counts are dropped, the plan stays."""
        if self._shared is not None and self._shared.transfers is not None:
            self._shared.transfers.drop()
        self._begin_anew()
        strategy = self._take_load().strategy
        self.load.strategy = strategy
        self._use(self._shared)

    def _drop(self) -> None:
        """Drop the plan and the replicas, after a wait for the transfers that use their memory."""
        if self._shared is not None and self._shared.transfers is not None:
            self._shared.transfers.drop()
        self._begin_anew()
        self._shared = self._current = None

    def _begin_anew(self) -> None:
        self.gradients.begin_anew()
        self._is_counted = self._is_final = False
        self.counts.clear()

    def _take_load(self) -> LayerLoad:
        load = self.load
        for started in self._journal:
            load.add(started)
        self._journal.clear()
        load.forward, load.backward = self.timer.take()
        if self.stopwatch is not None:
            self.stopwatch.iteration_ends()
        self.load = self._empty_load()
        return load

    def _empty_load(self) -> LayerLoad:
        context = self.context
        return LayerLoad.empty(
            context.layer, context.topology.num_nodes, context.num_devices, context.num_experts
        )

    def counted(self) -> torch.Tensor | None:
        """This rank's numbers of the iteration that other ranks need (:meth:`SlotCounts.to_share`)."""
        return self.counts.to_share(self._shared)

    def take_counts(self, numbers_SN: np.ndarray) -> None:
        """Add the numbers of all ranks, which :meth:`counted` returned there, int64 by rank."""
        self.counts.take(numbers_SN, self._shared, self.load, self.measure)

    # Passes.

    @property
    def _in_use(self) -> SlotPass:
        """The pass of the running forward pass.

        Raises:
            RuntimeError: :meth:`prepare` has not been called.
        """
        if self._current is None:
            raise RuntimeError(
                f"{self.experts.what}: got a step of a forward pass without a plan, wanted a plan first; "
                "call SlotLayer.prepare() before the routing is remapped"
            )
        return self._current

    def _has_late_gradients(self, one: SlotPass) -> bool:
        """Whether gradients of owned experts can be incomplete after their backward pass.

        Expert-parallel groups with copies of the same experts plan other replicas. If one of them can have
        some, all of them count as late: all ranks must start their data-parallel reductions in one order.
        """
        # In steps, the gradients of an owned expert arrive in several parts.
        in_steps = one.plan.in_steps and not self._is_alone
        return one.has_gradients or in_steps or self.strategy.may_replicate(self.context.layer)

    def _use(self, one: SlotPass | None) -> None:
        if one is not None and one is not self._current:
            self._current = one
            self.on_pass(one)

    def _make_pass(self, plan: LayerPlan, counts_DE: np.ndarray | None, *, is_shared: bool) -> SlotPass:
        if counts_DE is None and plan.needs_counts and not self.history.is_empty:
            counts_DE = np.rint(self.history.forecast_DE()).astype(np.int64)
        return self._maker.make(
            plan,
            self.context,
            self.experts,
            most_slots=self.strategy.slots(self.context),
            counts_DE=counts_DE,
            is_shared=is_shared,
            may_split=not self.is_first,
        )

    def _correct(self, routing_map: torch.Tensor) -> None:
        """Let the strategy change the replicas with the first micro-batch's exact counts (Hecate §4.2)."""
        if self._is_final or not self._asks_after_gate:
            return
        self._is_final = True
        one = self._shared
        assert one is not None
        num_micro_batches = max(self.clock.num_micro_batches, 1)
        counts_DE = self._host_counts(routing_map)
        plan = self.planner.after_gate(self.context, counts_DE, one.plan, num_micro_batches)
        if plan is one.plan:
            return
        is_gathered = one.transfers is not None and one.transfers.is_gathered
        if one.transfers is not None and is_gathered:
            one.transfers.await_weights()
        self._shared = self._make_pass(plan, counts_DE, is_shared=True)
        if is_gathered and not plan.rematerialize and self._shared.transfers is not None:
            self._shared.transfers.complete(
                additional_transfer(one.plan.placement, plan.placement, self.context.topology)
            )

    def _host_counts(self, routing_map: torch.Tensor) -> np.ndarray:
        """Counts of this micro-batch on all devices, int64 ``[D, E]``; the host waits for them."""
        counts = start_counts(
            routing_map.sum(0), self.groups.expert_parallel, self.groups.expert_tensor_parallel
        )
        counts_DE: np.ndarray = counts.wait().numpy().sum(axis=0)
        return counts_DE

    # Weights.

    def _await_parameters(self) -> None:
        """Wait for the Parameters of the last optimizer step.

        Ranks with copies of the same experts gather them together, and their plans differ. So this place must
        not depend on a plan.
        """
        if self.groups.transfers is not None:
            self.experts.await_parameters()

    @property
    def _splits(self) -> bool:
        """Whether the transfers of this layer travel in parts; equal on all ranks."""
        shared = self._shared
        return shared is not None and shared.transfers is not None and shared.transfers.splits

    def _gather_first_part(self) -> None:
        self._await_parameters()
        if self._splits:
            assert self._shared is not None
            assert self._shared.transfers is not None
            self._shared.transfers.gather_first_part()
