"""Decides for each placement whether its tokens are split evenly among holders, or balanced (ours).

Balanced dispatch is never slower on the devices and links, but the device waits while the host finds the
split. So it is used where it would have saved more modelled seconds than this time in the last iteration.

Shape letters: D devices, E experts.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from megatron_fssdp.planning.cost.host_seconds import balanced_dispatch_s
from megatron_fssdp.planning.dispatch.token_dispatch import DispatchPolicy
from megatron_fssdp.planning.loads.load_history import LoadHistory
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.plan_seconds import plan_seconds


def saved_by_balance_s(plan: LayerPlan, counts_DE: np.ndarray, context: LayerContext) -> float:
    """Seconds that balanced dispatch saves in an iteration, less the host's time; negative if it costs more.

    Args:
        plan: Plan of the layer.
        counts_DE: (token, k) pairs of an iteration by source and expert, int64 ``[D, E]``.
        context: Data of the layer; costs are measured.
    """
    assert context.profile is not None
    times = context.profile.num_micro_batches
    even_s, balanced_s = (
        plan_seconds(replace(plan, dispatch_policy=policy), counts_DE, context, num_micro_batches=times)
        for policy in ("even", "balanced")
    )
    return even_s - balanced_s - times * balanced_dispatch_s(context.num_experts, context.num_devices)


@dataclass(eq=False)
class PricedDispatch:
    """Decides once for each placement: two prices take longer than to keep a placement."""

    _decided: dict[int, tuple[ExpertPlacement, DispatchPolicy]] = field(default_factory=dict)

    def policy(self, plan: LayerPlan, context: LayerContext, history: LoadHistory) -> DispatchPolicy:
        """How the tokens of a plan are split among the holders of their experts.

        Args:
            plan: Plan of the layer.
            context: Data of the layer; costs are measured.
            history: Loads of the iterations before.
        """
        if history.is_empty or not plan.placement.num_replicas:
            return "even"
        known = self._decided.get(context.layer)
        if known is not None and known[0] is plan.placement:
            return known[1]
        pays = saved_by_balance_s(plan, history.counts_DE(0), context) > 0.0
        policy: DispatchPolicy = "balanced" if pays else "even"
        self._decided[context.layer] = plan.placement, policy
        return policy
