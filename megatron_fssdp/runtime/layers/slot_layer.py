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
    rows_travel      after the rows have left  prepares the next layer
    await_weights    before the experts        spAG ends
    leave_experts    after the experts                                        next spRS ends, (spAG ends)
    finish           end of the layer          next layer's spAG starts       (spAG starts)

``finish`` of a layer launches the next one, also where a CUDA graph contains attention. If replicas live for
an iteration, SparseAllGather runs once before the first micro-batch, and SparseReduceScatter once after the
last. Steps in parentheses take place only under re-materialization (Hecate §4.2).

Shape letters: T tokens, E experts, R rows that a rank receives, M model dimension, A rows that a rank sends,
W slots of all devices.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from megatron_fssdp.collectives.gathered_counts import gather_counts
from megatron_fssdp.collectives.trace_names import traced
from megatron_fssdp.collectives.transfer_lanes import advance_transfers
from megatron_fssdp.runtime.clocks.layer_stopwatch import LayerStopwatch
from megatron_fssdp.runtime.clocks.pass_timer import Part
from megatron_fssdp.runtime.layers.home_gradients import HomeGradients
from megatron_fssdp.runtime.layers.layer_load import LayerLoad
from megatron_fssdp.runtime.layers.planned_layer import PlannedLayer
from megatron_fssdp.runtime.layers.slot_counts import SlotCounts
from megatron_fssdp.runtime.layers.slot_pass import SlotPass
from megatron_fssdp.runtime.slots.autograd_points import call_in_backward, in_backward
from megatron_fssdp.strategies.auto.auto_strategy import AutoStrategy
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan


