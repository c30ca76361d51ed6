from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.planning.cost.cost_model import ClusterCost, LinkCost
from megatron_fssdp.planning.cost.layer_seconds import moving_seconds
from megatron_fssdp.planning.placement.placement import ExpertPlacement, even_owners
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.replica_life import ReplicaLife
from megatron_fssdp.strategies.flexmoe import FlexmoeSettings, flexmoe_strategy
from megatron_fssdp.strategies.flexmoe.flexmoe_strategy import FlexmoeStrategy
from megatron_fssdp.strategies.layer_plan import LayerContext
from tests.drawn_examples import SEEDS, examples
from tests.planning.placement_cases import SLOW_EXPERTS, placement_price
from tests.support.random_placement import with_replicas

MEGA = 10**6
# An expert's gradient takes 2 s, its states 20 s.
PROFILE = replace(SLOW_EXPERTS, gradient_bytes=2 * MEGA, owned_bytes=20 * MEGA)
FOUR = Topology.uniform(4, 1)
# Expert 1 has 40 of 64 pairs, every other one 8.
HOT = np.array([[2, 10, 2, 2]] * 4)


def owners_only(num_experts=4, num_devices=4):
    return ExpertPlacement.owners_only(even_owners(num_experts, num_devices), num_devices)


def plan(placement, counts_DE, topology=FOUR, profile=PROFILE, interval=10, slots=2):
    strategy = FlexmoeStrategy(FlexmoeSettings(slots=slots, placement_interval=interval))
    return strategy.replicate(LayerContext(1, placement.owner_E, topology, profile, placement), counts_DE)


def test_there_are_no_replicas_where_they_cost_too_much_or_have_no_slots(monkeypatch):
    dear = replace(PROFILE, owned_bytes=10**6 * MEGA)
    assert plan(owners_only(), HOT, profile=dear) == owners_only()
    monkeypatch.setattr(flexmoe_strategy, "FLEXMOE_THRESHOLD", 1.5)
    before = with_replicas(owners_only(), [(2, 0)])
    assert plan(before, np.full((4, 4), 5)) == before, "loads are balanced"


def test_the_hot_expert_gets_a_replica_in_place_of_cold_ones():
    """First there is room; then all slots hold replicas of experts that have become cold."""
    first = plan(owners_only(), HOT)
    assert [len(first.holders(expert)) > 1 for expert in range(4)] == [False, True, False, False]
    before = with_replicas(owners_only(), [(3, 0), (3, 1), (3, 2), (2, 3)])
    placement = plan(before, HOT, slots=1)
    assert len(placement.holders(1)) > 1
    assert len(placement.holders(3)) + len(placement.holders(2)) < 4 + 2
    assert placement.replicas_per_device_D.max() <= 1


def test_replicas_migrate_to_fewer_nodes(monkeypatch):
    """No device is overloaded; the gradient of a replica in the owner's node does not cross nodes."""
    monkeypatch.setattr(flexmoe_strategy, "FLEXMOE_THRESHOLD", 9.0)
    links = ClusterCost(LinkCost(0, 0.0), LinkCost(0, 1e-6), expert_flops_per_s=1e9)
    before = with_replicas(owners_only(), [(0, 3)])
    slow = replace(PROFILE, cluster=links)
    placement = plan(before, np.full((4, 4), 5), Topology.uniform(4, 2), slow, slots=1)
    assert placement.holders(0) == (0, 1)


@given(SEEDS, st.integers(1, 3), st.integers(1, 2000), st.integers(1, 50))
@examples(60)
def test_a_plan_never_costs_more_than_doing_nothing(seed, slots, owned_bytes, interval):
    rng = np.random.default_rng(seed)
    topology = Topology.uniform(4, int(rng.choice([1, 2, 4])))
    counts_DE = rng.poisson(rng.gamma(0.5, 30, 8), (4, 8))
    before = owners_only(8)
    for expert, device in rng.integers(0, (8, 4), (4, 2)).tolist():
        if before.owner_E[expert] != device and before.replicas_per_device_D[device] < slots:
            before = with_replicas(before, [(expert, device)])
    token_bytes = int(rng.integers(0, 3)) * MEGA
    profile = replace(PROFILE, token_bytes=token_bytes, owned_bytes=owned_bytes * MEGA)
    placement = plan(before, counts_DE, topology, profile, interval, slots)
    assert placement.replicas_per_device_D.max() <= slots
    assert np.array_equal(placement.owner_E, before.owner_E)
    expert_P, device_P = np.nonzero(placement.present_ED & ~before.present_ED)
    old_s, new_s = (
        placement_price(counts_DE, placed, topology, profile, ReplicaLife.RESIDENT).moe_s
        for placed in (before, placement)
    )
    moving_s = moving_seconds(before.owner_E[expert_P], device_P, topology, profile)
    assert interval * (old_s - new_s) - moving_s >= -1e-6 or placement == before


@pytest.mark.parametrize("most_steps", [0, 1])
def test_the_number_of_steps_is_bounded(most_steps, monkeypatch):
    monkeypatch.setattr(flexmoe_strategy, "FLEXMOE_STEPS", most_steps)
    assert plan(owners_only(), HOT).num_replicas == most_steps
