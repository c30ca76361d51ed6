import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.planning.balanced.priced_materialization import (
    LEAST_SAVING,
    LayerPrice,
    priced_materialization,
    replicated_experts,
)
from megatron_fssdp.planning.cost import cost_model
from megatron_fssdp.planning.cost.cost_model import ClusterCost, LinkCost
from megatron_fssdp.planning.cost.layer_profile import LayerProfile
from megatron_fssdp.planning.placement.placement import ExpertPlacement, even_owners
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.transfer.transfer_plan import two_level_transfer

# Two nodes of two devices, two experts each; every device sends 8 pairs, half of them to expert 0.
TOPOLOGY, OWNERS = Topology.uniform(4, 2), even_owners(8, 4)
HOT = np.tile([4, 1, 1, 1, 1, 0, 0, 0], (4, 1))
# A pair takes a second between nodes and inside them, or on an expert; an expert takes 2.
PROFILE = LayerProfile(
    non_moe_s=0.0,
    cluster=ClusterCost(LinkCost(0.0, 1.0), LinkCost(0.0, 1.0), expert_flops_per_s=1.0),
    expert_bytes=2,
    token_bytes=1,
    flops_per_token=1.0,
    memory_capacity=8,
)


def plan(load_DE: np.ndarray, **changes: object) -> ExpertPlacement:
    profile = dataclasses.replace(PROFILE, **changes)  # type: ignore[arg-type]
    return priced_materialization(OWNERS, load_DE, TOPOLOGY, slots=2, profile=profile)


def test_price_by_hand() -> None:
    """Plain: device 0 has 20 pairs, and node 0 gets 7 from each device of the other node."""
    price = LayerPrice(HOT, TOPOLOGY, PROFILE)
    plain = ExpertPlacement.owners_only(OWNERS, 4)
    assert price.seconds(plain) == 4 * 14 + 3 * 20
    # Expert 0 on device 2 as well: node 0 gets 3 from each device of the other node. Devices 0 and 2 have
    # 12 pairs each: 8 of expert 0 and 4 of another one.
    shared = plain.with_replicas([(0, 2)])
    assert exposed_s(price, shared) == (2, 2)
    assert price.seconds(shared) == 4 * 6 + 3 * 12 + 2 + 2


def exposed_s(price: LayerPrice, placement: ExpertPlacement) -> tuple[float, float]:
    gather_s, reduce_s = price.exposed_s(placement, replicated_experts(placement))
    assert gather_s[0] == reduce_s[0] == 0  # the owners alone
    return float(gather_s[-1]), float(reduce_s[-1])


def test_compute_before_the_layer_hides_transfers() -> None:
    shared = ExpertPlacement.owners_only(OWNERS, 4).with_replicas([(0, 2)])
    halfway = LayerPrice(HOT, TOPOLOGY, dataclasses.replace(PROFILE, non_moe_s=0.5))
    assert exposed_s(halfway, shared) == (1.5, 1.0)
    wider = dataclasses.replace(PROFILE, non_moe_s=0.5, gradient_bytes=4)
    assert exposed_s(LayerPrice(HOT, TOPOLOGY, wider), shared) == (1.5, 3.0)
    again = dataclasses.replace(PROFILE, non_moe_s=0.5, num_micro_batches=3)
    assert exposed_s(LayerPrice(HOT, TOPOLOGY, again, rematerialize=True), shared) == (3 * 1.5, 3 * 3.0)


