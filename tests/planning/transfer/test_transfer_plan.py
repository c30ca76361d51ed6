import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.transfer.transfer_plan import (
    TransferEdge,
    TransferPlan,
    additional_transfer,
    plain_transfer,
    two_level_transfer,
)
from tests.drawn_examples import examples

from ..placement_cases import placements


def hops(plan):
    return [(edge.expert, edge.source, edge.destination, edge.depth) for edge in plan.edges]


@pytest.fixture
def placement():
    # 6 devices on nodes (0, 1), (2, 3), (4, 5). Expert 0, owner 3: devices 0, 1, 2, 3, 5.
    # Expert 1, owner 0: device 1 too. Expert 2: owner only.
    present_ED = np.zeros((3, 6), dtype=bool)
    present_ED[0, [0, 1, 2, 3, 5]] = True
    present_ED[1, [0, 1]] = True
    present_ED[2, 4] = True
    return ExpertPlacement(np.array([3, 0, 4]), present_ED)


def test_a_plain_transfer_sends_everything_from_the_owner(placement):
    plan = plain_transfer(placement)
    assert hops(plan) == [(0, 3, 0, 0), (0, 3, 1, 0), (0, 3, 2, 0), (0, 3, 5, 0), (1, 0, 1, 0)]
    assert plan.max_depth == 0


def test_a_two_level_transfer_equals_the_one_worked_out_by_hand(placement):
    # Expert 0: leaders 3 -> 5 (node 2) -> 1 (node 0, cyclically next; 0 owns expert 1 already);
    # 3 -> 2 and 1 -> 0 inside.
    topology = Topology.uniform(6, 3)
    plan = two_level_transfer(placement, topology)
    assert hops(plan) == [(0, 3, 5, 0), (0, 3, 2, 0), (1, 0, 1, 0), (0, 5, 1, 1), (0, 1, 0, 2)]
    assert plan.max_depth == 2
    assert plan.num_transfers == 5
    assert plan.total_bytes(10) == 50
    assert plan.inter_node_bytes(10, topology) == 20
    assert plan.parent(0, 1) == 5
    assert plan.parent(0, 3) is None
    assert plan.children(0, 3) == (5, 2)
    assert plan.children(2, 4) == ()
    incoming, outgoing = plan.edges_of(1)
    assert [edge.source for edge in incoming] == [0, 5]
    assert [(edge.expert, edge.destination) for edge in outgoing] == [(0, 0)]
    assert plan.edges_of(4) == ((), ())


def test_inside_a_node_holders_form_a_binary_tree():
    placement = ExpertPlacement(np.array([2]), np.ones((1, 8), dtype=bool))
    plan = two_level_transfer(placement, Topology.uniform(8, 1))
    # In the order 2, 3, 4, 5, 6, 7, 0, 1.
    assert plan.children(0, 2) == (3, 4)
    assert plan.children(0, 3) == (5, 6)
    assert plan.children(0, 4) == (0, 7)
    assert plan.children(0, 5) == (1,)
    assert plan.max_depth == 2


@pytest.mark.parametrize("num_experts", [2, 7, 16, 21])
def test_leaders_of_different_experts_are_different_devices_of_a_node(num_experts):
    # Every expert everywhere, all owned by device 0: the other three nodes have one leader an expert.
    placement = ExpertPlacement(np.zeros(num_experts, dtype=int), np.ones((num_experts, 16), dtype=bool))
    topology = Topology.uniform(16, 4)
    leads = [0] * 16
    for edge in two_level_transfer(placement, topology).edges:
        leads[edge.destination] += (
            topology.node_of_device[edge.source] != topology.node_of_device[edge.destination]
        )
    assert leads[:4] == [0] * 4
    for node in range(1, 4):
        in_node = leads[4 * node : 4 * node + 4]
        assert sum(in_node) == num_experts
        assert max(in_node) - min(in_node) <= 1


def test_an_owners_only_placement_moves_nothing():
    placement = ExpertPlacement.owners_only(np.array([0, 1]), 2)
    plan = two_level_transfer(placement, Topology.uniform(2, 1))
    assert plan.edges == ()
    assert plan.max_depth == -1
    assert plan == plain_transfer(placement)


