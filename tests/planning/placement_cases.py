"""Hypothesis strategies and slow references shared by the planning tests."""

import numpy as np
from hypothesis import strategies as st

from megatron_fssdp.planning.cost.cost_model import ClusterCost, LinkCost
from megatron_fssdp.planning.cost.layer_profile import LayerProfile
from megatron_fssdp.planning.cost.link_seconds import BusiestLinks
from megatron_fssdp.planning.loads import LoadHistory
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.replica_life import ReplicaLife
from megatron_fssdp.planning.slot_tables import SlotTable
from megatron_fssdp.planning.transfer.transfer_plan import two_level_transfer
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.plan_price import plan_price
from tests.drawn_examples import SEEDS

# A token takes a second to compute and next to nothing to send (probabilities and router counts, some bytes
# at a microsecond each). Parameters take a second to send.
SLOW_EXPERTS = LayerProfile(
    non_moe_s=1.0,
    cluster=ClusterCost(LinkCost(0, 1e-6), LinkCost(0, 1e-6), expert_flops_per_s=1.0),
    expert_bytes=10**6,
    token_bytes=0,
    flops_per_token=1.0,
    memory_capacity=8,
)


@st.composite
def topologies(draw, max_devices=8):
    num_devices = draw(st.integers(1, max_devices))
    labels = draw(st.lists(st.integers(0, 3), min_size=num_devices, max_size=num_devices))
    return Topology.from_labels(labels)


@st.composite
def owned_layers(draw, max_experts=10):
    """Draws (topology, owner_E)."""
    topology = draw(topologies())
    num_experts = draw(st.integers(1, max_experts))
    devices = st.integers(0, topology.num_devices - 1)
    owners = draw(st.lists(devices, min_size=num_experts, max_size=num_experts))
    return topology, np.array(owners)


@st.composite
def placements(draw):
    """Draws (topology, placement) with random replicas."""
    topology, owner_E = draw(owned_layers())
    rng = np.random.default_rng(draw(SEEDS))
    share = draw(st.sampled_from([0.0, 0.2, 0.6, 1.0]))
    present_ED = rng.random((owner_E.size, topology.num_devices)) < share
    present_ED[np.arange(owner_E.size), owner_E] = True
    return topology, ExpertPlacement(owner_E, present_ED)


def slots_of(placement):
    """Slots for as many replicas as a device has at most."""
    return SlotTable.of(placement, int(placement.replicas_per_device_D.max()))


def random_counts_DE(seed, num_devices, num_experts, most=40):
    """Skewed counts with zeros, int64 [D, E]."""
    rng = np.random.default_rng(seed)
    popularity_E = rng.lognormal(sigma=1.5, size=num_experts)
    popularity_E *= rng.random(num_experts) < 0.8
    return rng.poisson(popularity_E * most / 4, size=(num_devices, num_experts)).astype(np.int64)


def history_of(context, *counts, window=5):
    """The loads of a layer's iterations."""
    history = LoadHistory(window, context.num_devices, context.num_experts)
    for counts_DE in counts:
        history.append(counts_DE)
    return history


def brute_force_dispatch_DED(counts_DE, placement, topology):
    """The dispatch tensor of whole tokens, from the definition."""
    num_devices, num_experts = counts_DE.shape
    dispatch = np.zeros((num_devices, num_experts, num_devices), dtype=np.int64)
    for source in range(num_devices):
        for expert in range(num_experts):
            holders = [d for d in range(num_devices) if placement.present_ED[expert, d]]
            node = topology.node_of_device[source]
            near = [d for d in holders if topology.node_of_device[d] == node]
            chosen = [source] if source in holders else near or holders
            share, rest = divmod(int(counts_DE[source, expert]), len(chosen))
            for holder in chosen:
                dispatch[source, expert, holder] += share
            for i in range(rest):
                dispatch[source, expert, chosen[(source + expert + i) % len(chosen)]] += 1
    return dispatch


def placement_price(counts_DE, placement, topology, profile, life=ReplicaLife.ITERATION):
    """The price of a placement under even dispatch, with as many micro-batches as the profile's."""
    ways = {"rematerialize": life is ReplicaLife.LAYER_PASS, "resident": life is ReplicaLife.RESIDENT}
    ways["each_micro_batch"] = life is ReplicaLife.MICRO_BATCH
    plan = LayerPlan(placement, two_level_transfer(placement, topology), **ways)
    context = LayerContext(1, placement.owner_E, topology, profile)
    return plan_price(plan, counts_DE, context, num_micro_batches=profile.num_micro_batches)


def pairs_traffic(traffic_DD, topology):
    """Units on the busiest links, from what each device sends to each, ``[D, D]``, itself not counted."""
    node_D = topology.node_of_device_D
    same_DD = node_D[:, None] == node_D[None, :]
    near_DD = np.where(same_DD & ~np.eye(len(node_D), dtype=bool), traffic_DD, 0)
    far_DD = np.where(same_DD, 0, traffic_DD)
    far_out_D, far_in_D = far_DD.sum(axis=1), far_DD.sum(axis=0)
    return BusiestLinks(
        float(max(near_DD.sum(axis=1).max(), near_DD.sum(axis=0).max())),
        float(max(far_out_D.max(), far_in_D.max())),
        float(max(np.bincount(node_D, weights=far_out_D).max(), np.bincount(node_D, weights=far_in_D).max())),
        float(far_out_D.sum()) / topology.num_nodes,
    )
