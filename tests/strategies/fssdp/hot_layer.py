"""A layer of 16 experts on 8 devices in 4 nodes, whose transfers are cheap."""

import numpy as np

from megatron_fssdp.planning.cost.cost_model import ClusterCost, LinkCost
from megatron_fssdp.planning.cost.layer_profile import LayerProfile
from megatron_fssdp.planning.placement.placement import even_owners
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.strategies.layer_plan import LayerContext

DEVICES, EXPERTS = 8, 16
NEAR, FAR = LinkCost(1e-5, 1 / 1e10), LinkCost(1e-5, 1 / 1e9)
PROFILE = LayerProfile(
    non_moe_s=2e-2,
    cluster=ClusterCost(NEAR, FAR, expert_flops_per_s=1e12),
    expert_bytes=4_000_000,
    token_bytes=4_000,
    flops_per_token=4e6,
    memory_capacity=4,
)
CONTEXT = LayerContext(1, even_owners(EXPERTS, DEVICES), Topology.uniform(DEVICES, 4), PROFILE)


def hot_counts_DE(*hot, pairs=3_000):
    counts_DE = np.full((DEVICES, EXPERTS), 100, np.int64)
    counts_DE[:, list(hot)] += pairs
    return counts_DE
