"""A plan for the next iteration, made while the device still computes the backward pass of this iteration.

On CUDA, the host queues kernels faster than the device runs them, and in the backward pass it does not wait
for the device. The counts of a layer's iteration are complete after the layer's last backward pass. The plan
of the next iteration can therefore be made there, and the device does not notice the time that planning
takes.
"""

from dataclasses import dataclass

import numpy as np

from megatron_fssdp.planning.loads.load_history import LoadHistory
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.stepped_plans import plan_before_gate
from megatron_fssdp.strategies.strategy import Strategy


@dataclass(frozen=True, eq=False)
class EarlyPlan:
    """A plan together with everything that it was made from.

    Attributes:
        plan: Plan of the next iteration.
        context: Data of the layer.
        selected: Name of the strategy that ``auto`` had selected for the layer.
        history: Load history with the counts of the running iteration.
        counts_DE: Counts of the running iteration, int64 ``[D, E]``.
    """

    plan: LayerPlan
    context: LayerContext
    selected: str | None
    history: LoadHistory
    counts_DE: np.ndarray

    @classmethod
    def make(
        cls, strategy: Strategy, context: LayerContext, history: LoadHistory, counts_DE: np.ndarray
    ) -> "EarlyPlan":
        """Plan the next iteration.

        Args:
            strategy: Strategy of the layer.
            context: Data of the layer.
            history: Loads of the iterations before the running one; it does not change.
            counts_DE: Counts of the running iteration, int64 ``[D, E]``.
        """
        counts_DE = counts_DE.copy()
        history = history.followed_by(counts_DE)
        plan = plan_before_gate(strategy, context, history)
        return cls(plan, context, strategy.selected(context.layer), history, counts_DE)

    def fits(self, strategy: Strategy, context: LayerContext, history: LoadHistory) -> bool:
        """Whether the strategy would make this plan from the present data.

        Args:
            strategy: Strategy of the layer.
            context: Data of the layer now.
            history: Load history now; it is :attr:`history` if the iteration ended with the same counts.
        """
        return (
            history is self.history
            and context is self.context
            and strategy.selected(context.layer) == self.selected
        )