@examples(150)
@given(placements())
def test_every_holder_receives_once_and_the_reduction_is_the_transpose(case):
    topology, placement = case
    for plan in (plain_transfer(placement), two_level_transfer(placement, topology)):
        plan.check_serves(placement)
        received = sorted((edge.expert, edge.destination) for edge in plan.edges)
        expert_P, device_P = np.nonzero(placement.present_ED)
        replicas = [
            (e, d)
            for e, d in zip(expert_P.tolist(), device_P.tolist(), strict=True)
            if placement.owner_E[e] != d
        ]
        assert received == replicas
        # Run SparseReduceScatter, which takes the edges backwards: a device forwards a sum only after all its
        # children have sent theirs.
        waiting = {(e, d): len(plan.children(e, d)) for e, d in zip(expert_P, device_P, strict=True)}
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
    assert plan.inter_node_bytes(7, topology) == 7 * nodes_needing
    for device in range(placement.num_devices):
        _, outgoing = plan.edges_of(device)
        for expert in range(placement.num_experts):
            mine = [edge for edge in outgoing if edge.expert == expert]
            assert len(mine) <= 3  # the next node and two inside
            inside = [topology.node_of_device[e.destination] == topology.node_of_device[device] for e in mine]
            assert inside == sorted(inside)  # the next node first


def edge(*fields):
    return TransferEdge(*fields)


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        ([edge(0, 0, 4, 0)], "wanted devices from 0 to 3"),
        ([edge(0, 0, 1, 0), edge(0, 2, 3, 1)], "does not have yet"),
        ([edge(0, 0, 1, 0), edge(0, 0, 1, 0)], "already has it"),
        ([edge(0, 0, 1, 0), edge(0, 1, 0, 1)], "already has it"),
        ([edge(0, 0, 1, 0), edge(0, 1, 2, 0)], "has depth 0: wanted 1"),
        ([edge(0, 0, 1, 1)], "has depth 1: wanted 0"),
    ],
)
def test_edges_that_form_no_tree_are_refused(edges, message):
    with pytest.raises(ValueError, match=message):
        TransferPlan(4, tuple(edges))


def test_a_plan_for_another_placement_is_refused(placement):
    with pytest.raises(ValueError, match="expert 0 does not reach device 0"):
        TransferPlan(6, ()).check_serves(placement)
    with pytest.raises(ValueError, match="starts on device 1: wanted the owner of expert 1, device 0"):
        TransferPlan(6, (edge(1, 1, 0, 0),)).check_serves(placement)
    with pytest.raises(ValueError, match="6 devices and the topology 2"):
        two_level_transfer(placement, Topology.uniform(2, 1))


def check_extends(plan, planned, corrected):
    """The edges bring exactly what was added, from devices that had it before."""
    assert all(planned.present_ED[pair] and corrected.present_ED[pair] for pair in plan.present_before)
    added_ED = corrected.present_ED & ~planned.present_ED
    got = sorted((edge.expert, edge.destination) for edge in plan.edges)
    assert got == [tuple(pair) for pair in np.argwhere(added_ED).tolist()]


def test_an_additional_transfer_equals_the_one_worked_out_by_hand():
    # Nodes (0, 1, 2), (3, 4, 5), (6, 7, 8). Expert 0, owner 0, is on 0, 1 and 3, and goes to all devices.
    present_ED = np.zeros((1, 9), dtype=bool)
    present_ED[0, [0, 1, 3]] = True
    planned = ExpertPlacement(np.array([0]), present_ED)
    corrected = ExpertPlacement(np.array([0]), np.ones((1, 9), dtype=bool))
    plan = additional_transfer(planned, corrected, Topology.uniform(9, 3))
    # Node 2 from the owner's node, whose least busy device is then 1; 4 and 5 from 3 in their node.
    assert hops(plan) == [
        (0, 0, 6, 0),
        (0, 1, 2, 0),
        (0, 3, 4, 0),
        (0, 3, 5, 0),
        (0, 6, 7, 1),
        (0, 6, 8, 1),
    ]
    check_extends(plan, planned, corrected)


