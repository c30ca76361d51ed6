"""The traffic of transfers equals that of the plan's edges, counted one by one."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.planning.cost.link_seconds import moves_traffic, transfer_traffic
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.transfer.transfer_plan import two_level_transfer

from .dense_traffic import pairs_traffic


@given(st.integers(0, 2**32 - 1), st.sampled_from([(4, 1), (4, 2), (6, 3), (8, 4)]))
def test_traffic_of_a_transfer_is_that_of_its_edges(seed: int, shape: tuple[int, int]) -> None:
    devices, nodes = shape
    rng = np.random.default_rng(seed)
    topology = Topology.uniform(devices, nodes)
    owner_E = rng.permutation(np.arange(2 * devices) % devices)
    present_ED = rng.random((2 * devices, devices)) < rng.choice([0.0, 0.3])
    present_ED[np.arange(2 * devices), owner_E] = True
    plan = two_level_transfer(ExpertPlacement(owner_E, present_ED), topology)
    experts_DD = np.zeros((devices, devices), int)
    for edge in plan.edges:
        experts_DD[edge.source, edge.destination] += 1
    moved = transfer_traffic(plan, topology)
    assert moved.busiest == pairs_traffic(experts_DD, topology)
    assert moved.busiest == moves_traffic(plan.table[:, 1], plan.table[:, 2], topology)
    assert moved.num_experts == len(plan.table)
    assert sum(moved.fill_hops) <= max(plan.max_depth, 0)
