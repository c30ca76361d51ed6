"""Asks the strategy for the plans of one layer, and keeps the loads from which they are made.

Shape letters: D devices, E experts.
"""

from dataclasses import dataclass, field

import numpy as np

from megatron_fssdp.collectives.plan_agreement import check_agreement
from megatron_fssdp.planning.loads.load_history import LoadHistory
from megatron_fssdp.runtime.clocks.iteration_clock import IterationClock
from megatron_fssdp.runtime.exchange.expert_groups import ExpertGroups
from megatron_fssdp.runtime.execution.early_plan import EarlyPlan
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.stepped_plans import plan_after_gate, plan_before_gate
from megatron_fssdp.strategies.strategy import Strategy


@dataclass(eq=False)
class LayerPlanner:
    """The plans of one layer on this rank. All ranks call the methods with the same arguments.

    Attributes:
        strategy: Strategy that plans the layer.
        groups: Process groups of the layer.
        clock: Clock of iterations that all layers of the model share.
        history: Loads of the last iterations.
        compares: Whether to compare the plans of all ranks before they are used.
    """

    strategy: Strategy
    groups: ExpertGroups
    clock: IterationClock
    history: LoadHistory
    compares: bool = False
    _early: EarlyPlan | None = field(init=False, default=None)

    def next_plan(self, context: LayerContext) -> LayerPlan:
        """Plan an iteration from the loads of earlier ones.

        Args:
            context: Data of the layer.
        """
        early, self._early = self._early, None
        if early is not None and early.fits(self.strategy, context, self.history):
            plan = early.plan
        else:
            plan = plan_before_gate(self.strategy, context, self.history)
        self._check(context, plan)
        return plan

    def plan_ahead(self, context: LayerContext, counts_DE: np.ndarray) -> None:
        """Plan the next iteration before the running one ends.

        Args:
            context: Data of the layer.
            counts_DE: All counts of the running iteration, int64 ``[D, E]``.
        """
        # The comparison of plans is a collective that can raise an error. It must not run while other
        # collectives are running.
        if not self.compares:
            self._early = EarlyPlan.make(self.strategy, context, self.history, counts_DE)

    def after_gate(
        self, context: LayerContext, counts_DE: np.ndarray, plan: LayerPlan, num_micro_batches: int
    ) -> LayerPlan:
        """The plan that the strategy makes of another one when it knows the exact counts of a micro-batch.

        Args:
            context: Data of the layer.
            counts_DE: Counts of the micro-batch, int64 ``[D, E]``.
            plan: Plan of the iteration.
            num_micro_batches: Number of micro-batches for which the new plan holds.

        Returns:
            The new plan, or ``plan`` itself.
        """
        new = plan_after_gate(self.strategy, context, counts_DE, plan, num_micro_batches)
        if new is not plan:
            self._check(context, new)
        return new

    def add_counts(self, counts_DE: np.ndarray) -> None:
        """Add the counts of an iteration that has ended to the history.

        Args:
            counts_DE: Counts of the iteration, int64 ``[D, E]``; zeros if the layer was not used.
        """
        if self._early is not None and np.array_equal(self._early.counts_DE, counts_DE):
            self.history = self._early.history
        elif counts_DE.any():
            self.history.append(counts_DE)

    def _check(self, context: LayerContext, plan: LayerPlan) -> None:
        """Check that the strategy declares the plan's abilities and, if requested, that all ranks agree."""
        self.strategy.check_plan(context, plan)
        if not self.compares:
            return
        what = f"the placement of layer {context.layer}"
        if self.clock.iteration is not None:
            what += f" in iteration {self.clock.iteration}"
        for group in (self.groups.expert_parallel, self.groups.expert_tensor_parallel):
            if group is not None:
                check_agreement(
                    plan.placement.digest()
                    + bytes([plan.in_steps, plan.deduplicated])
                    + plan.dispatch_policy.encode(),
                    group,
                    what,
                )
