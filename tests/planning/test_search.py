import dataclasses

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_fssdp.planning.cost.cost_model import ClusterCost, LinkCost
from megatron_fssdp.planning.dispatch.token_dispatch import plan_dispatch
from megatron_fssdp.planning.placement.placement import ExpertPlacement, even_owners
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.replica_life import ReplicaLife
from megatron_fssdp.planning.search import LEAST_SAVING, layer_search, plan_materialization
from megatron_fssdp.planning.transfer.message_size import CUDA_MESSAGES, FixedMessages
from megatron_fssdp.strategies.fastermoe.fastermoe_strategy import ShadowingCosts, select_shadows
from tests.drawn_examples import SEEDS, examples
from tests.support.random_placement import with_replicas

from .placement_cases import SLOW_EXPERTS, owned_layers, placement_price, random_counts_DE

# Two nodes of two devices, two experts each; every device sends 8 pairs, half of them to expert 0.
TOPOLOGY, OWNERS = Topology.uniform(4, 2), even_owners(8, 4)
HOT = np.tile([4, 1, 1, 1, 1, 0, 0, 0], (4, 1))
MEGA = 10**6
# A pair takes a second between nodes and inside them, or on an expert; an expert takes 2.
PROFILE = dataclasses.replace(SLOW_EXPERTS, non_moe_s=0.0, expert_bytes=2 * MEGA, token_bytes=MEGA)
PLAIN = ExpertPlacement.owners_only(OWNERS, 4)


LIVES = st.sampled_from([ReplicaLife.ITERATION, ReplicaLife.LAYER_PASS, ReplicaLife.MICRO_BATCH])


def search_of(owner_E, load_DE, topology, profile, life=ReplicaLife.ITERATION):
    return layer_search(owner_E, load_DE, topology, profile, life=life, hides=True)


def max_load(load_DE, placement, topology):
    return float(plan_dispatch("even", load_DE, placement, topology).device_tokens_D.max())


@st.composite
def profiles(draw):
    """Profiles in which compute, links and transfers take similar times, so that each of them can decide."""
    near_s, far_s = draw(st.sampled_from([(1e-6, 1e-6), (1e-7, 1e-6), (1e-6, 3e-6)]))
    nics = draw(st.sampled_from([0, 1, 2, 8]))
    alpha_s = draw(st.sampled_from([0.0, 3.0]))
    return dataclasses.replace(
        PROFILE,
        non_moe_s=draw(st.sampled_from([0.0, 3.0, 100.0])),
        cluster=ClusterCost(
            LinkCost(alpha_s, near_s),
            LinkCost(2 * alpha_s, far_s),
            1.0,
            LinkCost(2 * alpha_s, nics * far_s),
        ),
        expert_bytes=MEGA * draw(st.sampled_from([1, 5, 50])),
        gradient_bytes=MEGA * draw(st.sampled_from([2, 10])),
        num_micro_batches=draw(st.integers(1, 3)),
        messages=draw(st.sampled_from([FixedMessages(MEGA), CUDA_MESSAGES])),
    )


@examples(100)
@given(seed=SEEDS, profile=profiles(), num_nodes=st.sampled_from([1, 2, 4]), life=LIVES)
def test_the_price_equals_that_of_exact_dispatch_and_transfer(seed, profile, num_nodes, life):
    """Counts are split without remainder."""
    rng = np.random.default_rng(seed)
    counts_DE = rng.poisson(rng.gamma(0.5, 200, 8), (4, 8)) * 12
    topology = Topology.uniform(4, num_nodes)
    placement = with_replicas(
        PLAIN, [(e, d) for e in range(8) for d in range(4) if OWNERS[e] != d and rng.random() < 0.3]
    )
    exact_s = placement_price(counts_DE, placement, topology, profile, life).moe_s
    search = search_of(OWNERS, counts_DE, topology, profile, life)
    assert search.seconds(placement) == pytest.approx(exact_s, rel=1e-9)


def shadowed(counts_DE, owner_E, profile, slots):
    """FasterMoE's choice, at most ``slots`` experts."""
    costs = ShadowingCosts(
        profile.token_bytes,
        profile.expert_bytes,
        profile.flops_per_token,
        profile.cluster.expert_flops_per_s,
        1 / profile.cluster.inter.beta_s_per_byte,
    )
    plain = ExpertPlacement.owners_only(owner_E, len(counts_DE))
    experts = select_shadows(owner_E, counts_DE, costs, most=slots)
    return with_replicas(plain, [(e, d) for e in experts for d in range(len(counts_DE))])


# Each device needs experts that all sources use, and one replica alone saves nothing.
SHADOWS_ARE_BEST = dataclasses.replace(
    PROFILE,
    cluster=ClusterCost(LinkCost(0.0, 1e-6), LinkCost(0.0, 1e-6), 1.0, LinkCost(0.0, 0.0)),
    expert_bytes=MEGA,
    gradient_bytes=2 * MEGA,
    messages=FixedMessages(MEGA),
)


