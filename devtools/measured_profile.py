"""Costs of a layer for tests and benchmarks of plans."""

from megatron_fssdp.planning.cost.cost_model import ClusterCost, LinkCost
from megatron_fssdp.planning.cost.layer_profile import LayerProfile

# Experts are cheap to move, so that every strategy that compares costs moves some.
CHEAP_TO_MOVE = LayerProfile(
    non_moe_s=1.0,
    cluster=ClusterCost(LinkCost(0.0, 1e-3), LinkCost(0.0, 2e-3), expert_flops_per_s=1e3),
    expert_bytes=1,
    token_bytes=8,
    flops_per_token=1e3,
    memory_capacity=8,
)
