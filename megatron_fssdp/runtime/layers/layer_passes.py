"""Says which pass serves a micro-batch: the iteration's, one of its own, or one outside of iterations.

Shape letters: T tokens, D devices, E experts.
"""

from collections.abc import Callable

import numpy as np
import torch

from megatron_fssdp.collectives.gathered_counts import start_counts
from megatron_fssdp.planning.transfer.transfer_plan import additional_transfer
from megatron_fssdp.runtime.layers.layer_planner import LayerPlanner
from megatron_fssdp.runtime.layers.local_layer import LocalLayer
from megatron_fssdp.runtime.layers.pass_binder import PassBinder, SlotPass
from megatron_fssdp.runtime.slots.autograd_points import in_backward
from megatron_fssdp.strategies.layer_plan import LayerPlan


class LayerPasses:
    """The passes of one layer.

    The plan of an iteration does not change until it ends, except for one correction with the first
    micro-batch by strategies that ask for it. All micro-batches and recomputed forward passes use its pass
    ``shared``, unless a plan is made for each micro-batch. ``on_pass`` is called when a pass comes into use:
    the caller binds its dispatcher and its experts to the slots. ``before`` are the passes of the MoE layer
    before this one on this rank. Passes outside of iterations have a binder of their own.
    """

    def __init__(
        self,
        local: LocalLayer,
        planner: LayerPlanner,
        binder: PassBinder,
        binder_outside: PassBinder,
        before: "LayerPasses | None",
        on_pass: Callable[[SlotPass], object],
    ) -> None:
        self.local, self._planner, self._binder = local, planner, binder
        self._binder_outside, self.before, self.on_pass = binder_outside, before, on_pass
        self.shared: SlotPass | None = None  # of the iteration, once it is planned
        self.own: list[SlotPass] = []  # of single micro-batches, whose gradients are not home
        self.in_use: SlotPass  # of the running forward pass, from :meth:`choose` on
        # In iterations, all passes are ``in_use``, whatever their routing is.
        self.is_settled = False
        self.is_alone = local.context.num_devices == 1
        self._is_bound, self._may_correct, self._lacks_parameters = False, True, True
        self._warm = set[bool]()  # forms of a captured pass, counted or not, whose kernels are loaded

    @property
    def plan(self) -> LayerPlan | None:
        """Plan of the running iteration, as far as it is made."""
        return None if self.shared is None else self.shared.plan

    def plan_iteration(self, *, is_captured: bool = False) -> SlotPass:
        """The pass of the running iteration. Its plan is made, if it does not exist."""
        if self.shared is None:
            plan = self._planner.plan_iteration(self.local, is_captured=is_captured)
            self.shared = self._binder.for_iteration(plan)
            self.use(self.shared)
        return self.shared

    def choose(self, routing_map: torch.Tensor | None) -> None:
        """Let the pass of the micro-batch with this routing map, bool ``[T, E]``, come into use.

        The map is ``None`` if a CUDA graph made it.
        """
        clock = self.local.clock
        if not (self.is_alone or clock.driven):
            self._is_bound = False
            self.use(self._outside_pass(routing_map))
            return
        chosen = self.plan_iteration()
        if routing_map is not None and chosen.plan.each_micro_batch and not self.is_alone:
            chosen = self._own_pass(routing_map, chosen)
        # An evaluation does not change the plan of the iteration.
        elif routing_map is not None and self._may_correct and chosen.plan.corrects and clock.trains:
            self._may_correct = False
            chosen = self.shared = self._corrected(routing_map, chosen)
        self.use(chosen)

    def choose_to_capture(self, *, is_counted: bool) -> None:
        """Let the pass for a CUDA graph that is captured come into use.

        Raises:
            RuntimeError: No pass before the capture has compiled and loaded the kernels that it launches.
        """
        self.use(self.plan_iteration(is_captured=True))
        if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            self._warm.add(is_counted)
        elif is_counted not in self._warm:
            raise RuntimeError(
                f"{self.local.experts.name}: got the capture of a CUDA graph without a pass before it, in "
                "which kernels are loaded; give make_graphed_callables() at least one warm-up iteration"
            )

    def use(self, slot_pass: SlotPass) -> None:
        """Let a pass come into use, unless it is."""
        if self._is_bound and slot_pass is self.in_use:
            return
        plan, local = slot_pass.plan, self.local
        # Expert-parallel groups with copies of the same experts plan other replicas. If one of them can have
        # some, gradients are late in all of them: all ranks must start their data-parallel reductions in one
        # order. In steps, the gradients of an owned expert arrive in several parts.
        has_more = slot_pass.has_gradients or (plan.in_steps and not self.is_alone)
        slot_pass.is_late = has_more or local.strategy.may_replicate(local.context.layer)
        ends_late = slot_pass.is_late and (has_more or local.context.delays_gradients)
        slot_pass.ends_at_dispatch = ends_late or not slot_pass.is_shared
        self.is_settled = slot_pass is self.shared and not (plan.each_micro_batch or plan.corrects)
        self.in_use, self._is_bound = slot_pass, True
        self.on_pass(slot_pass)

    def gather_ahead(self, *, first_part: bool = False) -> None:
        """Plan the iteration, and start to gather the weights of its replicas for a forward pass.

        If transfers are split, ``first_part`` runs beside the experts of the layer before.
        """
        transfers = self.plan_iteration().transfers
        self._await_parameters()
        if transfers is None or self.local.groups.transfers is None:
            return
        if not first_part and transfers.plan.gather_ahead:
            transfers.prefetch(backward=False)
        elif first_part and transfers.plan.is_split and not self.local.is_first:
            transfers.gather_first_part()

    def prefetch_before(self) -> None:
        """Gather the weights of the layer before again, beside the compute between the layers."""
        shared = None if self.before is None or self.local.is_first else self.before.shared
        transfers = None if shared is None else shared.transfers
        if transfers is not None and transfers.plan.rematerialize and transfers.plan.gather_ahead:
            transfers.prefetch(backward=True)

    def _await_parameters(self) -> None:
        # Ranks with copies of the same experts gather them together, and their plans differ. So the places of
        # these calls must not depend on a plan.
        if self._lacks_parameters and self.local.groups.transfers is not None:
            self.local.experts.await_parameters()
            self._lacks_parameters = False  # They change between iterations only.

    def give_back(self, own: SlotPass) -> None:
        """End the pass of a single micro-batch."""
        self.own.remove(own)
        self._binder.give_back(own)

    def begin_anew(self) -> None:
        """Drop the weights and gradients of the iteration's replicas."""
        self._may_correct = self._lacks_parameters = True
        if self.shared is not None and self.shared.transfers is not None:
            self.shared.transfers.drop()

    def forget(self) -> None:
        """Forget the plan of the iteration."""
        self.shared, self.is_settled, self._is_bound = None, False, False
        self._planner.forget(self.local)

    def _outside_pass(self, routing_map: torch.Tensor | None) -> SlotPass:
        if routing_map is None:
            raise RuntimeError(
                f"{self.local.experts.name}: got a pass outside of iterations, or an evaluation in one, "
                "whose routing a CUDA graph made, wanted one by Megatron's schedule between two iterations; "
                "run it by get_forward_backward_func()"
            )
        return self._binder_outside.for_iteration(self.local.context.owners_only)

    def _host_counts(self, routing_map: torch.Tensor) -> np.ndarray:
        """Counts of a micro-batch, bool ``[T, E]``, on all devices, int64 ``[D, E]``; the host waits."""
        groups = self.local.groups
        counts = start_counts(routing_map.sum(0), groups.expert_parallel, groups.expert_tensor_parallel)
        counts_DE: np.ndarray = counts.wait().numpy().sum(axis=0)
        return counts_DE

    def _own_pass(self, routing_map: torch.Tensor, shared: SlotPass) -> SlotPass:
        self._await_parameters()
        counts_DE = self._host_counts(routing_map)
        # Without reentrance, a recomputed pass fills the graph of the first one, so it must have its slots:
        # those of the first pass with these counts that is not recomputed yet.
        left = [first for first in self.own if in_backward() and not (first.is_over or first.is_recomputed)]
        own = next((first for first in left if np.all(first.counts_DE == counts_DE)), None)
        if own is None:
            plan = self._planner.plan_after_gate(self.local, counts_DE, shared.plan, 1)
            own = self._binder.for_micro_batch(plan, counts_DE)
            self.own.append(own)
        own.is_recomputed = in_backward()
        return own

    def _corrected(self, routing_map: torch.Tensor, before: SlotPass) -> SlotPass:
        """Let the strategy change the replicas with the first micro-batch's exact counts (Hecate §4.2)."""
        counts_DE = self._host_counts(routing_map)
        plan = self._planner.plan_after_gate(self.local, counts_DE, before.plan)
        if plan is before.plan:
            return before
        transfers = before.transfers
        is_gathered = transfers is not None and transfers.is_gathered
        if transfers is not None and is_gathered:
            transfers.await_weights()
        after = self._binder.for_iteration(plan)
        if after.transfers is None:
            if transfers is not None:
                transfers.drop()
        elif is_gathered and after is not before and not plan.rematerialize:
            placements = before.plan.placement, plan.placement
            after.transfers.add(additional_transfer(*placements, self.local.context.topology))
        return after
