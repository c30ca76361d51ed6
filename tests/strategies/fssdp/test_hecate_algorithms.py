import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.planning.cost.cost_model import ClusterCost, LinkCost
from megatron_fssdp.planning.cost.layer_profile import LayerProfile
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.transfer.message_size import FixedMessages
from megatron_fssdp.planning.transfer.transfer_plan import two_level_transfer
from megatron_fssdp.strategies.fssdp import FssdpSettings
from megatron_fssdp.strategies.fssdp.fssdp_strategy import FssdpStrategy
from megatron_fssdp.strategies.fssdp.hecate_algorithms import (
    apportion_replicas,
    heterogeneous_sharding,
    sparse_materialization,
)
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.plan_price import plan_price
from tests.drawn_examples import SEEDS, examples
from tests.planning.placement.test_owner_map import owner_maps
from tests.planning.placement_cases import owned_layers, random_counts_DE


@pytest.mark.parametrize(
    ("loads", "total", "most", "numbers"),
    [
        ([8.0, 4.0, 4.0], 4, 3, [2, 1, 1]),
        ([5.0, 3.0, 2.0], 4, 9, [2, 1, 1]),  # shares 2, 1.2, 0.8
        ([4.0, 4.0, 4.0], 4, 9, [2, 1, 1]),  # equal remainders: the first expert gets the replica
        ([90.0, 6.0, 4.0], 8, 3, [3, 3, 2]),  # 7.2 is capped at 3; the other 5 are apportioned again
        ([1.0], 8, 3, [3]),
        ([1.0, 1.0], 8, 0, [0, 0]),
    ],
)
def test_replicas_are_apportioned_in_proportion_to_loads(loads, total, most, numbers):
    assert apportion_replicas(loads, total, most) == numbers


@examples(200)
@given(st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=12), st.integers(0, 60), st.integers(0, 9))
def test_apportioning_uses_every_slot_that_fits(loads, total, most):
    loads = sorted(loads, reverse=True)
    numbers = apportion_replicas(loads, total, most)
    assert sum(numbers) == min(total, most * len(loads))
    assert all(0 <= number <= most for number in numbers)
    assert numbers == sorted(numbers, reverse=True) or len(set(loads)) < len(loads)


def literal_alg1(owner_E, load_E, topology, num_top, slots):
    """Alg. 1 taken literally, one replica at a time."""
    num_experts, num_devices = owner_E.size, topology.num_devices
    present = np.zeros((num_experts, num_devices), dtype=bool)
    present[np.arange(num_experts), owner_E] = True
    num_top = min(num_top, num_experts)
    slots = min(slots, num_top)
    top = sorted(range(num_experts), key=lambda e: (-load_E[e], e))[:num_top]
    top = [expert for expert in top if load_E[expert] > 0]
    if slots == num_top:
        present[top] = True
        return present
    free = [slots] * num_devices
    numbers = apportion_replicas([load_E[e] for e in top], num_devices * slots, num_devices - 1)
    unplaced = 0
    for expert, number in zip(top, numbers, strict=True):
        for _ in range(min(number + unplaced, num_devices - 1)):

            def key(device, expert=expert):
                node = topology.devices_by_node[topology.node_of_device[device]]
                has = any(present[expert, peer] for peer in node)
                return (has, -sum(free[peer] for peer in node), -free[device], device)

            allowed = [d for d in range(num_devices) if free[d] and not present[expert, d]]
            if allowed:
                device = min(allowed, key=key)
                present[expert, device] = True
                free[device] -= 1
        unplaced += number - (present[expert].sum() - 1)
    return present


@examples(200)
@given(owned_layers(), SEEDS, st.integers(0, 11), st.integers(0, 4), st.sampled_from([0.0, 0.5, 2.0]))
def test_placements_equal_those_of_the_literal_algorithm(case, seed, overlap_degree, slots, sigma):
    topology, owner_E = case
    load_E = np.round(np.random.default_rng(seed).lognormal(1, sigma, owner_E.size))
    placement = sparse_materialization(owner_E, load_E, topology, overlap_degree=overlap_degree, slots=slots)
    np.testing.assert_array_equal(
        placement.present_ED, literal_alg1(owner_E, load_E, topology, overlap_degree, slots)
    )
    assert placement.replicas_per_device_D.max() <= slots
    assert (np.count_nonzero(placement.present_ED, axis=1) > 1).sum() <= overlap_degree
    strided = np.repeat(load_E, 3)[::3]
    again = sparse_materialization(
        owner_E.astype(np.int32), strided, topology, overlap_degree=overlap_degree, slots=slots
    )
    assert placement == again