@example(
    (Topology((0, 0, 0, 0, 0, 0, 1)), np.array([1, 0, 0, 0, 0, 0, 1, 0])),
    *(31371, SHADOWS_ARE_BEST, 3, ReplicaLife.ITERATION),
)
@examples(150)
@given(owned_layers(), SEEDS, profiles(), st.integers(0, 3), LIVES)
def test_a_plan_keeps_its_limits_and_is_not_worse_than_simpler_choices(case, seed, profile, slots, life):
    """Owners only, and FasterMoE's placement. Less than LEAST_SAVING counts as no saving."""
    topology, owner_E = case
    counts_DE = random_counts_DE(seed, topology.num_devices, owner_E.size)
    search = search_of(owner_E, counts_DE, topology, profile, life)
    best, _ = search.best_placement(slots=slots)
    assert best.replicas_per_device_D.max() <= slots
    plain = ExpertPlacement.owners_only(owner_E, topology.num_devices)
    best_s = search.seconds(best)
    if best.num_replicas:
        assert best_s <= (1 - LEAST_SAVING) * search.seconds(plain)
    least = 0.0 if best.num_replicas else LEAST_SAVING
    assert (1 - least) * best_s <= search.seconds(shadowed(counts_DE, owner_E, profile, slots)) * (1 + 1e-9)


@examples(60)
@given(owned_layers(), SEEDS, profiles(), st.integers(1, 3), st.booleans())
def test_a_search_is_not_worse_than_the_placement_that_it_gets(case, seed, profile, slots, is_quick):
    topology, owner_E = case
    searches = [
        search_of(owner_E, counts_DE, topology, profile)
        for counts_DE in (random_counts_DE(seed + i, topology.num_devices, owner_E.size) for i in range(2))
    ]
    start, _ = searches[0].best_placement(slots=slots)
    best, best_s = searches[1].best_placement(slots=slots, start=start, is_quick=is_quick)
    assert best.replicas_per_device_D.max() <= slots
    assert best_s == pytest.approx(searches[1].seconds(best), rel=1e-9)
    assert best_s <= searches[1].seconds(start) * (1 + 1e-9)


@pytest.mark.parametrize("hot_device", [False, True])
def test_a_quick_search_finds_nearly_as_much(hot_device):
    topology, owner_E = Topology.uniform(8, 2), even_owners(32, 8)
    profile = dataclasses.replace(PROFILE, token_bytes=MEGA // 4, expert_bytes=20 * MEGA)
    ratios = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        weight_E = rng.lognormal(sigma=1.0, size=32) * np.where(hot_device & (owner_E == 3), 10.0, 1.0)
        search = search_of(owner_E, rng.multinomial(4096, weight_E / weight_E.sum(), 8), topology, profile)
        (_, best_s), (_, quick_s) = (search.best_placement(slots=2, is_quick=way) for way in (False, True))
        assert best_s < 0.95 * search.plain_s
        ratios.append(quick_s / best_s)
    assert np.mean(ratios) < 1.03
    assert max(ratios) < 1.25


@examples(100)
@given(owned_layers(), SEEDS, st.integers(0, 11), st.integers(0, 4))
def test_without_costs_the_highest_load_falls(case, seed, overlap_degree, slots):
    topology, owner_E = case
    counts_DE = random_counts_DE(seed, topology.num_devices, owner_E.size)
    limits = {"overlap_degree": overlap_degree, "slots": slots}
    plan = plan_materialization(owner_E, counts_DE, topology, **limits)
    np.testing.assert_array_equal(plan.owner_E, owner_E)
    assert plan.replicas_per_device_D.max() <= slots
    assert (np.count_nonzero(plan.present_ED, axis=1) > 1).sum() <= overlap_degree
    plain = ExpertPlacement.owners_only(owner_E, topology.num_devices)
    highest = max_load(counts_DE, plain, topology)
    assert max_load(counts_DE, plan, topology) <= highest * (1 + 1e-9)
    for same_counts in (np.asfortranarray(counts_DE), counts_DE.astype(np.float64)):
        assert plan_materialization(owner_E, same_counts, topology, **limits) == plan


@pytest.mark.parametrize(("num_experts", "num_devices"), [(16, 8), (64, 32)])
def test_skewed_loads_end_near_balance(num_experts, num_devices):
    topology, owner_E = Topology.uniform(num_devices, num_devices // 8), even_owners(num_experts, num_devices)
    for seed in range(5):
        rng = np.random.default_rng(seed)
        popularity_E = rng.lognormal(sigma=1.0, size=num_experts)
        counts_DE = rng.multinomial(8192, popularity_E / popularity_E.sum(), size=num_devices)
        plan = plan_materialization(owner_E, counts_DE, topology, overlap_degree=num_experts, slots=2)
        assert max_load(counts_DE, plan, topology) <= 1.12 * counts_DE.sum() / num_devices, seed


def test_a_start_beyond_the_limits_is_refused():
    """The kernel would write beyond its arrays."""
    search = search_of(OWNERS, HOT, TOPOLOGY, PROFILE)
    full = with_replicas(PLAIN, [(0, 2), (1, 2)])
    assert search.best_placement(slots=2, start=full)
    with pytest.raises(ValueError, match="at most 1 replicas"):
        search.best_placement(slots=1, start=full)
    moved = ExpertPlacement.owners_only(np.roll(OWNERS, 2), 4)
    with pytest.raises(ValueError, match="wanted the layer's owners"):
        search.best_placement(slots=2, start=moved)
