"""Decides for each placement how its tokens are split among holders: evenly, balanced or unbound (ours).

Balanced dispatch is never slower than even dispatch on the devices and links. Unbound dispatch evens out
loads further, but more tokens travel. Under both, the device waits while the host finds the split. So the
way is used that would have taken the fewest modelled seconds in the last iteration, with the host's time.

Shape letters: D devices, E experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from megatron_fssdp.planning.cost.host_seconds import balanced_dispatch_s
from megatron_fssdp.planning.dispatch.token_dispatch import LEVELLING_POLICIES, DispatchPolicy
from megatron_fssdp.planning.loads.load_history import LoadHistory
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.plan_seconds import plan_seconds


def dispatched_seconds(
    plan: LayerPlan,
    counts_DE: np.ndarray,
    context: LayerContext,
    *,
    num_micro_batches: int,
    planned: LayerPlan | None = None,
) -> float:
    """Modelled seconds of a plan, with the host's time to split the tokens of every micro-batch.

    Args:
        plan: Plan of the layer.
        counts_DE: (token, k) pairs of an iteration by source and expert, int64 ``[D, E]``.
        context: Data of the layer; costs are measured.
        num_micro_batches: Number of micro-batches in the iteration.
        planned: Plan before the gate, if ``plan`` replaces it.
    """
    seconds = plan_seconds(plan, counts_DE, context, num_micro_batches=num_micro_batches, planned=planned)
    if plan.dispatch_policy not in LEVELLING_POLICIES or not plan.placement.num_replicas:
        return seconds
    return seconds + num_micro_batches * balanced_dispatch_s(context.num_experts, context.num_devices)


@dataclass(eq=False)
class PricedDispatch:
    """Decides once for each placement: the prices take longer than to keep a placement."""

    _decided: dict[int, tuple[ExpertPlacement, DispatchPolicy]] = field(default_factory=dict)

    def policy(
        self,
        plan: LayerPlan,
        policies: Sequence[DispatchPolicy],
        context: LayerContext,
        history: LoadHistory,
    ) -> DispatchPolicy:
        """How the tokens of a plan are split among the holders of their experts.

        Args:
            plan: Plan of the layer.
            policies: Policies to compare; of equal ones, the first is taken.
            context: Data of the layer; costs are measured.
            history: Loads of the iterations before.
        """
        if history.is_empty or not plan.placement.num_replicas:
            return "even"
        known = self._decided.get(context.layer)
        if known is not None and known[0] is plan.placement:
            return known[1]
        assert context.profile is not None
        times, counts_DE = context.profile.num_micro_batches, history.counts_DE(0)
        plans = [replace(plan, dispatch_policy=policy) for policy in policies]
        seconds = [dispatched_seconds(one, counts_DE, context, num_micro_batches=times) for one in plans]
        policy = policies[int(np.argmin(seconds))]
        self._decided[context.layer] = plan.placement, policy
        return policy
