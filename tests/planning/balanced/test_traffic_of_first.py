import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.planning.balanced.traffic_of_first import dispatch_of_first, transfer_of_first
from megatron_fssdp.planning.cost.layer_traffic import dispatch_traffic, transfer_traffic
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.transfer.transfer_plan import two_level_transfer

# Two nodes of two devices, one expert each.
TOPOLOGY, OWNERS = Topology.uniform(4, 2), np.arange(4)


def test_traffic_of_the_first_experts_equals_that_worked_out_by_hand() -> None:
    """Every device sends 6 pairs to expert 0 and 2 to expert 3."""
    load_DE = np.tile([6, 0, 0, 2], (4, 1))
    placement = ExpertPlacement.owners_only(OWNERS, 4).with_replicas([(0, 1), (0, 2), (3, 0)])
    found = dispatch_of_first(load_DE, placement, [0, 3], TOPOLOGY)
    # Expert 0 is on device 0, then on 0, 1 and 2: 6 own pairs of each, device 3's go to device 2. Last,
    # expert 3 is on devices 3 and 0, where device 1's pairs go.
    np.testing.assert_allclose(found.tokens_H, [24, 12, 12])
    np.testing.assert_allclose(found.near_H, [6, 6, 6])
    np.testing.assert_allclose(found.far_of_node_H, [12, 4, 0])
    moved = transfer_of_first(two_level_transfer(placement, TOPOLOGY), [0, 3], TOPOLOGY)
    assert np.array(moved.busiest.near).tolist() == [0, 1, 1]
    assert np.array(moved.busiest.far_of_node).tolist() == [0, 1, 1]
    assert np.array(moved.fill_hops).tolist() == [[0, 0, 0], [0, 0, 0]]


@given(seed=st.integers(0, 10_000), devices_per_node=st.sampled_from([1, 2, 3, 6]))
def test_traffic_of_all_experts_equals_that_of_the_layer(seed: int, devices_per_node: int) -> None:
    rng = np.random.default_rng(seed)
    topology, owners = Topology.uniform(6, devices_per_node), np.arange(9) % 6
    placement = ExpertPlacement.owners_only(owners, 6).with_replicas(
        [(e, d) for e in range(9) for d in range(6) if owners[e] != d and rng.random() < 0.3]
    )
    counts_DE = rng.poisson(5, (6, 9)) * 60  # without remainder over up to 6 holders
    experts = rng.permutation(np.flatnonzero(placement.present_ED.sum(axis=1) > 1))
    exact = dispatch_traffic("even", counts_DE, placement, topology)
    found = dispatch_of_first(counts_DE, placement, experts, topology)
    busiest = (exact.tokens_D.max(), exact.busiest.near, exact.busiest.far_of_node)
    np.testing.assert_allclose((found.tokens_H[-1], found.near_H[-1], found.far_of_node_H[-1]), busiest)
    plan = two_level_transfer(placement, topology)
    moved = transfer_of_first(plan, experts, topology)
    traffic = transfer_traffic(plan, topology)
    near_H, far_of_node_H = np.array(moved.busiest.near), np.array(moved.busiest.far_of_node)
    assert (near_H[-1], far_of_node_H[-1]) == (traffic.busiest.near, traffic.busiest.far_of_node)
    assert tuple(np.array(moved.fill_hops)[:, -1]) == traffic.fill_hops


def test_rounding_leaves_no_traffic_where_nothing_is_sent() -> None:
    """A rounding error in the difference of equal numbers would cost a link's start-up time."""
    load_DE = np.full((4, 4), 0.1)
    everywhere = ExpertPlacement.owners_only(OWNERS, 4).with_replicas(
        [(e, d) for e in range(4) for d in range(4) if e != d]
    )
    found = dispatch_of_first(load_DE, everywhere, range(4), TOPOLOGY)
    assert found.near_H[-1] == found.far_of_node_H[-1] == 0
