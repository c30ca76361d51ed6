"""The baselines that move experts do so where it pays. In shapes, E are experts."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.planning.placement.owner_map import OwnerMap
from megatron_fssdp.planning.placement.placement import even_owners
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.strategies.layer_plan import LayerContext
from megatron_fssdp.strategies.smartmoe import SmartmoeSettings
from megatron_fssdp.strategies.smartmoe.smartmoe_strategy import SmartmoeStrategy, permuted_owners
from tests.planning.placement_cases import SLOW_EXPERTS

DEAR = dataclasses.replace(SLOW_EXPERTS, owned_bytes=10**12)  # moving an expert's states takes days
OWNERS = np.array([0, 0, 1, 1])
LAYER = LayerContext(1, OWNERS, Topology.uniform(2, 1), DEAR)
CHEAP_LAYER = dataclasses.replace(LAYER, profile=dataclasses.replace(DEAR, owned_bytes=1))
# Both popular experts belong to device 0.
LOAD = np.array([40.0, 40.0, 2.0, 2.0])


def test_smartmoe_moves_only_where_that_pays_and_once_costs_are_known():
    strategy = SmartmoeStrategy(SmartmoeSettings())
    assert np.array_equal(strategy.reshard_layer(LAYER, LOAD), OWNERS)
    new_E = strategy.reshard_layer(CHEAP_LAYER, LOAD)
    assert np.bincount(new_E, weights=LOAD).tolist() == [42, 42]
    measuring = dataclasses.replace(LAYER, profile=None)
    assert np.array_equal(strategy.reshard_layer(measuring, LOAD), OWNERS)


def test_smartmoe_makes_the_owners_of_a_resumed_run_even_first():
    strategy = SmartmoeStrategy(SmartmoeSettings())
    uneven = OwnerMap.even(2, 4, 2).with_owners(np.array([[0, 1, 1, 1], [0, 0, 0, 1]]))
    new = strategy.reshard([LAYER, LAYER], np.tile(LOAD, (2, 1)), uneven)
    assert [np.bincount(owner_E).tolist() for owner_E in new.device_LE] == [[2, 2], [2, 2]]


def test_hot_experts_go_to_different_devices():
    """Loads are 8, 7 | 2, 1: the 8 stays, the 7 and the 2 go to the other device, the 1 fills the first."""
    assert permuted_owners(even_owners(4, 2), np.array([8, 7, 2, 1]), 2).tolist() == [0, 1, 1, 0]


def test_among_equal_devices_the_present_owner_keeps_its_expert():
    owners = np.array([1, 0, 1, 0])
    assert permuted_owners(owners, np.array([5, 5, 1, 1]), 2).tolist() == owners.tolist()


@given(seed=st.integers(0, 10_000), per_device=st.integers(2, 4))
def test_every_device_keeps_its_number_of_experts(seed, per_device):
    rng = np.random.default_rng(seed)
    owners = rng.permutation(even_owners(4 * per_device, 4))
    new_E = permuted_owners(owners, rng.gamma(0.5, 10, 4 * per_device), 4)
    assert np.bincount(new_E, minlength=4).tolist() == [per_device] * 4


@pytest.mark.parametrize("owners", [even_owners(4, 4), np.array([0, 0, 0, 1]), np.zeros(4, np.int64)])
def test_owners_that_no_exchange_can_balance_are_refused(owners):
    strategy, num_devices = SmartmoeStrategy(SmartmoeSettings()), max(int(owners.max()) + 1, 2)
    with pytest.raises(ValueError, match="experts: wanted two or more on each, equally many"):
        strategy.check(LayerContext(1, owners, Topology.uniform(num_devices, 1)))
    strategy.check(LayerContext(1, np.zeros(1, np.int64), Topology.uniform(1, 1)))
