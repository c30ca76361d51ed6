"""One MoE layer under a strategy: experts in slots, and the replicas' transfers beside Megatron's own passes.

Megatron's router, dispatcher and experts compute; this class only says to which slots the tokens go, brings
weights into the replica slots, and sends the replicas' gradients home. A caller (Megatron's layer, a
benchmark) calls its methods at these places of a forward pass; the second row shows what the backward pass
does there::

    launch ─ attention, gate ─ prepare, remap ─ enter_dispatch ─ dispatch ─ await_weights ─ experts ─
    leave_experts ─ combine ─ finish spAG starts
    spAG ends
                                                spRS starts                                 (spAG ends)
                                                spRS of the next layer ends

Step by step, for a plan whose replicas live for an iteration: ``finish`` of a layer plans and launches the
next one, so that neither CUDA graphs of attention nor a missing hook can lose a gather. SparseReduceScatter
starts after the last micro-batch's backward pass of the layer, and ends where the layer before begins its
own. Steps in parentheses take place only under re-materialization (Hecate §4.2).

Shape letters: T tokens, D devices, E experts, R rows that a rank receives, M model dimension, N nodes.
"""

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from megatron_fssdp.collectives.gathered_counts import start_counts
from megatron_fssdp.collectives.sparse.sparse_transfer import SparseTransfer, StartedTransfer
from megatron_fssdp.collectives.sparse.transfer_cargo import accumulation_dtype
from megatron_fssdp.collectives.stream_lane import advance_transfers
from megatron_fssdp.planning.loads.load_history import LoadHistory
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.slots.slot_table import SlotTable
from megatron_fssdp.planning.transfer.message_size import message_rule
from megatron_fssdp.planning.transfer.transfer_plan import TransferPlan, additional_transfer
from megatron_fssdp.runtime.clocks.layer_stopwatch import LayerStopwatch
from megatron_fssdp.runtime.clocks.pass_timer import LayerTimer, PassTimer
from megatron_fssdp.runtime.experts.expert_layout import ExpertLayout, ParametersByExpert
from megatron_fssdp.runtime.layers.expert_groups import ExpertGroups
from megatron_fssdp.runtime.layers.iteration_clock import IterationClock
from megatron_fssdp.runtime.layers.layer_load import LayerLoad
from megatron_fssdp.runtime.layers.layer_planner import LayerPlanner
from megatron_fssdp.runtime.layers.local_experts import LocalExperts
from megatron_fssdp.runtime.layers.slot_pass import SlotPass, is_plain, source_table
from megatron_fssdp.runtime.slots.autograd_points import call_in_backward, in_backward
from megatron_fssdp.runtime.slots.remap import count_slots, remap_by_table
from megatron_fssdp.runtime.slots.replica_slots import ReplicaSlots
from megatron_fssdp.runtime.slots.replica_transfers import ReplicaTransfers
from megatron_fssdp.runtime.slots.resident_gradients import ResidentGradients
from megatron_fssdp.runtime.slots.token_spread import token_spread
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.strategy import Strategy


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

    Attributes:
        load: Loads, bytes and times of the running iteration.
        stopwatch: Stopwatch of the layer; ``None`` while the layer is not measured.
        following: The next MoE layer on this rank.
        is_first: Whether the model chunk of this layer has no MoE layer before it.
        on_pass: Function that is called with the pass in use whenever another one comes into use. The caller
            binds its dispatcher and its experts to the slots.
        on_home: Function that is called when all gradients of an iteration have reached the owners.
        num_counting: Number of ranks that count each token, where tensor-parallel ranks all route the same
            ones.
        delays_weight_gradients: Whether the experts' weight gradients are computed by ``backward_dw``, apart
            from their backward pass. The caller then calls :meth:`weight_gradients_computed`.
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
    ) -> None:
        self.context, self.groups, self.experts, self.strategy = context, groups, experts, strategy
        self.clock = clock or IterationClock()
        self.measure, self.measures_spread = measure, measures_spread
        self.timer = timer or LayerTimer(PassTimer())
        self.stopwatch: LayerStopwatch | None = None
        self.following: SlotLayer | None = None
        self.before: SlotLayer | None = None
        self.is_first = True
        self.on_pass: Callable[[SlotPass], object] = lambda one: None
        self.on_home: Callable[[], object] = lambda: None
        self.delays_weight_gradients = False
        self.num_counting = 1
        shape = (context.num_devices, context.num_experts)
        history = LoadHistory(strategy.window, *shape)
        self.planner = LayerPlanner(strategy, groups, self.clock, history, check_plans)
        self.load = self._empty_load()
        self._plain_owner_E = context.owner_E
        self._num_replica_slots = least_slots
        self._slots: ReplicaSlots | None = None
        self._spare_slots: list[ReplicaSlots] = []
        self._table: torch.Tensor | None = None
        self._counted: torch.Tensor | None = None
        self._spread: torch.Tensor | None = None
        self._journal: list[StartedTransfer] = []
        self._shared: SlotPass | None = None
        self._current: SlotPass | None = None
        self._own_passes: deque[SlotPass] = deque()
        self._forget()
        strategy.check(context)
        experts.check_owned(context.owner_E, groups.device)

    # Owners, resident replicas, numbers: only between iterations.

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
        self.experts = experts

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
        self.experts = experts

    def renumber(self, layer: int) -> None:
        """Set the layer number, which the model assigns after it has built its layers."""
        self.context = replace(self.context, layer=layer)
        self.experts = replace(self.experts, what=f"layer {layer}")
        self.load.layer = layer

    @property
    def history(self) -> LoadHistory:
        """Loads of the last iterations."""
        return self.planner.history

    @property
    def plan(self) -> LayerPlan | None:
        """Plan of the running iteration, as far as it is made."""
        return None if self._shared is None else self._shared.plan

    # The forward pass.

    def plan_iteration(self) -> LayerPlan:
        """Make the plan of the running iteration from the loads of earlier iterations, if it does not exist.

        It does not change until the iteration ends, except for one correction with the first micro-batch by
        strategies that ask for it. Every micro-batch and a recomputed forward pass use the same slots.
        """
        if self._shared is None:
            plan = self.planner.next_plan(self.context)
            if self._slots is None and plan.transfer.edges:
                self._slots = self._make_slots()
            self._shared = self._make_pass(plan, self._slots, self._forecast(plan))
            self._use(self._shared)
        return self._shared.plan

    def launch(self, hidden: torch.Tensor | None = None) -> None:
        """Plan the iteration, and start SparseAllGather before the compute that comes before the layer.

        Args:
            hidden: A tensor of the pass, for the stopwatch; ``None`` outside of a pass.
        """
        if self.context.num_devices == 1 or not self.clock.driven:
            return
        plan = self.plan_iteration()
        assert self._shared is not None
        self._await_parameters()
        transfers = self._shared.transfers
        if transfers is not None and plan.gather_ahead:
            if not plan.rematerialize:
                transfers.gather()
            elif not self._is_launched:
                transfers.hold()
                self._is_launched = True
        if self.stopwatch is not None and hidden is not None:
            # The span begins when the transfer is posted: what the host did until here hides nothing.
            self.stopwatch.layer_begins(hidden.device)

    def prepare(self, routing_map: torch.Tensor | None, *, training: bool) -> None:
        """Provide the pass that the coming forward pass uses, before its routing is remapped.

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
        if self.context.num_devices == 1 or self.clock.driven:
            plan = self.plan_iteration()
            if routing_map is None or self.context.num_devices == 1:
                self._use(self._shared)
                return
            if not plan.each_micro_batch:
                self._correct(routing_map)
                self._use(self._shared)
                return
        else:
            plan = self.planner.next_plan(self.context)
        assert routing_map is not None
        self._await_parameters()
        counts_DE = self._host_counts(routing_map)
        plan = self.planner.after_gate(self.context, counts_DE, plan, 1)
        slots = None
        if plan.transfer.edges and not plan.resident:
            slots = self._spare_slots.pop() if self._spare_slots else self._make_slots()
        own = self._make_pass(plan, slots, counts_DE)
        own.is_shared = False
        if own.transfers is not None:
            self._own_passes.append(own)
        if self._is_counted:
            self._count_on_host(counts_DE, own)
            if not self.clock.driven:
                self.history.append(counts_DE)
                self.load = self._empty_load()
        self._use(own)

    def prepare_capture(self, *, training: bool) -> None:
        """Provide the pass that a CUDA graph captures: its tensors keep their addresses.

        Args:
            training: Whether the model trains.
        """
        self.plan_iteration()
        self._use(self._shared)
        self._is_counted = training and not in_backward()
        self._open_counts(self._in_use)

    def _open_counts(self, one: SlotPass) -> torch.Tensor:
        if self._counted is None or len(self._counted) != one.slots.num_slots:
            device = self.experts.device
            self._counted = torch.zeros(one.slots.num_slots, dtype=torch.int64, device=device)
        return self._counted

    def remap(self, routing_map: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Turn the routing of experts into the routing of slots, on the device.

        Args:
            routing_map: Experts that each token of this rank selected, bool ``[T, E]``.
            probs: Routing probabilities, ``[T, E]``.

        Returns:
            Routing map of the slots, bool ``[T, D P]``, and their probabilities.
        """
        one = self._in_use
        if self.measures_spread and self._is_counted:
            spread = token_spread(routing_map, self._plain_owner_E, self.context.topology)
            self._spread = spread if self._spread is None else self._spread + spread
        if one.table_RE is not None:
            routing_map, probs = remap_by_table(routing_map, probs, one.table_RE, one.slots.num_slots)
        if self._is_counted and one.is_shared:
            counted = self._open_counts(one)
            counted += count_slots(routing_map)
        return routing_map, probs

    def enter_dispatch(self, hidden: torch.Tensor) -> torch.Tensor:
        """Thread a tensor through the point at which, in the backward pass, the experts' gradients are
        complete.

        Args:
            hidden: Rows before they are dispatched, any shape.
        """
        one = self._in_use
        if not (_has_gradients(one) or one.plan.in_steps):
            return hidden
        one.has_backward = torch.is_grad_enabled()
        return call_in_backward(partial(self._dispatch_is_over, one), hidden)

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
        if following is not None and self.clock.driven and not in_backward() and self.strategy.splits:
            following._start_first_part()
        if one.transfers is not None:
            if one.holds_each_pass and not self._is_launched:
                one.transfers.hold()
            self._is_launched = False
            one.transfers.await_weights()
        self.timer.passes(rows, "experts", "dispatch")
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
        one, here = self._in_use, self.groups.device
        transfers = one.transfers
        if transfers is None:
            with self.await_weights(rows):
                return self.leave_experts(run(rows, probs, experts))
        if one.holds_each_pass and not self._is_launched:
            transfers.hold()
        self._is_launched = False
        transfers.gather()
        owned = self.experts.parameters
        slots = one.slots.expert_DP[here].tolist()
        arriving = [i for i, expert in enumerate(slots) if expert >= 0 and expert not in owned]
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
        one, following = self._in_use, self.following
        self.timer.passes(rows, "combine", "experts")
        self.advance_transfers(rows)
        splits = following is not None and following._splits
        if _has_gradients(one) or splits or one.plan.in_steps:
            rows = call_in_backward(partial(self._experts_begin_backward, one), rows)
        if one.transfers is not None:
            if one.holds_each_pass:
                one.transfers.let_go()
            elif not one.is_shared and not one.has_backward:
                self._end_own(one)
        return rows

    def finish(self, output: torch.Tensor) -> torch.Tensor:
        """End the forward pass: launch the next layer, and thread the output through the layer's first
        backward point.

        Args:
            output: Output of the layer, any shape.
        """
        one, following = self._in_use, self.following
        if one.holds_each_pass or (following is not None and following.groups.transfers is not None):
            output = call_in_backward(partial(self._begin_backward, one), output)
        self.timer.passes(output, None, "combine")
        if following is not None and not following.is_first and not in_backward():
            following.launch(output)
        return output

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
        if one.holds_each_pass and not self._is_held_for_backward:
            assert one.transfers is not None
            one.transfers.hold()
            self._is_held_for_backward = True

    def _experts_begin_backward(self, one: SlotPass) -> None:
        if self.following is not None and self.following._splits:
            shared = self.following._shared
            if shared is not None and shared.transfers is not None:
                shared.transfers.reduce_rest()
        # In steps, the gradients of an owned expert arrive in several parts.
        if one.transfers is not None or one.plan.resident or one.plan.in_steps:
            self._is_home = False
        if one.transfers is None:
            return
        if one.holds_each_pass:
            if not self._is_held_for_backward:
                one.transfers.hold()
            self._is_held_for_backward = False
        one.transfers.await_weights()
        one.transfers.open_sums()

    def _dispatch_is_over(self, one: SlotPass) -> None:
        """Go on if the weight gradients of this pass are computed, too."""
        self._passes_over.append(one)
        if not self.delays_weight_gradients:
            self.weight_gradients_computed()
        else:
            self._go_on()

    def weight_gradients_computed(self) -> None:
        """Mark that the weight gradients of one more backward pass are computed."""
        self._num_computed += 1
        self._go_on()

    def _go_on(self) -> None:
        while self._num_computed and self._passes_over:
            self._num_computed -= 1
            self._gradients_are_complete(self._passes_over.popleft())

    def _gradients_are_complete(self, one: SlotPass) -> None:
        """Send the gradients of one backward pass home, or those of the whole iteration after its last one."""
        dtype = self.experts.layout().dtype
        if one.transfers is None:
            self._num_backward += 1
            if one.plan.resident and self._num_backward == self.clock.num_micro_batches:
                self._sum_residents().reduce()
        elif one.is_shared and not one.plan.rematerialize:
            self._num_backward += 1
            if self._num_backward == self.clock.num_micro_batches:
                self._reduce_iteration(one.transfers)
        else:
            if one.holds_each_pass:
                one.transfers.let_go()
            # One micro-batch's gradients travel in the data type of the weights, which is what a backward
            # pass computes.
            one.transfers.reduce(dtype)
            self._num_backward += 1
            one.is_over = True
            if not self.clock.driven:
                self.settle()
        if self.before is not None and not self.is_first:
            self.before._hold_for_backward()

    def _hold_for_backward(self) -> None:
        one = self._shared
        if (
            one is not None
            and one.holds_each_pass
            and one.plan.gather_ahead
            and not self._is_held_for_backward
        ):
            assert one.transfers is not None
            one.transfers.hold()
            self._is_held_for_backward = True

    def _reduce_iteration(self, transfers: ReplicaTransfers) -> None:
        if self._is_reduced:
            return
        self._is_reduced = True
        dtype = self.experts.layout().dtype
        summed = transfers.plan.life.sums_gradients(self.clock.num_micro_batches)
        transfers.reduce(accumulation_dtype(dtype) if summed else dtype)

    def settle(self) -> None:
        """Wait for the gradients on their way home, at a moment when other compute has hidden them.

        For resident replicas, this does one step of their all-reduce.
        """
        for own in [own for own in self._own_passes if own.is_over]:
            self._end_own(own)
        if self._residents is not None:
            with self.timer.waiting():
                self._residents.advance()
            self._set_home(self._residents.is_finished)
            return
        shared = self._shared
        if shared is not None and shared.transfers is not None:
            shared.transfers.settle()
        is_last = self._num_backward >= self.clock.num_micro_batches > 0
        self._set_home(is_last)

    def finish_gradients(self) -> None:
        """Bring all remaining gradients to the owners and wait; every rank of the group must call it."""
        if self._is_home:
            return
        if self._shared is not None and self._shared.plan.resident:
            with self.timer.waiting():
                self._sum_residents().finish()
        elif self._shared is not None and self._shared.transfers is not None:
            if not self._shared.plan.rematerialize:
                self._reduce_iteration(self._shared.transfers)
            self._shared.transfers.settle()
        for own in list(self._own_passes):
            self._end_own(own)
        self._set_home(True)

    @property
    def is_home(self) -> bool:
        """Whether no gradient of a replica is missing at its owner."""
        return self._is_home

    def _set_home(self, is_home: bool) -> None:
        if is_home and not self._is_home:
            self._is_home = True
            self.on_home()

    # Iterations.

    def counted(self) -> torch.Tensor | None:
        """This rank's numbers of the iteration that other ranks need: tokens by slot, then their spread;
        int64.

        ``None`` if the layer was not used, or if its counts are on the host already. Equal in length on all
        ranks.
        """
        on_device = self._shared is not None and not self._shared.plan.each_micro_batch
        numbers = [one for one in (self._counted if on_device else None, self._spread) if one is not None]
        return torch.cat(numbers) if numbers else None

    def take_counts(self, numbers_RN: np.ndarray) -> None:
        """Add the numbers of all ranks, which :meth:`counted` returned there.

        Args:
            numbers_RN: Numbers by rank, int64; part x of device d is row d X + x.
        """
        num_devices, topology = self.context.num_devices, self.context.topology
        numbers_DN = numbers_RN.reshape(num_devices, -1, numbers_RN.shape[1]).sum(axis=1) // self.num_counting
        num_spread = topology.num_nodes + num_devices if self._spread is not None else 0
        counts_DS = numbers_DN[:, : numbers_DN.shape[1] - num_spread]
        spread = numbers_DN[:, counts_DS.shape[1] :].sum(axis=0) if num_spread else None
        counts_DE = np.zeros((num_devices, self.context.num_experts), np.int64)
        shared = self._shared
        if counts_DS.shape[1]:
            assert shared is not None
            expert_S = shared.slots.expert_DP.reshape(-1)
            used_S = expert_S >= 0
            np.add.at(counts_DE.T, expert_S[used_S], counts_DS[:, used_S].T)
        self.load.counts_DE += counts_DE
        if self.measure and shared is not None:
            self._measure(counts_DE, counts_DS, spread)

    def end_iteration(self) -> LayerLoad:
        """Close the iteration: add its counts to the history, and drop its plan and its replicas.

        Returns:
            Loads, bytes and times of the iteration.

        Raises:
            RuntimeError: Some gradients have not reached the owners, so the optimizer would miss them.
        """
        if not self._is_home:
            raise RuntimeError(
                f"{self.experts.what}: the iteration ended before all replicas' gradients reached their "
                f"owners; "
                "call MoERuntime.finish_gradients() before reading gradients"
            )
        load = self._take_load()
        self._drop()
        if load.counts_DE.any():
            self.history.append(load.counts_DE)
        return load

    def reset(self) -> None:
        """Begin the passes of the running iteration anew: its gradients and counts are dropped, its plan stays."""
        plan = self._shared
        if plan is not None and plan.transfers is not None:
            plan.transfers.drop()
        for own in list(self._own_passes):
            self._end_own(own, drop=True)
        self._take_load()
        self._forget()
        if plan is not None:
            self._use(plan)

    def _drop(self) -> None:
        """Drop the plan and the replicas, after a wait for the transfers that use their memory."""
        if self._shared is not None and self._shared.transfers is not None:
            self._shared.transfers.drop()
        for own in list(self._own_passes):
            self._end_own(own, drop=True)
        self._shared = None
        self._current = None
        self._forget()

    def _forget(self) -> None:
        self._is_launched: bool = False
        self._is_held_for_backward: bool = False
        self._is_reduced: bool = False
        self._is_counted: bool = False
        self._is_home = True
        self._is_final = False
        self._num_backward = 0
        self._num_computed = 0
        self._passes_over: deque[SlotPass] = deque()
        self._residents: ResidentGradients | None = None
        if self._counted is not None:
            self._counted.zero_()
        self._spread = None

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

    # Passes.

    @property
    def _in_use(self) -> SlotPass:
        """The pass of the running forward pass.

        Raises:
            RuntimeError: :meth:`prepare` has not been called.
        """
        if self._current is None:
            raise RuntimeError(
                f"{self.experts.what}: got a step of a forward pass without a plan, wanted a plan first; call "
                f""
                f""
                f""
                f""
                f""
                f""
                f""
                f""
                f""
                f""
                f""
                f""
                f""
                f""
                f""
                f""
                f""
                f""
                f""
                f""
                f""
                "SlotLayer.prepare() before the routing is remapped"
            )
        return self._current

    @property
    def _splits(self) -> bool:
        """Whether the transfers of this layer travel in parts; equal on all ranks."""
        return (
            self._shared is not None
            and self._shared.transfers is not None
            and self._shared.plan.is_split
            and not self.is_first
        )

    def _await_parameters(self) -> None:
        """Wait for the Parameters of the last optimizer step.

        Ranks with copies of the same experts gather them together, and their plans differ. So this place must
        not depend on a plan.
        """
        if self.groups.transfers is not None:
            self.experts.await_parameters()

    def _start_first_part(self) -> None:
        self._await_parameters()
        if self._splits:
            assert self._shared is not None
            assert self._shared.transfers is not None
            self._shared.transfers.gather_first_part()

    def _use(self, one: SlotPass | None) -> None:
        if one is not self._current and one is not None:
            self._current = one
            self.on_pass(one)

    def _make_slots(self) -> ReplicaSlots:
        layout = self.experts.layout()
        return ReplicaSlots(layout, self.experts.device, self.experts.trained)

    def _make_pass(
        self, plan: LayerPlan, replica_slots: ReplicaSlots | None, counts_DE: np.ndarray | None
    ) -> SlotPass:
        placement, here = plan.placement, self.groups.device
        self._make_room(int(placement.replicas_per_device_D.max()))
        slots = SlotTable.of(placement, self._num_replica_slots)
        expert_P = slots.expert_DP[here].tolist()
        owned, residents = self.experts.parameters, self.experts.residents
        transfers = None
        if plan.transfer.edges and not plan.resident:
            assert replica_slots is not None
            replica_slots.hold([expert for expert in expert_P if expert >= 0 and expert not in owned])
            transfers = ReplicaTransfers(
                plan,
                replica_slots,
                self.experts,
                self._bind,
                splits=plan.is_split and not self.is_first,
                waiting=self.timer.waiting,
            )
        parameters_P = [
            None
            if expert < 0
            else owned.get(expert) or residents.get(expert) or replica_slots.parameters(expert)  # type: ignore[union-attr]
            for expert in expert_P
        ]
        table = None
        if not is_plain(slots):
            table_RE = source_table(plan, slots, self.context.topology, here, counts_DE)
            table = self._on_device(table_RE, is_shared=replica_slots is self._slots)
        return SlotPass(plan, slots, parameters_P, table, transfers)

    def _make_room(self, num_replicas: int) -> None:
        """Add replica slots if a plan needs more: twice as many each time, so that this happens rarely."""
        if num_replicas > self._num_replica_slots:
            twice = 1 << (num_replicas - 1).bit_length()
            self._num_replica_slots = min(twice, max(num_replicas, self.strategy.slots(self.context)))

    def _on_device(self, table_RE: np.ndarray, *, is_shared: bool) -> torch.Tensor:
        """A share table on the device. Shared passes always have the same tensor, for CUDA graphs."""
        host, device = torch.from_numpy(table_RE), self.experts.device
        if device.type == "cuda":
            host = host.pin_memory()
        if not is_shared:
            return host.to(device, non_blocking=True)
        if self._table is None:
            self._table = torch.empty_like(host, device=device)
        return self._table.copy_(host, non_blocking=True)

    def _forecast(self, plan: LayerPlan) -> np.ndarray | None:
        if plan.dispatch_policy in ("even", "owner") and plan.tokens_ED is None:
            return None
        return None if self.history.is_empty else np.rint(self.history.forecast_DE()).astype(np.int64)

    def _correct(self, routing_map: torch.Tensor) -> None:
        """Let the strategy change the replicas with the first micro-batch's exact counts (Hecate §4.2)."""
        if self._is_final or not self.strategy.asks_after_gate(self.context.layer):
            return
        self._is_final = True
        one = self._shared
        assert one is not None
        counts_DE = self._host_counts(routing_map)
        num_micro_batches = max(self.clock.num_micro_batches, 1)
        plan = self.planner.after_gate(self.context, counts_DE, one.plan, num_micro_batches)
        if plan is one.plan:
            return
        before, is_gathered = one.plan, False
        if one.transfers is not None and (is_gathered := one.transfers.is_gathered):
            one.transfers.await_weights()
        self._is_launched = False
        if self._slots is None:
            self._slots = self._make_slots()
        self._shared = self._make_pass(plan, self._slots, counts_DE)
        if is_gathered and not plan.rematerialize and self._shared.transfers is not None:
            addition = additional_transfer(before.placement, plan.placement, self.context.topology)
            self._shared.transfers.complete(addition)

    def _host_counts(self, routing_map: torch.Tensor) -> np.ndarray:
        """Counts of this micro-batch on all devices, int64 ``[D, E]``; the host waits for them."""
        counts = start_counts(
            routing_map.sum(0), self.groups.expert_parallel, self.groups.expert_tensor_parallel
        )
        counts_XDE = counts.wait()[0].numpy()
        counts_DE: np.ndarray = counts_XDE.sum(axis=0)
        return counts_DE

    def _end_own(self, own: SlotPass, *, drop: bool = False) -> None:
        """Give back the slots of a micro-batch's pass, after its gradients are home."""
        if own in self._own_passes:
            self._own_passes.remove(own)
        if own.transfers is None:
            return
        if not drop:
            own.transfers.settle()
        own.transfers.drop()
        self._spare_slots.append(own.transfers.slots)

    def _sum_residents(self) -> ResidentGradients:
        if self._residents is None:
            layout = self.experts.layout()
            assert self._shared is not None
            transfer = self._bind(self._shared.plan.transfer, layout.numel, accumulation_dtype(layout.dtype))
            self._residents = ResidentGradients(transfer, layout, self.experts.all_parameters)
        return self._residents

    def _bind(
        self, plan: TransferPlan, num_elements: int, dtype: torch.dtype | None = None
    ) -> SparseTransfer:
        device = self.experts.device
        return SparseTransfer(
            self.groups.transfers or self.groups.expert_parallel,
            plan,
            num_elements=num_elements,
            dtype=dtype or self.experts.layout().dtype,
            device=device,
            messages=message_rule(on_cuda=device.type == "cuda"),
            one_queue=self.groups.one_queue,
            # On CUDA, the host must wait for a transfer's times, so they are read only for reports.
            journal=self._journal if self.measure else None,
            what=self.experts.what,
        )

    # Loads.

    def _empty_load(self) -> LayerLoad:
        context = self.context
        return LayerLoad.empty(
            context.layer, context.topology.num_nodes, context.num_devices, context.num_experts
        )

    def _count_on_host(self, counts_DE: np.ndarray, own: SlotPass) -> None:
        self.load.counts_DE += counts_DE
        if not self.measure:
            return
        (dispatch,) = own.plan.dispatch([counts_DE], self.context.topology)
        self.load.num_replicas = own.plan.placement.num_replicas
        self.load.placements = (own.plan.placement,)
        self.load.add_tokens(dispatch.device_tokens_D(), dispatch.cross_node_tokens())
        self.load.add_plain(counts_DE, self._plain_owner_E, None)

    def _measure(self, counts_DE: np.ndarray, counts_DS: np.ndarray, spread: np.ndarray | None) -> None:
        shared, context = self._shared, self.context
        assert shared is not None
        placement = shared.plan.placement
        if counts_DS.shape[1]:
            self.load.num_replicas = placement.num_replicas
            self.load.placements = (placement,)
            counts_DD = counts_DS.reshape(context.num_devices, context.num_devices, -1).sum(axis=2)
            node_D = np.asarray(context.topology.node_of_device)
            crosses_DD = node_D[:, None] != node_D
            self.load.add_tokens(counts_DD.sum(axis=0), int(counts_DD[crosses_DD].sum()))
        self.load.add_plain(counts_DE, self._plain_owner_E, spread)


def _has_gradients(one: SlotPass) -> bool:
    """Whether replicas have gradients that belong to their owners."""
    return one.transfers is not None or one.plan.resident
