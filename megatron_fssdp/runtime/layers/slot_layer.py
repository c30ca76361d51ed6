"""One MoE layer under a strategy: experts in slots, and the replicas' transfers beside Megatron's own passes.

Megatron's router, dispatcher and experts compute. Megatron's layer, or a benchmark, calls these methods at
the places of its forward pass, and the backward pass comes back to them in the opposite order::

    method           place                     forward                        backward
    launch           (end of the layer before) spAG starts
    prepare          after the gate            provides the slots
    remap            in the dispatcher         experts become slots
    enter_dispatch   before the rows leave                                    gradients complete: spRS starts
    rows_travel      after the rows have left  prepares the next layer
    await_weights    before the experts        spAG ends
    leave_experts    after the experts                                        next spRS ends, (spAG ends)
    finish           end of the layer          next layer's spAG starts       (spAG starts)

If replicas live for an iteration, spAG runs once before the first micro-batch, and spRS once after the last.
Steps in parentheses take place only under re-materialization (Hecate §4.2).

Shape letters: T tokens, E experts, R rows that a rank receives, M model dimension, W slots of all devices.
"""

from functools import partial
from typing import Any

from torch import Tensor

from megatron_fssdp.runtime.clocks.pass_timer import Part
from megatron_fssdp.runtime.layers.layer_lifecycle import LayerLifecycle
from megatron_fssdp.runtime.slots.autograd_points import call_in_backward, in_backward


class SlotLayer(LayerLifecycle):
    """A layer on this rank. All ranks of its groups call its methods in the same order."""

    following: "SlotLayer | None" = None  # the next MoE layer of this rank

    def mark(self, tensor: Tensor, forward: Part | None, backward: Part | None) -> None:
        """Mark a border between two parts of a pass, if they are measured (:meth:`PassTimer.border`)."""
        local = self.local
        if local.stopwatch is not None:
            local.stopwatch.reach(forward, tensor)
        if local.timer.is_running and self.clock.trains:
            local.timer.border((local.load.forward, local.load.backward), tensor, forward, backward)

    def launch(self, hidden: Tensor) -> None:
        """Plan the iteration if it is not yet; ``hidden`` is any tensor of the pass."""
        if self.passes.is_alone or not self.clock.driven:
            return
        if self.passes.shared is None or self.groups.transfers is not None:
            self.passes.gather_ahead()
        if self.local.stopwatch is not None:  # What the host did until here hides nothing.
            self.local.stopwatch.layer_begins(hidden.device)

    def prepare(self, routing_map: Tensor | None) -> None:
        """The map, bool ``[T, E]``, is ``None`` if a CUDA graph made it. Plans of micro-batches wait."""
        self.is_counted = self.clock.trains and not in_backward()
        if self.groups.one_queue:  # Passes without replicas call little, because the host pays for each call.
            self.groups.advance_transfers()
        if not (self.passes.is_settled and self.clock.driven):
            self.passes.choose(routing_map)
        # Transfers that may not run beside the dispatch end here.
        if (transfers := self.passes.in_use.transfers) is not None and not transfers.plan.gather_ahead:
            transfers.await_weights()

    def remap[Map: (Tensor, None)](self, routing_map: Map, probs: Tensor) -> tuple[Map, Tensor]:
        """From map and probabilities of experts, ``[T, E]``, to those of slots, ``[T, W]``."""
        slot_pass = self.passes.in_use
        counts_W = self.counts.open(slot_pass, routing_map) if self.is_counted else None
        if slot_pass.shares is None or routing_map is None:
            return routing_map, probs
        return slot_pass.shares.remap(routing_map, probs, counts_W)

    def enter_dispatch(self, hidden: Tensor) -> Tensor:
        """The pass goes on with the result."""
        slot_pass = self.passes.in_use
        return self.gradients.at_dispatch(slot_pass, hidden) if slot_pass.ends_at_dispatch else hidden

    def rows_travel(self) -> None:
        """Replicas for this micro-batch alone are gathered after its rows."""
        if (transfers := self.passes.in_use.transfers) is not None and not transfers.plan.rematerialize:
            transfers.gather()
        if (following := self.following) is not None and self.clock.driven and not in_backward():
            following.passes.plan_iteration()

    def await_weights(self, rows: Tensor) -> tuple[Any, ...]:
        """Rows are ``[R, M]``. In steps (FasterMoE §4.2), the dispatcher waits by the results."""
        slot_pass, following = self.passes.in_use, self.following
        if (transfers := slot_pass.transfers) is not None:
            transfers.begin_use(backward=False)
            if slot_pass.plan.in_steps:
                return transfers.await_weights, slot_pass.replicas_U
        if following is not None and self.local.strategy.splits and self.clock.driven and not in_backward():
            following.passes.gather_ahead(first_part=True)
        if transfers is not None:
            transfers.await_weights()
        self.mark(rows, "experts", "dispatch")
        return ()

    def leave_experts(self, rows: Tensor) -> Tensor:
        """The pass goes on with the result."""
        slot_pass, following = self.passes.in_use, self.following
        if following is not None and following.groups.transfers is not None:
            rows = call_in_backward(following.gradients.settle, rows)
        if slot_pass.is_late:
            rows = call_in_backward(partial(self.gradients.experts_begin_backward, slot_pass), rows)
        self.mark(rows, "combine", "experts")
        if self.groups.one_queue:
            self.groups.advance_transfers(rows)
        if slot_pass.transfers is not None or not slot_pass.is_shared:
            self.gradients.end_forward(slot_pass)
        return rows

    def finish(self, output: Tensor) -> Tensor:
        """The pass goes on with the result."""
        self.mark(output, None, "combine")
        if (transfers := self.passes.in_use.transfers) is not None and transfers.plan.rematerialize:
            output = call_in_backward(partial(transfers.prefetch, backward=True), output)
        if (following := self.following) is not None and not following.local.is_first and not in_backward():
            following.launch(output)
        return output
