import numpy as np
import pytest
from hypothesis import given

from megatron_fssdp.planning.cost.link_seconds import transfer_traffic
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.transfer.transfer_plan import (
    TransferEdge,
    TransferPlan,
    additional_transfer,
    two_level_transfer,
)
from tests.drawn_examples import SEEDS, examples
from tests.support.random_placement import plain_transfer

from ..placement_cases import placements


def children(plan, expert, device):
    return tuple(edge.destination for edge in plan.edges if (edge.expert, edge.source) == (expert, device))


@pytest.fixture
def placement():
    # 6 devices on nodes (0, 1), (2, 3), (4, 5). Expert 0, owner 3: devices 0, 1, 2, 3, 5.
    # Expert 1, owner 0: device 1 too. Expert 2: owner only.
    present_ED = np.zeros((3, 6), dtype=bool)
    present_ED[0, [0, 1, 2, 3, 5]] = True
    present_ED[1, [0, 1]] = True
    present_ED[2, 4] = True
    return ExpertPlacement(np.array([3, 0, 4]), present_ED)


def test_a_two_level_transfer_equals_the_one_worked_out_by_hand(placement):
    # Expert 0: leaders 3 -> 5 (node 2) -> 1 (node 0, cyclically next; 0 owns expert 1 already);
    # 3 -> 2 and 1 -> 0 inside.
    topology = Topology.uniform(6, 3)
    plan = two_level_transfer(placement, topology)
    assert list(plan.edges) == [(0, 3, 5, 0), (0, 3, 2, 0), (1, 0, 1, 0), (0, 5, 1, 1), (0, 1, 0, 2)]
    assert plan.max_depth == 2
    assert len(plan.table) == 5
    assert transfer_traffic(plan, topology).num_between_nodes == 2
    assert children(plan, 0, 3) == (5, 2)
    assert children(plan, 2, 4) == ()
    incoming, outgoing = plan.edges_of(1)
    assert [edge.source for edge in incoming] == [0, 5]
    assert [(edge.expert, edge.destination) for edge in outgoing] == [(0, 0)]
    assert plan.edges_of(4) == ((), ())


def test_inside_a_node_holders_form_a_binary_tree():
    placement = ExpertPlacement(np.array([2]), np.ones((1, 8), dtype=bool))
    plan = two_level_transfer(placement, Topology.uniform(8, 1))
    # In the order 2, 3, 4, 5, 6, 7, 0, 1.
    assert children(plan, 0, 2) == (3, 4)
    assert children(plan, 0, 3) == (5, 6)
    assert children(plan, 0, 4) == (0, 7)
    assert children(plan, 0, 5) == (1,)
    assert plan.max_depth == 2


@pytest.mark.parametrize("num_experts", [2, 7, 16, 21])
def test_leaders_of_different_experts_are_different_devices_of_a_node(num_experts):
    # Every expert everywhere, all owned by device 0: the other three nodes have one leader an expert.
    placement = ExpertPlacement(np.zeros(num_experts, dtype=int), np.ones((num_experts, 16), dtype=bool))
    topology = Topology.uniform(16, 4)
    _, source_P, device_P, _ = two_level_transfer(placement, topology).table.T
    leads_P = device_P[source_P // 4 != device_P // 4]
    first_D, *others_D = np.bincount(leads_P, minlength=16).reshape(4, 4)
    assert not first_D.any()
    for leads_D in others_D:
        assert leads_D.sum() == num_experts
        assert np.ptp(leads_D) <= 1


@examples(150)
@given(placements())
def test_every_holder_receives_once_and_the_reduction_is_the_transpose(case):
    topology, placement = case
    for plan in (plain_transfer(placement), two_level_transfer(placement, topology)):
        plan.check_serves(placement)
        holders = [tuple(pair) for pair in np.argwhere(placement.present_ED).tolist()]
        received = sorted((edge.expert, edge.destination) for edge in plan.edges)
        assert received == [(e, d) for e, d in holders if placement.owner_E[e] != d]
        # Run SparseReduceScatter, which takes the edges backwards: a device forwards a sum only after all its
        # children have sent theirs.
        waiting = {(e, d): len(children(plan, e, d)) for e, d in holders}
        sums = dict.fromkeys(waiting, 1)
        for edge in reversed(plan.edges):
            assert waiting[edge.expert, edge.destination] == 0
            waiting[edge.expert, edge.source] -= 1
            sums[edge.expert, edge.source] += sums[edge.expert, edge.destination]
        for expert in range(placement.num_experts):
            assert sums[expert, placement.owner_E[expert]] == len(placement.holders(expert))


@examples(150)
@given(placements())
def test_an_expert_crosses_nodes_once_for_each_node_that_needs_it(case):
    topology, placement = case
    plan = two_level_transfer(placement, topology)
    nodes_needing = sum(
        len({topology.node_of_device[d] for d in placement.holders(e)}) - 1
        for e in range(placement.num_experts)
    )
    assert transfer_traffic(plan, topology).num_between_nodes == nodes_needing
    for device in range(placement.num_devices):
        _, outgoing = plan.edges_of(device)
        for expert in range(placement.num_experts):
            mine = [edge for edge in outgoing if edge.expert == expert]
            assert len(mine) <= 3  # the next node and two inside
            inside = [topology.node_of_device[e.destination] == topology.node_of_device[device] for e in mine]
            assert inside == sorted(inside)  # the next node first


def test_a_plan_for_another_placement_is_refused(placement):
    with pytest.raises(ValueError, match="expert 0 does not reach device 0"):
        TransferPlan(6, ()).check_serves(placement)
    with pytest.raises(ValueError, match="starts on device 1: wanted the owner of expert 1, device 0"):
        TransferPlan(6, (TransferEdge(1, 1, 0, 0),)).check_serves(placement)
    with pytest.raises(ValueError, match="6 devices and the topology 2"):
        two_level_transfer(placement, Topology.uniform(2, 1))


@examples(100)
@given(placements(), SEEDS)
def test_additional_replicas_come_from_their_owners(case, seed):
    topology, corrected = case
    present_ED = np.random.default_rng(seed).random(corrected.present_ED.shape) < 0.5
    present_ED[np.arange(corrected.num_experts), corrected.owner_E] = True
    planned = ExpertPlacement(corrected.owner_E, present_ED)
    plan = additional_transfer(planned, corrected, topology)
    added_ED = corrected.present_ED & ~planned.present_ED
    got = sorted((edge.expert, edge.destination) for edge in plan.edges)
    assert got == [tuple(pair) for pair in np.argwhere(added_ED).tolist()]
    added_ED[np.arange(corrected.num_experts), corrected.owner_E] = True
    plan.check_serves(ExpertPlacement(corrected.owner_E, added_ED))


def test_additions_that_do_not_fit_are_refused(placement):
    topology = Topology.uniform(6, 3)
    fewer = ExpertPlacement.owners_only(placement.owner_E, 6)
    nothing = additional_transfer(placement, fewer, topology)
    assert (nothing.edges, nothing.max_depth) == ((), -1)
    with pytest.raises(ValueError, match="other owners"):
        additional_transfer(ExpertPlacement.owners_only(np.array([3, 0, 5]), 6), placement, topology)
    with pytest.raises(ValueError, match="6 devices and the topology 2"):
        additional_transfer(fewer, placement, Topology.uniform(2, 1))
