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

from functools import partial
from typing import Any

import torch

from megatron_fssdp.runtime.clocks.pass_timer import Part
from megatron_fssdp.runtime.experts.expert_layout import LocalExperts
from megatron_fssdp.runtime.layers.layer_lifecycle import LayerLifecycle
from megatron_fssdp.runtime.slots.autograd_points import call_in_backward, in_backward
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan


class SlotLayer:
    """One MoE layer on this rank. All ranks of the layer's groups call its methods in the same order.

    ``before`` is the MoE layer before it on this rank; it then has this one as ``following``.
    """

    def __init__(self, lifecycle: LayerLifecycle, before: "SlotLayer | None" = None) -> None:
        self.lifecycle, self.passes, self.gradients = lifecycle, lifecycle.passes, lifecycle.gradients
        self.local, self.counts = lifecycle.local, lifecycle.counts
        self.groups, self.clock, self.history = self.local.groups, self.local.clock, self.local.history
        self.before, self.following = before, None
        if before is not None:
            before.following = self
        self._is_counted = False  # the running forward pass

    @property
    def context(self) -> LayerContext:
        """What the strategy may know of the layer."""
        return self.local.context

    @property
    def experts(self) -> LocalExperts:
        """The experts with Parameters on this rank."""
        return self.local.experts

    def plan_iteration(self) -> LayerPlan:
        """The plan of the running iteration, which is made from earlier loads if it does not exist."""
        return (self.passes.shared or self.passes.plan_iteration()).plan

    def mark(self, tensor: torch.Tensor, forward: Part | None, backward: Part | None) -> None:
        """Mark a border between two parts of the layer, if they are measured (:meth:`PassTimer.border`)."""
        if self.lifecycle.stopwatch is not None:
            self.lifecycle.stopwatch.reach(forward, tensor)
        if self.local.timer.is_running and self.clock.trains:
            load = self.local.load
            self.local.timer.border((load.forward, load.backward), tensor, forward, backward)

    def launch(self, hidden: torch.Tensor | None = None) -> None:
        """Plan the iteration, and start SparseAllGather before the compute that comes before the layer.

        ``hidden`` is a tensor of the pass, for the stopwatch; ``None`` outside of a pass.
        """
        if self.passes.is_alone or not self.clock.driven:
            return
        self.plan_iteration()
        if self.groups.transfers is not None:
            self.passes.gather_ahead()
        if self.lifecycle.stopwatch is not None and hidden is not None:
            # The span begins when the transfer is posted: what the host did until here hides nothing.
            self.lifecycle.stopwatch.layer_begins(hidden.device)

    def prepare(self, routing_map: torch.Tensor | None, *, training: bool) -> None:
        """Provide the slots of the coming forward pass, before its routing is remapped.

        Transfers that may not run beside the dispatch end here. Only strategies that plan each micro-batch
        need the counts of the routing map, bool ``[T, E]``; then the host waits for them once. The map is
        ``None`` if a CUDA graph made it. Evaluations are not counted.
        """
        self._is_counted = training and self.clock.trains and not in_backward()
        if self.groups.one_queue:
            self.groups.advance_transfers()
        if not (self.passes.is_settled and self.clock.driven):
            self.passes.choose(routing_map)
        if routing_map is None and self._is_counted:
            self.counts.open_in_graph(self.passes.in_use)
        if (transfers := self.passes.in_use.transfers) is not None and not transfers.plan.gather_ahead:
            transfers.await_weights()

    def prepare_capture(self, *, training: bool) -> None:
        """Provide the slots for a CUDA graph that is captured: its tensors keep their addresses."""
        self._is_counted = training and not in_backward()  # Graphs of evaluations are other ones.
        self.passes.choose_to_capture(is_counted=self._is_counted)
        if self._is_counted:
            self.counts.open_in_graph(self.passes.in_use)

    def remap(self, routing_map: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Turn routing map and probabilities of experts, ``[T, E]``, into those of slots, ``[T, W]``."""
        slot_pass = self.passes.in_use
        counts_W = self.counts.open(slot_pass, routing_map) if self._is_counted else None
        if slot_pass.shares is not None:
            return slot_pass.shares.remap(routing_map, probs, counts_W)
        if counts_W is not None:
            counts_W.add_(routing_map.sum(0))
        return routing_map, probs

    def enter_dispatch(self, hidden: torch.Tensor) -> torch.Tensor:
        """Mark where the backward pass has the experts' gradients; the pass goes on with the result."""
        slot_pass = self.passes.in_use
        if slot_pass.is_shared and not slot_pass.ends_at_dispatch:
            return hidden
        slot_pass.has_backward = torch.is_grad_enabled()
        return call_in_backward(partial(self.gradients.dispatch_is_over, slot_pass), hidden)

    def rows_travel(self) -> None:
        """Gather replicas for this micro-batch alone after the rows, and plan the next layer meanwhile."""
        if (transfers := self.passes.in_use.transfers) is not None and not transfers.plan.rematerialize:
            transfers.gather()
        if self.following is not None and self.clock.driven and not in_backward():
            self.following.plan_iteration()

    def await_weights(self, rows: torch.Tensor, *, in_steps: bool = False) -> tuple[Any, ...]:
        """Wait for the replicas' weights, immediately before the experts compute the rows ``[R, M]``.

        A dispatcher that computes ``in_steps`` waits itself (FasterMoE §4.2). The result is what it needs for
        this: the function that waits, and the slots of the replicas.
        """
        slot_pass, following = self.passes.in_use, self.following
        if (transfers := slot_pass.transfers) is not None:
            transfers.begin_use(backward=False)
            if in_steps:
                return transfers.await_weights, slot_pass.replicas_U
        if following is not None and self.local.strategy.splits and self.clock.driven and not in_backward():
            following.passes.gather_ahead(first_part=True)
        if transfers is not None:
            transfers.await_weights()
        self.mark(rows, "experts", "dispatch")
        return ()

    def leave_experts(self, rows: torch.Tensor) -> torch.Tensor:
        """Mark where the experts' backward pass begins, at their results; the pass goes on with them."""
        slot_pass, following = self.passes.in_use, self.following
        settled = None if following is None or following.groups.transfers is None else following.gradients
        if slot_pass.is_late or settled is not None:
            rows = call_in_backward(partial(self.gradients.experts_begin_backward, slot_pass, settled), rows)
        self.mark(rows, "combine", "experts")
        if self.groups.one_queue:
            self.groups.advance_transfers(rows)
        if slot_pass.transfers is not None:
            slot_pass.transfers.end_use()
        if not slot_pass.is_shared and not slot_pass.has_backward:
            self.gradients.end_own(slot_pass)
        return rows

    def finish(self, output: torch.Tensor) -> torch.Tensor:
        """End the forward pass, and launch the next layer; the pass goes on with the result."""
        transfers, following = self.passes.in_use.transfers, self.following
        self.mark(output, None, "combine")
        if transfers is not None and transfers.plan.rematerialize:
            output = call_in_backward(partial(transfers.prefetch, backward=True), output)
        if following is not None and not following.local.is_first and not in_backward():
            following.launch(output)
        return output