def test_an_additional_transfer_starts_from_all_nodes_that_have_the_expert():
    # Four nodes of one device; expert 0 is on 0 and 1, expert 1 on 1 and 2.
    planned = ExpertPlacement(np.array([0, 1]), np.array([[1, 1, 0, 0], [0, 1, 1, 0]], dtype=bool))
    corrected = planned.with_replicas([(0, 2), (0, 3), (1, 3)])
    plan = additional_transfer(planned, corrected, Topology.uniform(4, 4))
    # Nodes 0 and 1 each send expert 0 once; expert 1 comes from node 2, which has sent nothing.
    assert hops(plan) == [(0, 0, 2, 0), (0, 1, 3, 0), (1, 2, 3, 0)]


@st.composite
def corrected_placements(draw):
    """Draws (topology, planned, corrected); in half of the cases, ``corrected`` lacks replicas."""
    topology, corrected = draw(placements())
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    present_ED = rng.random(corrected.present_ED.shape) < 0.5
    if draw(st.booleans()):
        present_ED &= corrected.present_ED
    present_ED[np.arange(corrected.num_experts), corrected.owner_E] = True
    return topology, ExpertPlacement(corrected.owner_E, present_ED), corrected


@examples(200)
@given(corrected_placements())
def test_an_additional_transfer_completes_the_placement(case):
    topology, planned, corrected = case
    plan = additional_transfer(planned, corrected, topology)
    check_extends(plan, planned, corrected)
    here = planned.present_ED & corrected.present_ED
    kept = ExpertPlacement(planned.owner_E, here.copy())
    sent = {}
    for hop in plan.edges:  # run the transfer
        assert here[hop.expert, hop.source]
        assert not here[hop.expert, hop.destination]
        here[hop.expert, hop.destination] = True
        inside = topology.node_of_device[hop.source] == topology.node_of_device[hop.destination]
        sent.setdefault((hop.expert, hop.source), []).append(inside)
    assert np.array_equal(here, corrected.present_ED)
    # At most one message to another node and two inside.
    for insides in sent.values():
        assert insides.count(False) <= 1
        assert insides.count(True) <= 2

    def nodes(placement, expert):
        return {topology.node_of_device[device] for device in placement.holders(expert)}

    new_nodes = sum(
        len(nodes(corrected, expert) - nodes(kept, expert)) for expert in range(planned.num_experts)
    )
    assert plan.inter_node_bytes(1, topology) == new_nodes
    assert additional_transfer(corrected, corrected, topology).edges == ()


@examples(100)
@given(placements())
def test_an_additional_transfer_from_owners_alone_moves_as_much_as_a_two_level_one(case):
    topology, placement = case
    owners_only = ExpertPlacement.owners_only(placement.owner_E, placement.num_devices)
    plan = additional_transfer(owners_only, placement, topology)
    plan.check_serves(placement)
    two_level = two_level_transfer(placement, topology)
    assert plan.num_transfers == two_level.num_transfers
    assert plan.max_depth == two_level.max_depth
    assert plan.inter_node_bytes(1, topology) == two_level.inter_node_bytes(1, topology)


def test_additions_that_do_not_fit_are_refused(placement):
    topology = Topology.uniform(6, 3)
    fewer = ExpertPlacement.owners_only(placement.owner_E, 6)
    assert additional_transfer(placement, fewer, topology).edges == ()
    with pytest.raises(ValueError, match="other owners"):
        additional_transfer(ExpertPlacement.owners_only(np.array([3, 0, 5]), 6), placement, topology)
    with pytest.raises(ValueError, match="6 devices and the topology 2"):
        additional_transfer(fewer, placement, Topology.uniform(2, 1))
    with pytest.raises(ValueError, match="wanted a source that is in present_before"):
        TransferPlan(6, (edge(0, 1, 2, 0),), frozenset({(0, 0)}))
    with pytest.raises(ValueError, match="already has it"):
        TransferPlan(6, (edge(0, 0, 1, 0),), frozenset({(0, 0), (0, 1)}))


def test_devices_with_the_experts_take_turns_as_senders():
    # Six experts on devices 0 and 1 of one node come to device 2, too.
    owners_only = ExpertPlacement.owners_only(np.zeros(6, dtype=int), 3)
    planned = owners_only.with_replicas([(expert, 1) for expert in range(6)])
    corrected = planned.with_replicas([(expert, 2) for expert in range(6)])
    plan = additional_transfer(planned, corrected, Topology.uniform(3, 1))
    assert [hop.source for hop in plan.edges] == [0, 1] * 3
