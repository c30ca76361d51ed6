"""Exact quotas of tokens for each micro-batch, and replicas that follow them (ours).

Shape letters: D devices, E experts.
"""

import numpy as np

from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.quotas import quota_assignment
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.plan_price import fastest
from megatron_fssdp.strategies.quota import QuotaSettings
from megatron_fssdp.strategies.strategy import ReplicasAfterGate


class QuotaStrategy(ReplicasAfterGate[QuotaSettings]):
    """``quota``: minimizes the highest device load of each micro-batch (ours, after ECHO and UltraEP)."""

    def after_gate(
        self, context: LayerContext, counts_DE: np.ndarray, plan: LayerPlan, num_micro_batches: int
    ) -> LayerPlan:
        """A plan with the quotas of this micro-batch, if costs are measured and it saves modelled seconds."""
        return self._plans.of(context, plan, counts_DE, lambda: self._quotas(context, counts_DE, plan))

    def _quotas(self, context: LayerContext, counts_DE: np.ndarray, plan: LayerPlan) -> LayerPlan:
        if context.profile is None:
            return plan
        slots = self.slots(context)
        tokens_ED = quota_assignment(context.owner_E, counts_DE, context.topology, slots=slots)
        placement = ExpertPlacement(context.owner_E, plan.placement.present_ED | (tokens_ED > 0))
        if not placement.num_replicas:
            return plan
        quotas = self.plan_of(placement, context, each_micro_batch=True, tokens_ED=tokens_ED)
        return fastest((plan, quotas), counts_DE, context, times=1)
