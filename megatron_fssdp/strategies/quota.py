"""Quotas: every micro-batch's tokens assigned exactly, experts follow (ours, after ECHO and UltraEP)."""

import numpy as np

from megatron_fssdp.config.strategy_settings import QuotaSettings
from megatron_fssdp.planning.balanced.quota_planner import quota_assignment
from megatron_fssdp.planning.loads.load_history import LoadHistory
from megatron_fssdp.planning.memory.held_replicas import ReplicaLife
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.transfer.transfer_plan import two_level_transfer
from megatron_fssdp.strategies.measured_replicas import MeasuredReplicas
from megatron_fssdp.strategies.plan_seconds import plan_seconds
from megatron_fssdp.strategies.strategy import LayerContext, LayerPlan


class QuotaStrategy(MeasuredReplicas[QuotaSettings]):
    """``quota``: the lowest ceiling of all devices' loads, if its critical path is shorter."""

    replica_life = ReplicaLife.MICRO_BATCH

    def before_gate(self, context: LayerContext, history: LoadHistory) -> LayerPlan:
        """Nothing is known yet."""
        return LayerPlan.owners_only(context, each_micro_batch=True)

    def after_gate(
        self, context: LayerContext, counts_DE: np.ndarray, plan: LayerPlan, num_micro_batches: int
    ) -> LayerPlan:
        """The quotas of this micro-batch, once costs are measured and if they pay.

        What they cost: a gather that nothing hides, because it shares the links with the dispatch beside
        it, and of the reduction what the compute before the layer does not hide in its backward pass.
        """
        profile, topology = context.profile, context.topology
        if profile is None:
            return plan
        tokens_ED = quota_assignment(context.owner_E, counts_DE, topology, slots=self.slots(context))
        present_ED = plan.placement.present_ED | (tokens_ED > 0)
        placement = ExpertPlacement(context.owner_E, present_ED)
        if not placement.num_replicas:
            return plan
        quotas = LayerPlan(
            placement,
            two_level_transfer(placement, topology),
            gather_ahead=self.settings.overlap,
            each_micro_batch=True,
            tokens_ED=tokens_ED,
        )
        saves = plan_seconds(quotas, counts_DE, context) < plan_seconds(plan, counts_DE, context)
        return quotas if saves else plan
