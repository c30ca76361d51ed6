"""What a plan costs: modelled seconds of one layer in an iteration, by measured costs.

One model for every plan, so that strategies can be compared with each other and with doing nothing. The
simulator lays the same pieces out on lanes; here each transfer is charged with what the compute it runs
beside does not hide.

Shape legend: D devices of the expert-parallel group, E experts of a layer.
"""

import numpy as np

from megatron_fssdp.planning.cost import cost_model
from megatron_fssdp.planning.cost.layer_profile import LayerProfile
from megatron_fssdp.planning.memory.held_replicas import ReplicaLife
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.transfer.transfer_plan import TransferPlan, additional_transfer
from megatron_fssdp.strategies.strategy import LayerContext, LayerPlan


def plan_seconds(
    plan: LayerPlan,
    counts_DE: np.ndarray,
    context: LayerContext,
    *,
    num_micro_batches: int = 1,
    planned: LayerPlan | None = None,
) -> float:
    """Seconds of the compute before the layer, all-to-alls, experts and exposed transfers, both passes.

    Args:
        plan: What is executed.
        counts_DE: int64 (token, k) pairs of an iteration by source and expert, ``[D, E]``.
        context: The layer; it has a profile.
        num_micro_batches: Of the iteration; each has its part of the counts.
        planned: What was planned before the gate, if that is not ``plan``.
    """
    profile, topology = context.profile, context.topology
    if profile is None:
        raise ValueError(f"layer {context.layer}: got no profile, wanted measured costs to count with")
    cluster, times = profile.cluster, num_micro_batches
    traffic = plan.traffic(counts_DE, topology, num_micro_batches)
    exchange_s = cost_model.link_time_s(
        traffic.busiest.near, traffic.busiest.far_of_node, profile.token_bytes / times, cluster
    )
    moe_s = cost_model.layer_s(
        all_to_all_s=times * exchange_s,
        expert_forward_s=cost_model.expert_forward_s(traffic.tokens_D, profile.flops_per_token, cluster),
        exposed_gather_s=0.0,
        exposed_reduce_s=0.0,
    )
    before_s = (1 + cost_model.BACKWARD_PER_FORWARD) * times * profile.non_moe_s
    even_experts_s = cost_model.expert_forward_s(
        traffic.tokens_D.mean(keepdims=True) / times, profile.flops_per_token, cluster
    )
    return before_s + moe_s + _exposed_s(plan, planned or plan, context, profile, times, even_experts_s)


def _exposed_s(
    plan: LayerPlan,
    planned: LayerPlan,
    context: LayerContext,
    profile: LayerProfile,
    num_micro_batches: int,
    even_experts_s: float,
) -> float:
    """Seconds of spAG and spRS that nothing hides."""
    if not plan.transfer.edges:
        return 0.0
    topology, life = context.topology, plan.life
    hidden_s = profile.non_moe_s if plan.gather_ahead else 0.0
    if plan.is_split:
        hidden_s += even_experts_s
    hidden_back_s = cost_model.BACKWARD_PER_FORWARD * hidden_s
    gather_s = _transfer_s(planned.transfer, profile.expert_bytes, profile, topology)
    again_s = _transfer_s(plan.transfer, profile.expert_bytes, profile, topology)
    if life is ReplicaLife.MICRO_BATCH:
        # The gather shares the links with the dispatch beside it.
        return num_micro_batches * (again_s + cost_model.exposed_s(again_s, hidden_back_s))
    if life is ReplicaLife.LAYER_PASS:
        # Gathered again and reduced beside the same backward pass, both in the parameters' dtype.
        passes_s = cost_model.exposed_s(gather_s, hidden_s) + cost_model.exposed_s(2 * again_s, hidden_back_s)
        return num_micro_batches * passes_s
    reduce_s = _transfer_s(plan.transfer, profile.reduced_bytes, profile, topology)
    if life is ReplicaLife.LASTING:
        return cost_model.exposed_s(2 * reduce_s, hidden_back_s)
    added_s = 0.0
    if planned is not plan:
        added = additional_transfer(planned.placement, plan.placement, topology)
        added_s = _transfer_s(added, profile.expert_bytes, profile, topology)
    return cost_model.exposed_s(gather_s, hidden_s) + added_s + cost_model.exposed_s(reduce_s, hidden_back_s)


def _transfer_s(
    transfer: TransferPlan, expert_bytes: int, profile: LayerProfile, topology: Topology
) -> float:
    return cost_model.transfer_s(transfer, expert_bytes, topology, profile.cluster)
