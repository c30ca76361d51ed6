import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fssdp.planning.balanced.priced_materialization import (
    LEAST_SAVING,
    PlacementPricer,
    priced_materialization,
    replicated_experts,
)
from megatron_fssdp.planning.cost.cost_model import ClusterCost, LinkCost
from megatron_fssdp.planning.cost.layer_profile import LayerProfile
from megatron_fssdp.planning.cost.layer_seconds import placement_seconds
from megatron_fssdp.planning.memory.held_replicas import ReplicaLife
from megatron_fssdp.planning.placement.placement import ExpertPlacement, even_owners
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.transfer.message_size import FixedMessages

# Two nodes of two devices, two experts each; every device sends 8 pairs, half of them to expert 0.
TOPOLOGY, OWNERS = Topology.uniform(4, 2), even_owners(8, 4)
HOT = np.tile([4, 1, 1, 1, 1, 0, 0, 0], (4, 1))
MEGA = 10**6
# A pair takes a second between nodes and inside them, or on an expert; an expert takes 2. Probabilities and
# router counts, some bytes at a microsecond each, take next to nothing.
PROFILE = LayerProfile(
    non_moe_s=0.0,
    cluster=ClusterCost(LinkCost(0.0, 1e-6), LinkCost(0.0, 1e-6), expert_flops_per_s=1.0),
    expert_bytes=2 * MEGA,
    token_bytes=MEGA,
    flops_per_token=1.0,
    memory_capacity=8,
)
NEARLY = 1e-3
"""Seconds that probabilities and router counts take at most in the layers below."""


def plan(load_DE: np.ndarray, **changes: object) -> ExpertPlacement:
    profile = dataclasses.replace(PROFILE, **changes)  # type: ignore[arg-type]
    return priced_materialization(OWNERS, load_DE, TOPOLOGY, slots=2, profile=profile)


def test_prices_equal_those_worked_out_by_hand() -> None:
    """Under plain expert parallelism device 0 has 20 pairs, and node 0 gets 7 from each device of node 1."""
    price = PlacementPricer(HOT, TOPOLOGY, PROFILE)
    plain = ExpertPlacement.owners_only(OWNERS, 4)
    assert price.seconds(plain) == pytest.approx(4 * 14 + 3 * 20, abs=NEARLY)
    # Expert 0 on device 2 as well: node 0 gets 3 from each device of the other node. Devices 0 and 2 have
    # 12 pairs each: 8 of expert 0 and 4 of another one.
    shared = plain.with_replicas([(0, 2)])
    assert exposed_s(price, shared) == pytest.approx((2, 2), abs=NEARLY)
    assert price.seconds(shared) == pytest.approx(4 * 6 + 3 * 12 + 2 + 2, abs=NEARLY)


def exposed_s(price: PlacementPricer, placement: ExpertPlacement) -> tuple[float, float]:
    found = price.price_of_first(placement, replicated_experts(placement))
    assert found.gather_s[0] == found.reduce_s[0] == 0  # the owners alone
    return float(found.gather_s[-1]), float(found.reduce_s[-1])


def test_compute_before_the_layer_hides_transfers() -> None:
    shared = ExpertPlacement.owners_only(OWNERS, 4).with_replicas([(0, 2)])
    halfway = PlacementPricer(HOT, TOPOLOGY, dataclasses.replace(PROFILE, non_moe_s=0.5))
    assert exposed_s(halfway, shared) == pytest.approx((1.5, 1.0), abs=NEARLY)
    in_turn = dataclasses.replace(halfway, hides=False)
    assert exposed_s(in_turn, shared) == (2.0, 2.0)
    wider = dataclasses.replace(PROFILE, non_moe_s=0.5, gradient_bytes=4 * MEGA)
    assert exposed_s(PlacementPricer(HOT, TOPOLOGY, wider), shared) == pytest.approx((1.5, 3.0), abs=NEARLY)


def test_rematerialized_replicas_are_gathered_twice_and_reduced_once_a_micro_batch() -> None:
    """Both gradient and weights travel in 2 s each, beside 1 s of backward compute."""
    shared = ExpertPlacement.owners_only(OWNERS, 4).with_replicas([(0, 2)])
    # Gradients of a single micro-batch travel in the parameters' data type, whatever sums would take.
    again = dataclasses.replace(PROFILE, non_moe_s=0.5, num_micro_batches=3, gradient_bytes=4 * MEGA)
    price = PlacementPricer(HOT, TOPOLOGY, again, rematerialize=True)
    assert exposed_s(price, shared) == pytest.approx((3 * (1.5 + 2.0), 3 * 1.0), abs=NEARLY)