@examples(200)
@given(
    owned_layers(),
    st.tuples(SEEDS, SEEDS),
    st.tuples(st.integers(0, 10), st.integers(1, 4), st.integers(0, 4)),
    st.tuples(st.sampled_from([0.0, 30.0]), st.sampled_from([1, 20, 200]), st.sampled_from([0.0, 1.0, 10.0])),
    st.integers(1, 3),
)
def test_calibration_keeps_its_limits_and_always_gains(layer, seeds, limits, sizes, times):
    """A layer is planned from other counts, with at most as many slots."""
    (topology, owner_E), (non_moe_s, expert_bytes, flops_per_token) = layer, sizes
    before_DE, counts_DE = (random_counts_DE(seed, topology.num_devices, owner_E.size) for seed in seeds)
    degree, slots, fewer = limits
    if 0 in (degree, slots):  # the settings allow neither alone
        degree = slots = 0
    cluster = ClusterCost(LinkCost(2.0, 1.0), LinkCost(5.0, 3.0), expert_flops_per_s=1.0)
    profile = LayerProfile(
        non_moe_s, cluster, expert_bytes, 1, flops_per_token, 8, messages=FixedMessages(20)
    )
    context = LayerContext(1, owner_E, topology, profile)
    planned, wanted = (
        sparse_materialization(owner_E, of_DE.sum(axis=0), topology, overlap_degree=degree, slots=most)
        for of_DE, most in ((before_DE, min(fewer, slots)), (counts_DE, slots))
    )
    strategy = FssdpStrategy(FssdpSettings(planner="hecate", slots=slots, overlap_degree=degree))
    plan = LayerPlan(planned, two_level_transfer(planned, topology))
    corrected = strategy.after_gate(context, counts_DE, plan, times)

    def seconds(of):
        return plan_price(of, times * counts_DE, context, num_micro_batches=times, planned=plan).seconds

    union = ExpertPlacement(planned.owner_E, planned.present_ED | wanted.present_ED)
    if union.replicas_per_device_D.max() <= slots:
        assert seconds(corrected) <= seconds(plan.placed(union, context)) + 1e-9
    assert corrected is plan or seconds(corrected) < seconds(plan)
    placement = corrected.placement
    assert np.array_equal(placement.owner_E, planned.owner_E)
    assert (placement.present_ED >= planned.present_ED).all()
    assert (placement.present_ED <= union.present_ED).all()
    assert placement.replicas_per_device_D.max() <= slots
    assert np.count_nonzero((placement.present_ED != planned.present_ED).any(axis=1)) <= degree


@st.composite
def cases(draw):
    """(a map after some moves, integer loads with many ties, any nodes, overlap degree)."""
    (owners, _), most = draw(owner_maps()), draw(st.sampled_from([1, 3, 100]))
    rng, shape = np.random.default_rng(draw(SEEDS)), owners.device_LE.shape
    topology = Topology.from_labels(rng.integers(3, size=owners.num_devices).tolist())
    return owners, rng.integers(0, most, shape, endpoint=True), topology, draw(st.integers(0, shape[1] + 1))


def reference(owners, load_LE, topology, overlap_degree):
    """Alg. 2 taken literally: every step searches all nodes and devices again."""
    num_layers, num_experts = load_LE.shape
    devices = range(owners.num_devices)
    free = [owners.slots_per_device] * owners.num_devices
    placed = {}  # (layer, expert) -> device
    ranked = [sorted(range(num_experts), key=lambda e: -load_LE[layer, e]) for layer in range(num_layers)]
    set_aside = [experts[:overlap_degree] for experts in ranked]
    remaining = [experts[overlap_degree:] for experts in ranked]

    def load_on(layer, device):
        return sum(int(load_LE[at]) for at, d in placed.items() if at[0] == layer and d == device)

    def assign(layer, expert, device):
        placed[layer, expert] = device
        free[device] -= 1

    def place(experts_L):
        order = [layer for layer in range(num_layers) if experts_L[layer]]
        for layer in sorted(order, key=lambda i: -load_LE[i, first_of[i]]):
            for expert in experts_L[layer]:
                owner = owners.device_LE[layer, expert]

                def node_key(node, layer=layer, owner=owner):
                    members = topology.devices_by_node[node]
                    load = sum(load_on(layer, d) for d in members) / len(members)
                    return load, sum(free[d] for d in members) / len(members), owner not in members, node

                def device_key(device, layer=layer, owner=owner):
                    return load_on(layer, device), free[device], device != owner, device

                node = min((topology.node_of_device[d] for d in devices if free[d]), key=node_key)
                assign(
                    layer, expert, min((d for d in topology.devices_by_node[node] if free[d]), key=device_key)
                )

    first_of = [experts[0] if experts else -1 for experts in remaining]
    place(remaining)
    everything = [(layer, expert) for layer in range(num_layers) for expert in set_aside[layer]]
    for layer, expert in sorted(everything, key=lambda at: (-load_LE[at], at)):
        if free[owners.device_LE[layer, expert]]:
            assign(layer, expert, owners.device_LE[layer, expert])
    first_of = [experts[0] if experts else -1 for experts in set_aside]
    place([[e for e in experts if (layer, e) not in placed] for layer, experts in enumerate(set_aside)])
    return np.array([[placed[layer, e] for e in range(num_experts)] for layer in range(num_layers)])


@examples(300)
@given(cases())
def test_owners_equal_those_of_the_literal_algorithm(case):
    owners, load_LE, topology, overlap_degree = case
    new = heterogeneous_sharding(owners, load_LE, topology, overlap_degree=overlap_degree)
    assert new.device_LE.tolist() == reference(owners, load_LE, topology, overlap_degree).tolist()


@examples(100)
@given(cases())
def test_the_same_loads_again_move_nothing(case):
    owners, load_LE, topology, overlap_degree = case
    new = heterogeneous_sharding(owners, load_LE, topology, overlap_degree=overlap_degree)
    again = heterogeneous_sharding(new, load_LE * 3.0, topology, overlap_degree=overlap_degree)
    assert new.moves_to(again) == ()
    if overlap_degree >= owners.num_experts:
        assert owners.moves_to(new) == ()