class SlotLayer(PlannedLayer):
    """One MoE layer on this rank. All ranks of the layer's groups call its methods in the same order.

    The arguments are those of :class:`PlannedLayer`, and whether the ranks count on how many nodes and
    devices the experts of a token are (``measures_spread``, equal on all ranks).
    """

    def __init__(self, *planned: Any, measures_spread: bool = False, **options: Any) -> None:
        super().__init__(*planned, **options)
        context = self.context
        # The next and the previous MoE layer on this rank.
        self.following: SlotLayer | None = None
        self.before: SlotLayer | None = None
        # Of the running iteration, on the host and on the device.
        self.load = LayerLoad.empty(context)
        self.counts = SlotCounts(context.topology, context.owner_E, measures_spread)
        self.stopwatch: LayerStopwatch | None = None
        # Called when a pass comes into use: the caller binds its dispatcher and its experts to the slots.
        self.on_pass: Callable[[SlotPass], object] = lambda one: None
        self.gradients = HomeGradients(self)
        self.gradients.on_complete = self._prefetch_before
        self._outside: tuple[LayerContext, SlotPass] | None = None  # of passes outside of iterations
        self._in_use: Any = None  # The SlotPass of the running forward pass, which prepare() provides.
        self._is_counted = self._is_final = False
        self._is_alone = context.num_devices == 1
        self._warm = set[bool]()  # forms of a captured pass, counted or not, whose kernels are loaded

    def renumber(self, layer: int) -> None:
        """Set the layer number, which the model assigns after it has built its layers."""
        self.context = replace(self.context, layer=layer)
        self.experts = replace(self.experts, what=f"layer {layer}")
        self.load.layer = layer

    def mark(self, tensor: torch.Tensor, forward: Part | None, backward: Part | None) -> None:
        """Mark a border between two parts of the layer, if they are measured (:meth:`PassTimer.border`)."""
        if self.timer.is_running and self.clock.trains:
            self.timer.border((self.load.forward, self.load.backward), tensor, forward, backward)

    # The pass in use.

    def plan_iteration(self) -> LayerPlan:
        """Make the plan of the running iteration from the loads of earlier iterations, if it does not exist.

        It does not change until the iteration ends, except for one correction with the first micro-batch by
        strategies that ask for it. Every micro-batch and a recomputed forward pass use the same slots.
        """
        if self.shared is None:
            self.shared = self._make(self._next_plan())
            self._use(self.shared)
        return self.shared.plan

    def _pass_for(self, routing_map: torch.Tensor | None) -> SlotPass:
        """The pass of the iteration, or a new one for the micro-batch with this routing map."""
        if not (self._is_alone or self.clock.driven):
            if routing_map is None:
                raise RuntimeError(
                    f"{self.experts.what}: got a pass outside of iterations whose routing a CUDA graph made, "
                    "wanted one by Megatron's schedule; run it by get_forward_backward_func()"
                )
            if self._outside is None or self._outside[0] is not self.context:
                self._outside = self.context, self._make(self.context.owners_only, is_outside=True)
            return self._outside[1]
        plan = self.plan_iteration()
        if not plan.each_micro_batch or routing_map is None or self._is_alone:
            # An evaluation does not change the plan of the iteration.
            corrects = plan.corrects and self.clock.trains and not self._is_final
            if routing_map is not None and corrects:
                self._is_final = True
                self._correct(routing_map)
            assert self.shared is not None
            return self.shared
        self._await_parameters()
        counts_DE = self._host_counts(routing_map)
        # Without reentrance, a recomputed pass fills the graph of the first one, so it must have its slots.
        own = self.gradients.own_of(counts_DE) if in_backward() else None
        if own is None:
            own = self._make(self._plan_after_gate(counts_DE, plan, 1), counts_DE, is_shared=False)
            self.gradients.own.append(own)
        own.is_recomputed = in_backward()
        if self._is_counted:
            self.counts.count_on_host(counts_DE, own, self.load, self.measure)
        return own

    def _use(self, one: SlotPass | None) -> None:
        is_outside = self._outside is not None and one is self._outside[1]
        if one is not None and (one is not self._in_use or is_outside):
            self._in_use = one
            self.on_pass(one)

    # The forward pass.

    def launch(self, hidden: torch.Tensor | None = None) -> None:
        """Plan the iteration, and start SparseAllGather before the compute that comes before the layer.

        ``hidden`` is a tensor of the pass, for the stopwatch; ``None`` outside of a pass.
        """
        if self._is_alone or not self.clock.driven:
            return
        plan = self.plan_iteration()
        self._await_parameters()
        if self._transfers is not None and plan.gather_ahead:
            self._transfers.prefetch(backward=False)
        if self.stopwatch is not None and hidden is not None:
            # The span begins when the transfer is posted: what the host did until here hides nothing.
            self.stopwatch.layer_begins(hidden.device)

    def prepare(self, routing_map: torch.Tensor | None, *, training: bool) -> None:
        """Provide the slots of the coming forward pass, before its routing is remapped.

        Transfers that may not run beside the dispatch end here. Only strategies that plan each micro-batch
        need the counts of the routing map, bool ``[T, E]``; then the host waits for them once. The map is
        ``None`` if a CUDA graph made it. Evaluations are not counted.
        """
        self._is_counted = training and self.clock.trains and not in_backward()
        if self.stopwatch is not None:
            self.stopwatch.tokens_ready()
        self.advance_transfers()
        one = self._pass_for(routing_map)
        self._use(one)
        if routing_map is None and self._is_counted:
            self.counts.open(one, self.experts.device, in_graph=True)
        if one.transfers is not None and not one.plan.gather_ahead:
            one.transfers.await_weights()

    def prepare_capture(self, *, training: bool) -> None:
        """Provide the slots for a CUDA graph that is captured: its tensors keep their addresses.

        Raises:
            RuntimeError: No pass before the capture has compiled and loaded the kernels that it launches.
        """
        if self.together is not None and self.lacks_plan:
            # No message can be captured. Any plan has the same tensors.
            self._ready = self.context.owners_only
        self.plan_iteration()
        self._use(self.shared)
        self._is_counted = training and not in_backward()  # Graphs of evaluations are other ones.
        if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            self._warm.add(self._is_counted)
        elif self._is_counted not in self._warm:
            raise RuntimeError(
                f"{self.experts.what}: got the capture of a CUDA graph without a pass before it, in which "
                "kernels are loaded; give make_graphed_callables() at least one warm-up iteration"
            )
        if self._is_counted:
            self.counts.open(self._in_use, self.experts.device, in_graph=True)

    @traced("remap")
    def remap(self, routing_map: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Turn routing map and probabilities of experts, ``[T, E]``, into those of slots, ``[T, W]``."""
        one, counts_W = self._in_use, None
        if self._is_counted:
            counts_W = self.counts.open(one, routing_map.device)
            self.counts.add_spread(routing_map)
        if one.shares is not None:
            gather = partial(gather_counts, group=self.groups.expert_parallel)
            slot_map, slot_probs = one.shares.remap(routing_map, probs, gather, counts_W)
            return slot_map, slot_probs
        if counts_W is not None:
            counts_W.add_(routing_map.sum(0))
        return routing_map, probs

    def enter_dispatch(self, hidden: torch.Tensor) -> torch.Tensor:
        """Mark where the backward pass has the experts' gradients; the pass goes on with the result."""
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
        """Wait for the replicas' weights, immediately before the experts compute the rows ``[R, M]``.

        The result is a context manager for their forward pass. It measures if the layer has a stopwatch.
        """
        one, following = self._in_use, self.following
        if following is not None and self.strategy.splits and self.clock.driven and not in_backward():
            following._await_parameters()
            if following._transfers is not None:
                following._transfers.gather_first_part()
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

        Rows ``[A, M]`` and their probabilities ``[A]`` are in the order of sending, as the results are.
        ``run`` is the dispatcher's method that runs the steps with the forward pass of the slots' experts.
        """
        one, transfers = self._in_use, self._in_use.transfers
        if transfers is None:
            with self.await_weights(rows):
                return self.leave_experts(run(rows, probs, experts))
        transfers.begin_use(backward=False)
        expert_U, owned = one.slots.expert_DU[self.groups.device].tolist(), self.experts.parameters
        replicas = [u for u, expert in enumerate(expert_U) if expert >= 0 and expert not in owned]
        results = run(rows, probs, experts, await_weights=transfers.await_weights, in_transfer=replicas)
        return self.leave_experts(results)

    def leave_experts(self, rows: torch.Tensor) -> torch.Tensor:
        """Mark where the experts' backward pass begins, at their results; the pass goes on with them."""
        one, following = self._in_use, self.following
        is_late = self._has_late_gradients(one)
        settles = following is not None and following.groups.transfers is not None
        if is_late or settles:
            rows = call_in_backward(partial(self._experts_begin_backward, one, is_late, settles), rows)
        self.mark(rows, "combine", "experts")
        self.advance_transfers(rows)
        if one.transfers is not None:
            one.transfers.end_use()
        if not one.is_shared and not one.has_backward:
            self.gradients.end_own(one)
        return rows

    def finish(self, output: torch.Tensor) -> torch.Tensor:
        """End the forward pass, and launch the next layer; the pass goes on with the result."""
        one, following = self._in_use, self.following
        self.mark(output, None, "combine")
        if one.holds_each_pass:
            output = call_in_backward(partial(one.transfers.prefetch, backward=True), output)
        if following is not None and not following.is_first and not in_backward():
            following.launch(output)
        return output

    def advance_transfers(self, hidden: torch.Tensor | None = None) -> None:
        """Mark a point of the program for devices with one queue (``transfer_lanes.py``).

        All ranks must have the same points. The backward pass has one where the gradient of ``hidden`` is
        complete, if it is given.
        """
        group = self.groups.transfers
        if group is None or not self.groups.one_queue:
            return
        advance_transfers(group)
        if hidden is not None and torch.is_grad_enabled() and hidden.requires_grad:
            hidden.register_hook(lambda gradient: advance_transfers(group))

    # The backward pass.

    def _experts_begin_backward(self, one: SlotPass, is_late: bool, settles: bool) -> None:
        if settles and self.following is not None:
            self.following.gradients.settle()
        if is_late:
            self.gradients.experts_begin_backward(one)

    def _prefetch_before(self) -> None:
        """Gather the weights of the layer before again, beside the compute between the layers."""
        before = None if self.before is None or self.is_first else self.before._transfers
        if before is not None and before.plan.rematerialize and before.plan.gather_ahead:
            before.prefetch(backward=True)

    def _has_late_gradients(self, one: SlotPass) -> bool:
        """Whether gradients of owned experts can be incomplete after their backward pass.

        Expert-parallel groups with copies of the same experts plan other replicas. If one of them can have
        some, all of them count as late: all ranks must start their data-parallel reductions in one order.
        """
        # In steps, the gradients of an owned expert arrive in several parts.
        in_steps = one.plan.in_steps and not self._is_alone
        return one.has_gradients or in_steps or self.strategy.may_replicate(self.context.layer)

    # Begin and end.

    def end_iteration(self) -> LayerLoad:
        """Close the iteration: add its counts to the history, drop its plan and replicas, return its load.

        Raises:
            RuntimeError: Some gradients have not reached the owners, so the optimizer would miss them.
        """
        if not self.gradients.is_home:
            raise RuntimeError(
                f"{self.experts.what}: the iteration ended before all replicas' gradients reached their "
                "owners; call MoERuntime.finish_gradients() before reading gradients"
            )
        load = self._take_load()
        self.gradients.note_iteration()
        self._drop()
        if load.counts_DE.any():
            self.history.append(load.counts_DE, load.micro_batches)
        return load

    def reset(self) -> None:
        """Begin the passes of the iteration anew: gradients and counts are dropped, the plan stays."""
        self._begin_anew()
        self._take_load()
        self._use(self.shared)

    def drop_plan(self) -> None:
        """Forget the plan of an iteration that has not begun."""
        self._drop()

    def _drop(self) -> None:
        self._begin_anew()
        self._in_use = None
        super()._drop()

    def _begin_anew(self) -> None:
        if self._transfers is not None:
            self._transfers.drop()
        self.gradients.begin_anew()
        self._is_counted = self._is_final = False
        self.counts.clear()

    def _take_load(self) -> LayerLoad:
        load, self.load = self.load, LayerLoad.empty(self.context)
        if self.shared is not None and isinstance(self.strategy, AutoStrategy):
            load.strategy = self.strategy.selected(self.context.layer)
        # In steps, a dispatch contains the experts.
        in_steps = self.shared is not None and self.shared.plan.in_steps
        for timer in self.journal:
            dispatches = (load.forward, load.backward) if timer.is_gather and not in_steps else ()
            load.add(timer, sum(self.timer.take_from_dispatch(one, timer) for one in dispatches))
        self.journal.clear()
        if self.stopwatch is not None:
            self.stopwatch.iteration_ends()
        return load
