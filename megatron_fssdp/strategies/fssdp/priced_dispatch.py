"""Decides for each placement whether the device shares tokens out by exact counts, or evenly (ours).

Exact dispatch makes device loads even, but takes another gather of counts and the time to compute the shares.
So the way is used that would have taken the fewest modelled seconds in the last iteration.

Shape letters: D devices, E experts.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from megatron_fssdp.planning.dispatch.token_dispatch import DispatchPolicy
from megatron_fssdp.planning.loads import LoadHistory
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.plan_seconds import plan_seconds

POLICIES: tuple[DispatchPolicy, ...] = ("even", "exact")


@dataclass(eq=False)
class PricedDispatch:
    """Decides once for each placement: the prices take longer than to keep a placement."""

    _decided: dict[int, tuple[ExpertPlacement, DispatchPolicy]] = field(default_factory=dict)

    def policy(self, plan: LayerPlan, context: LayerContext, history: LoadHistory) -> DispatchPolicy:
        """How the tokens of a plan are divided among the holders of their experts.

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
        assert context.profile is not None
        times, counts_DE = context.profile.num_micro_batches, history.counts_DE(0)
        seconds = [
            plan_seconds(replace(plan, dispatch_policy=policy), counts_DE, context, num_micro_batches=times)
            for policy in POLICIES
        ]
        policy = POLICIES[int(np.argmin(seconds))]
        self._decided[context.layer] = plan.placement, policy
        return policy
