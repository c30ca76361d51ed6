"""Quotas: assigns every micro-batch's tokens exactly, and places replicas accordingly.

The strategy is ours, after ECHO and UltraEP.
"""

import numpy as np

from megatron_fssdp.config.strategy.shipped_settings import QuotaSettings
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.quotas import quota_assignment
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.measured_replicas import ReplicasAfterGate
from megatron_fssdp.strategies.plan_seconds import fastest


class QuotaStrategy(ReplicasAfterGate[QuotaSettings]):
    """``quota``: minimizes the highest device load of each micro-batch, if that saves modelled seconds."""

    def after_gate(
        self, context: LayerContext, counts_DE: np.ndarray, plan: LayerPlan, num_micro_batches: int
    ) -> LayerPlan:
        """A plan with the quotas of this micro-batch, if costs are measured and it saves modelled seconds.

        The price of quotas includes the whole gather, because it shares the links with the dispatch that runs
        at the same time and nothing hides it. It also includes the part of the reduction that the compute
        before the layer does not hide in its backward pass.
        """
        if context.profile is None:
            return plan
        slots = self.slots(context)
        tokens_ED = quota_assignment(context.owner_E, counts_DE, context.topology, slots=slots)
        present_ED = plan.placement.present_ED | (tokens_ED > 0)
        placement = ExpertPlacement(context.owner_E, present_ED)
        if not placement.num_replicas:
            return plan
        quotas = self.plan_of(placement, context, each_micro_batch=True, tokens_ED=tokens_ED)
        return fastest((plan, quotas), counts_DE, context)
