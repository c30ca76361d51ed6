"""Exact quotas of tokens for each micro-batch, and replicas that follow them (ours).

Shape letters: D devices, E experts.
"""

import numpy as np

from megatron_fssdp.planning.quotas import quota_assignment
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.plan_price import fastest
from megatron_fssdp.strategies.quota import QuotaSettings
from megatron_fssdp.strategies.strategy import ReplicasAfterGate


class QuotaStrategy(ReplicasAfterGate[QuotaSettings]):
    """``quota``: minimizes the highest device load of each micro-batch (ours, after ECHO and UltraEP)."""

    def exact_plan(self, context: LayerContext, counts_DE: np.ndarray, plan: LayerPlan) -> LayerPlan:
        """A plan with the quotas of this micro-batch, if it saves modelled seconds."""
        slots = self.slots(context)
        tokens_ED = quota_assignment(context.owner_E, counts_DE, context.topology, slots=slots)
        quotas = self.plan_by_quotas(tokens_ED, context)
        return fastest((plan, quotas), counts_DE, context, times=1) if len(quotas.transfer.table) else plan