@given(seed=st.integers(0, 10_000), alpha_s=st.sampled_from([0.0, 3.0]))
def test_price_is_that_of_exact_dispatch_and_plan(seed: int, alpha_s: float) -> None:
    """Up to the rounding of tokens: below one pair an expert and holder on every link and device."""
    rng = np.random.default_rng(seed)
    counts_DE = rng.poisson(rng.gamma(0.5, 200, 8), (4, 8)) * 12  # split over 2, 3 or 4 without remainder
    placement = ExpertPlacement.owners_only(OWNERS, 4).with_replicas(
        [(e, d) for e in range(8) for d in range(4) if OWNERS[e] != d and rng.random() < 0.3]
    )
    profile = dataclasses.replace(
        PROFILE, cluster=ClusterCost(LinkCost(alpha_s, 1.0), LinkCost(2 * alpha_s, 3.0), 1.0)
    )
    dispatched_s = cost_model.dispatched_layer_s(
        counts_DE, placement, TOPOLOGY, cluster=profile.cluster, token_bytes=1, flops_per_token=1.0
    )
    plan = two_level_transfer(placement, TOPOLOGY)
    transfer_s = cost_model.transfer_s(plan, profile.expert_bytes, TOPOLOGY, profile.cluster)
    price_s = LayerPrice(counts_DE, TOPOLOGY, profile).seconds(placement)
    assert price_s == pytest.approx(dispatched_s + 2 * transfer_s, rel=1e-9)


@given(seed=st.integers(0, 10_000))
def test_price_of_first_is_that_of_a_placement_of_those_alone(seed: int) -> None:
    """With one device a node, where no leader is chosen, to the last digits."""
    rng = np.random.default_rng(seed)
    load_DE = rng.gamma(0.5, 10, (4, 8))
    topology = Topology.uniform(4, 1)
    pairs = [(e, d) for e in range(8) for d in range(4) if OWNERS[e] != d and rng.random() < 0.3]
    owners_only = ExpertPlacement.owners_only(OWNERS, 4)
    placement = owners_only.with_replicas(pairs)
    experts = rng.permutation(replicated_experts(placement))
    price = LayerPrice(load_DE, topology, dataclasses.replace(PROFILE, non_moe_s=1.0))
    each_s = [
        price.seconds(owners_only.with_replicas([pair for pair in pairs if pair[0] in experts[:number]]))
        for number in range(len(experts) + 1)
    ]
    np.testing.assert_allclose(price.seconds_of_first(placement, experts), each_s, rtol=1e-9)


def replicated(placement: ExpertPlacement) -> list[int]:
    return np.flatnonzero(placement.present_ED.sum(axis=1) > 1).tolist()


def test_no_more_experts_than_pay() -> None:
    assert replicated(plan(HOT, expert_bytes=2)) == [0, 1]
    assert replicated(plan(HOT, expert_bytes=8)) == [0]
    assert replicated(plan(HOT, expert_bytes=100)) == []
    assert 0 in replicated(plan(HOT, expert_bytes=100, non_moe_s=1e6))


def test_balanced_loads_stay_where_they_are() -> None:
    assert plan(np.ones((4, 8))).num_replicas == 0
    assert plan(np.zeros((4, 8))).num_replicas == 0


@given(
    seed=st.integers(0, 10_000),
    non_moe_s=st.sampled_from([0.0, 3.0, 100.0]),
    expert_bytes=st.sampled_from([1, 5, 50]),
    rematerialize=st.booleans(),
)
def test_never_dearer_than_plain_expert_parallelism(
    seed: int, non_moe_s: float, expert_bytes: int, rematerialize: bool
) -> None:
    counts_DE = np.random.default_rng(seed).poisson(np.random.default_rng(seed).gamma(0.5, 10, 8), (4, 8))
    profile = dataclasses.replace(PROFILE, non_moe_s=non_moe_s, expert_bytes=expert_bytes)
    found = priced_materialization(
        OWNERS,
        counts_DE.astype(float),
        TOPOLOGY,
        slots=2,
        profile=profile,
        rematerialize=rematerialize,
    )
    assert found.replicas_per_device_D.max() <= 2
    price = LayerPrice(counts_DE, TOPOLOGY, profile, rematerialize)
    plain_s = price.seconds(ExpertPlacement.owners_only(OWNERS, 4))
    if found.num_replicas:
        assert price.seconds(found) <= (1 - LEAST_SAVING) * plain_s
