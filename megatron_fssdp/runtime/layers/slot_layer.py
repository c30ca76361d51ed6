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

Shape letters: T tokens, E experts, R rows that a rank receives, M model dimension, A rows that a rank sends,
W slots of all devices.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from megatron_fssdp.collectives.gathered_counts import gather_counts
from megatron_fssdp.collectives.transfer_lanes import advance_transfers
from megatron_fssdp.runtime.layers.iterated_layer import IteratedLayer
from megatron_fssdp.runtime.layers.slot_pass import SlotPass
from megatron_fssdp.runtime.slots.autograd_points import call_in_backward, in_backward
from megatron_fssdp.runtime.slots.exact_shares import remap_exactly
from megatron_fssdp.runtime.slots.remap import remap_by_table


class SlotLayer(IteratedLayer):
    """One MoE layer on this rank. All ranks of the layer's groups call its methods in the same order.

    The arguments are those of :class:`IteratedLayer`.

    Attributes:
        following: The next MoE layer on this rank.
        before: The MoE layer before this one on this rank.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.following: SlotLayer | None = None
        self.before: SlotLayer | None = None
        self.gradients.on_complete = self._prefetch_before

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

        Transfers that may not run beside the dispatch end here. Only strategies that plan each micro-batch,
        and loops that mark no iterations, need the counts here; then the host waits for them once.

        Args:
            routing_map: Experts that each token selected, bool ``[T, E]``; ``None`` if a CUDA graph made it.
            training: Whether the model trains; evaluations are not counted.
        """
        self._is_counted = training and not in_backward()
        if self.stopwatch is not None:
            self.stopwatch.tokens_ready()
        self.advance_transfers()
        one = self._pass_for(routing_map)
        self._use(one)
        if one.transfers is not None and not one.plan.gather_ahead:
            one.transfers.await_weights()

    def prepare_capture(self, *, training: bool) -> None:
        """Provide the slots for a CUDA graph that is captured: its tensors keep their addresses."""
        self.plan_iteration()
        self._use(self.shared)
        self._is_counted = training and not in_backward()
        self.counts.open(self._in_use, self.experts.device)

    def remap(self, routing_map: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Turn routing map and probabilities of experts, ``[T, E]``, into those of slots, ``[T, W]``."""
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
        """Mark where the backward pass has the experts' gradients: at the rows before they are dispatched.

        The pass goes on with the result.
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
        """Wait for the replicas' weights, immediately before the experts compute the rows ``[R, M]``.

        The result is a context manager for their forward pass. It measures if the layer has a stopwatch.
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
            rows: Rows in the order of sending, ``[A, M]``; the results have the same shape and order.
            probs: Probabilities of these rows, ``[A]``.
            experts: Forward pass of the slots' experts.
            run: The dispatcher's method that runs the steps.
        """
        one, transfers = self._in_use, self._in_use.transfers
        if transfers is None:
            with self.await_weights(rows):
                return self.leave_experts(run(rows, probs, experts))
        transfers.begin_use(backward=False)
        expert_U, owned = one.slots.expert_DU[self.groups.device].tolist(), self.experts.parameters
        # Most rows for replicas come from the device itself. While replicas are in transfer, the device
        # therefore computes the rows from other groups first.
        results = run(
            rows,
            probs,
            experts,
            own_last=True,
            await_weights=transfers.await_weights,
            in_transfer=[u for u, expert in enumerate(expert_U) if expert >= 0 and expert not in owned],
        )
        return self.leave_experts(results)

    def leave_experts(self, rows: torch.Tensor) -> torch.Tensor:
        """Mark where the experts' backward pass begins: at their results ``[R, M]``.

        The pass goes on with the result.
        """
        one = self._in_use
        next_splits = self.following is not None and self.following._splits
        if self._has_late_gradients(one) or next_splits:
            rows = call_in_backward(partial(self._experts_begin_backward, one), rows)
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
        if one.holds_each_pass or (following is not None and following.groups.transfers is not None):
            output = call_in_backward(partial(self._begin_backward, one), output)
        if following is not None and not following.is_first and not in_backward():
            following.launch(output)
        return output

    def advance_transfers(self, hidden: torch.Tensor | None = None) -> None:
        """Mark a point of the program, at which transfers issue their next messages (``transfer_lanes.py``).

        Only devices with one queue need such points. All ranks must have the same points in the same order.
        The backward pass has a point where the gradient of ``hidden`` is complete, if it is given.
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
            self.following.gradients.settle()
        if one.holds_each_pass and one.transfers is not None:
            one.transfers.prefetch(backward=True)

    def _experts_begin_backward(self, one: SlotPass) -> None:
        following = self.following
        if following is not None and following._splits and following._transfers is not None:
            following._transfers.reduce_rest()
        if self._has_late_gradients(one):
            self.gradients.experts_begin_backward(one)

    def _prefetch_before(self) -> None:
        """Gather the weights of the layer before again, beside the compute between the layers."""
        before = None if self.before is None or self.is_first else self.before.shared
        gathers = before is not None and before.holds_each_pass and before.plan.gather_ahead
        if gathers and before is not None and before.transfers is not None:
            before.transfers.prefetch(backward=True)

    @property
    def _splits(self) -> bool:
        """Whether the transfers of this layer travel in parts; equal on all ranks."""
        return self._transfers is not None and self._transfers.splits

    def _has_late_gradients(self, one: SlotPass) -> bool:
        """Whether gradients of owned experts can be incomplete after their backward pass.

        Expert-parallel groups with copies of the same experts plan other replicas. If one of them can have
        some, all of them count as late: all ranks must start their data-parallel reductions in one order.
        """
        # In steps, the gradients of an owned expert arrive in several parts.
        in_steps = one.plan.in_steps and not self._is_alone
        return one.has_gradients or in_steps or self.strategy.may_replicate(self.context.layer)

    def _gather_first_part(self) -> None:
        self._await_parameters()
        if self._splits and self._transfers is not None:
            self._transfers.gather_first_part()