@settings(deadline=None)
@given(seed=st.integers(0, 10_000), alpha_s=st.sampled_from([0.0, 3.0]), rematerialize=st.booleans())
def test_the_price_equals_that_of_exact_dispatch_and_transfer(
    seed: int, alpha_s: float, rematerialize: bool
) -> None:
    """Both agree up to rounding: less than one pair for each expert and holder on every link and device."""
    rng = np.random.default_rng(seed)
    counts_DE = rng.poisson(rng.gamma(0.5, 200, 8), (4, 8)) * 12  # split over 2, 3 or 4 without remainder
    placement = ExpertPlacement.owners_only(OWNERS, 4).with_replicas(
        [(e, d) for e in range(8) for d in range(4) if OWNERS[e] != d and rng.random() < 0.3]
    )
    profile = dataclasses.replace(
        PROFILE,
        cluster=ClusterCost(LinkCost(alpha_s, 1e-6), LinkCost(2 * alpha_s, 3e-6), 1.0),
        num_micro_batches=2,
        messages=FixedMessages(MEGA),
    )
    life = ReplicaLife.LAYER_PASS if rematerialize else ReplicaLife.ITERATION
    exact = placement_seconds(counts_DE, placement, TOPOLOGY, profile, life)
    price_s = PlacementPricer(counts_DE, TOPOLOGY, profile, rematerialize).seconds(placement)
    assert price_s == pytest.approx(float(exact.moe_s), rel=1e-9)


@given(seed=st.integers(0, 10_000))
def test_the_price_of_the_first_experts_equals_that_of_their_own_placement(seed: int) -> None:
    """With one device in each node there are no leaders, and both agree to the last digits."""
    rng = np.random.default_rng(seed)
    load_DE = rng.gamma(0.5, 10, (4, 8))
    topology = Topology.uniform(4, 1)
    pairs = [(e, d) for e in range(8) for d in range(4) if OWNERS[e] != d and rng.random() < 0.3]
    owners_only = ExpertPlacement.owners_only(OWNERS, 4)
    placement = owners_only.with_replicas(pairs)
    experts = rng.permutation(replicated_experts(placement))
    price = PlacementPricer(load_DE, topology, dataclasses.replace(PROFILE, non_moe_s=1.0))
    each_s = [
        price.seconds(owners_only.with_replicas([pair for pair in pairs if pair[0] in experts[:number]]))
        for number in range(len(experts) + 1)
    ]
    np.testing.assert_allclose(price.price_of_first(placement, experts).moe_s, each_s, rtol=1e-9)


def replicated(placement: ExpertPlacement) -> list[int]:
    return np.flatnonzero(placement.present_ED.sum(axis=1) > 1).tolist()


def test_only_experts_that_pay_are_replicated() -> None:
    assert replicated(plan(HOT, expert_bytes=2 * MEGA)) == [0, 1]
    assert replicated(plan(HOT, expert_bytes=8 * MEGA)) == [0]
    assert replicated(plan(HOT, expert_bytes=100 * MEGA)) == []
    assert 0 in replicated(plan(HOT, expert_bytes=100 * MEGA, non_moe_s=1e6))


def test_balanced_loads_change_nothing() -> None:
    assert plan(np.ones((4, 8))).num_replicas == 0
    assert plan(np.zeros((4, 8))).num_replicas == 0


@given(
    seed=st.integers(0, 10_000),
    non_moe_s=st.sampled_from([0.0, 3.0, 100.0]),
    expert_bytes=st.sampled_from([1, 5, 50]),
    rematerialize=st.booleans(),
)
def test_a_plan_never_costs_more_than_plain_expert_parallelism(
    seed: int, non_moe_s: float, expert_bytes: int, rematerialize: bool
) -> None:
    counts_DE = np.random.default_rng(seed).poisson(np.random.default_rng(seed).gamma(0.5, 10, 8), (4, 8))
    profile = dataclasses.replace(PROFILE, non_moe_s=non_moe_s, expert_bytes=expert_bytes * MEGA)
    found = priced_materialization(
        OWNERS,
        counts_DE.astype(float),
        TOPOLOGY,
        slots=2,
        profile=profile,
        rematerialize=rematerialize,
    )
    assert found.replicas_per_device_D.max() <= 2
    price = PlacementPricer(counts_DE, TOPOLOGY, profile, rematerialize)
    plain_s = price.seconds(ExpertPlacement.owners_only(OWNERS, 4))
    if found.num_replicas:
        assert price.seconds(found) <= (1 - LEAST_SAVING) * plain_s
