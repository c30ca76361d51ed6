"""The baselines that move experts do so where it pays. In shapes, E are experts."""

import dataclasses

import numpy as np

from megatron_fssdp.planning.placement.owner_map import OwnerMap
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.strategies.layer_plan import LayerContext
from megatron_fssdp.strategies.smartmoe import SmartmoeSettings
from megatron_fssdp.strategies.smartmoe.smartmoe_strategy import SmartmoeStrategy
from tests.planning.placement_cases import SLOW_EXPERTS

DEAR = dataclasses.replace(SLOW_EXPERTS, owned_bytes=10**12)  # moving an expert's states takes days
OWNERS = np.array([0, 0, 1, 1])
LAYER = LayerContext(1, OWNERS, Topology.uniform(2, 1), DEAR)
CHEAP_LAYER = dataclasses.replace(LAYER, profile=dataclasses.replace(DEAR, owned_bytes=1))
# Both popular experts belong to device 0.
LOAD = np.array([40.0, 40.0, 2.0, 2.0])


def test_smartmoe_moves_only_where_that_pays_and_once_costs_are_known() -> None:
    strategy = SmartmoeStrategy(SmartmoeSettings())
    assert np.array_equal(strategy.reshard_layer(LAYER, LOAD), OWNERS)
    new_E = strategy.reshard_layer(CHEAP_LAYER, LOAD)
    assert np.bincount(new_E, weights=LOAD).tolist() == [42, 42]
    measuring = dataclasses.replace(LAYER, profile=None)
    assert np.array_equal(strategy.reshard_layer(measuring, LOAD), OWNERS)


def test_smartmoe_makes_the_owners_of_a_resumed_run_even_first() -> None:
    strategy = SmartmoeStrategy(SmartmoeSettings())
    uneven = OwnerMap.even(2, 4, 2).with_owners(np.array([[0, 1, 1, 1], [0, 0, 0, 1]]))
    new = strategy.reshard([LAYER, LAYER], np.tile(LOAD, (2, 1)), uneven)
    assert [np.bincount(owner_E).tolist() for owner_E in new.device_LE] == [[2, 2], [2, 2]]
