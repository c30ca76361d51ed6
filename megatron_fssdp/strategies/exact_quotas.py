"""Quotas: every micro-batch's tokens assigned exactly, experts follow (ours, after ECHO and UltraEP)."""

import numpy as np

from megatron_fssdp.config.strategy_settings import QuotaSettings
from megatron_fssdp.planning import cost_model
from megatron_fssdp.planning.held_replicas import ReplicaLife
from megatron_fssdp.planning.layer_profile import LayerProfile
from megatron_fssdp.planning.layer_traffic import DispatchTraffic, dispatch_traffic, quota_traffic
from megatron_fssdp.planning.load_history import LoadHistory
from megatron_fssdp.planning.placement import ExpertPlacement
from megatron_fssdp.planning.quota_planner import quota_assignment, quota_dispatch
from megatron_fssdp.planning.transfer_plan import two_level_transfer
from megatron_fssdp.strategies.fixed_owners import MeasuredReplicas
from megatron_fssdp.strategies.strategy import LayerContext, LayerPlan


class ExactQuotas(MeasuredReplicas[QuotaSettings]):
    """``quota``: the lowest ceiling of all devices' loads, if its critical path is shorter."""

    window = 1
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
        transfer = two_level_transfer(placement, topology)
        transfer_s = cost_model.transfer_s(transfer, profile.expert_bytes, topology, profile.cluster)
        hidden_s = cost_model.BACKWARD_PER_FORWARD * profile.non_moe_s
        moved_s = transfer_s + cost_model.exposed_s(transfer_s, hidden_s)
        plain = dispatch_traffic("even", counts_DE, plan.placement, topology)
        quotas = quota_traffic(quota_dispatch(tokens_ED, counts_DE, topology))
        if _layer_s(quotas, profile) + moved_s >= _layer_s(plain, profile):
            return plan
        return LayerPlan(placement, transfer, each_micro_batch=True, tokens_ED=tokens_ED)


def _layer_s(traffic: DispatchTraffic, profile: LayerProfile) -> float:
    busiest, cluster = traffic.busiest, profile.cluster
    return cost_model.layer_s(
        all_to_all_s=cost_model.link_time_s(busiest.near, busiest.far_of_node, profile.token_bytes, cluster),
        expert_forward_s=cost_model.expert_forward_s(traffic.tokens_D, profile.flops_per_token, cluster),
        exposed_gather_s=0.0,
        exposed_reduce_s=0.0,
    )
