"""Asks the strategy for the plans of one layer, and keeps the loads from which they are made.

Shape letters: D devices, E experts.
"""

from dataclasses import dataclass

import numpy as np

from megatron_fssdp.collectives.plan_agreement import check_agreement
from megatron_fssdp.planning.loads import LoadHistory
from megatron_fssdp.runtime.layers.expert_groups import ExpertGroups
from megatron_fssdp.runtime.layers.iteration_clock import IterationClock
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.layer_planning import plan_after_gate, plan_before_gate
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

    def next_plan(self, context: LayerContext) -> LayerPlan:
        """Plan an iteration from the loads of earlier ones.

        Args:
            context: Data of the layer.
        """
        plan = plan_before_gate(self.strategy, context, self.history)
        self._compare(context, plan)
        return plan

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
            self._compare(context, new)
        return new

    def _compare(self, context: LayerContext, plan: LayerPlan) -> None:
        """Check, if requested, that all ranks have made the same plan."""
        if not self.compares:
            return
        what = f"the plan of layer {context.layer}"
        if self.clock.iteration is not None:
            what += f" in iteration {self.clock.iteration}"
        for group in (self.groups.expert_parallel, self.groups.expert_tensor_parallel):
            if group is not None:
                check_agreement(plan.digest(), group, what)
