from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.planning.balanced.replica_planner import plan_materialization
from megatron_fssdp.planning.dispatch import balanced_dispatch
from megatron_fssdp.planning.dispatch.balanced_dispatch import ENOUGH
from megatron_fssdp.planning.dispatch.even_dispatch import EvenDispatch
from megatron_fssdp.planning.dispatch.token_dispatch import plan_dispatch
from megatron_fssdp.planning.kernels.parts.water_filling import WaterFilling
from megatron_fssdp.planning.placement.placement import ExpertPlacement, even_owners
from megatron_fssdp.planning.placement.topology import Topology
from tests.drawn_examples import examples

from ..placement_cases import placements, random_counts_DE

SEEDS = st.integers(0, 2**32 - 1)


def traffic(dispatch, topology):
    """Highest load, and most pairs that a device gets from its node, and a device and a node from others."""
    near_D, far_D = np.zeros((2, topology.num_devices), dtype=np.int64)
    node_D = np.array(topology.node_of_device)
    for device in range(topology.num_devices):
        from_D = dispatch.to_device(device).sum(axis=1)
        far_D[device] = from_D[node_D != node_D[device]].sum()
        near_D[device] = from_D[node_D == node_D[device]].sum() - from_D[device]
    far_N = np.bincount(node_D, weights=far_D)
    return np.array([dispatch.device_tokens_D().max(), near_D.max(), far_D.max(), far_N.max()])


@examples(300)
@given(placements(), SEEDS)
def test_balanced_dispatch_is_never_worse_than_even_dispatch(case, seed):
    topology, placement = case
    counts_DE = random_counts_DE(seed, placement.num_devices, placement.num_experts)
    even = EvenDispatch(counts_DE, placement, topology)
    balanced = balanced_dispatch.balanced_dispatch(counts_DE, placement, topology)
    assert (traffic(balanced, topology) <= traffic(even, topology)).all()
    # Tokens do not travel farther either: as many stay on their device and in their node as before.
    assert balanced.cross_node_tokens() == even.cross_node_tokens()
    for device in range(placement.num_devices):
        np.testing.assert_array_equal(
            balanced.to_device(device)[device], even.to_device(device)[device], err_msg="own tokens"
        )


@examples(150)
@given(placements(), SEEDS)
def test_the_highest_load_is_as_low_as_it_can_be(case, seed):
    _, placement = case
    topology = Topology.uniform(placement.num_devices, 1)
    counts_DE = random_counts_DE(seed, placement.num_devices, placement.num_experts)
    with pytest.MonkeyPatch.context() as patch:
        search = balanced_dispatch.level_tokens

        def search_without_limits(*arguments):
            search(*arguments[:-1], 10**9)

        patch.setattr(balanced_dispatch, "level_tokens", search_without_limits)
        patch.setattr(balanced_dispatch, "MOST_DEALS", 10**6)
        dispatch = balanced_dispatch.balanced_dispatch(counts_DE, placement, topology)
        highest = dispatch.device_tokens_D().max()
    bound = lowest_possible(counts_DE, placement)
    assert bound <= highest <= max(bound + 1, ENOUGH * counts_DE.sum() / placement.num_devices)


@examples(150)
@given(placements(), SEEDS)
def test_unbound_dispatch_lowers_the_highest_load_as_far_as_the_holders_allow(case, seed):
    topology, placement = case
    counts_DE = random_counts_DE(seed, placement.num_devices, placement.num_experts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(balanced_dispatch, "MOST_DEALS", 10**6)
        dispatch = balanced_dispatch.unbound_dispatch(counts_DE, placement, topology)
    tokens_ED = np.zeros_like(placement.present_ED, dtype=np.int64)
    for device in range(placement.num_devices):
        received_DE = dispatch.to_device(device)
        tokens_ED[:, device] = received_DE.sum(axis=0)
        # The nearest tokens come first: its own before those of others.
        np.testing.assert_array_equal(
            received_DE[device], np.minimum(tokens_ED[:, device], counts_DE[device]), err_msg="own tokens"
        )
    assert not tokens_ED[~placement.present_ED].any()
    np.testing.assert_array_equal(tokens_ED.sum(axis=1), counts_DE.sum(axis=0))
    highest, mean = tokens_ED.sum(axis=0).max(), counts_DE.sum() / placement.num_devices
    bound = max(
        -(-int(counts_DE[:, ~placement.present_ED[:, outside].any(axis=1)].sum()) // size)
        for size in range(1, placement.num_devices + 1)
        for outside in map(list, combinations(range(placement.num_devices), placement.num_devices - size))
    )
    assert bound <= highest <= max(bound + 1, ENOUGH * mean)


def lowest_possible(counts_DE, placement):
    """Highest mean load, over all sets of devices, that no device outside the set can take over (Hall)."""
    num_devices, num_experts = counts_DE.shape
    highest = 0
    for size in range(1, num_devices + 1):
        for devices in combinations(range(num_devices), size):
            stays = 0
            for expert in range(num_experts):
                holders = set(np.flatnonzero(placement.present_ED[expert]).tolist())
                stays += counts_DE[sorted(holders & set(devices)), expert].sum()
                if holders <= set(devices):
                    stays += counts_DE[sorted(set(range(num_devices)) - holders), expert].sum()
            highest = max(highest, -(-int(stays) // size))
    return highest


def test_replicas_take_remote_tokens_of_an_overloaded_owner():
    # Devices 0 and 3 hold expert 0; device 0 also owns expert 1, which all devices use.
    present_ED = np.zeros((2, 4), dtype=bool)
    present_ED[0, [0, 3]] = present_ED[1, 0] = True
    placement = ExpertPlacement(np.array([0, 0]), present_ED)
    topology = Topology.uniform(4, 1)
    counts_DE = np.array([[10, 20], [10, 20], [10, 20], [10, 20]])
    even = plan_dispatch("even", counts_DE, placement, topology)
    assert even.device_tokens_D().tolist() == [100, 0, 0, 20]
    balanced = plan_dispatch("balanced", counts_DE, placement, topology)
    assert balanced.device_tokens_D().tolist() == [90, 0, 0, 30]
    assert balanced.from_source(1).tolist() == [[0, 0, 0, 10], [20, 0, 0, 0]]


def test_balanced_dispatch_improves_drifted_loads():
    """Sixteen experts on eight devices are planned for one load and used under another."""
    topology = Topology.uniform(8, 1)
    excess = {"even": [], "balanced": []}
    for seed in range(20):
        rng = np.random.default_rng(seed)
        popularity_E = rng.lognormal(sigma=1.0, size=16)
        planned_DE = rng.multinomial(4096, popularity_E / popularity_E.sum(), size=8)
        drifted_E = popularity_E * rng.lognormal(sigma=0.3, size=16)
        counts_DE = rng.multinomial(4096, drifted_E / drifted_E.sum(), size=8)
        owner_E = even_owners(16, 8)
        placement = plan_materialization(owner_E, planned_DE, topology, overlap_degree=16, slots=2)
        for policy, found in excess.items():
            load_D = plan_dispatch(policy, counts_DE, placement, topology).device_tokens_D()
            found.append(load_D.max() / load_D.mean() - 1)
    assert np.mean(excess["balanced"]) < 0.5 * np.mean(excess["even"])


def test_without_replicas_the_dispatch_is_even_dispatch():
    placement = ExpertPlacement.owners_only(np.array([0, 1]), 2)
    dispatch = plan_dispatch("balanced", np.ones((2, 2), int), placement, Topology.uniform(2, 1))
    assert isinstance(dispatch, EvenDispatch)


@examples(200)
@given(st.data())
def test_water_filling_assigns_all_tokens_and_minimizes_the_highest_load(data):
    size = data.draw(st.integers(1, 6))
    loads = data.draw(st.lists(st.integers(0, 50), min_size=size, max_size=size))
    room = data.draw(st.lists(st.integers(0, 30), min_size=size, max_size=size))
    amount = data.draw(st.integers(0, sum(room)))
    filling = WaterFilling(size)
    filling.rising_U[:], filling.load_U[:], filling.room_U[:] = map(np.array, (range(size), loads, room))
    filling.divide(amount, size)
    parts = filling.part_U.tolist()
    assert sum(parts) == amount
    assert all(0 <= part <= most for part, most in zip(parts, room, strict=True))
    # No single token could move to a device whose load is lower by more than one token.
    after = [load + part for load, part in zip(loads, parts, strict=True)]
    highest = max((level for level, part in zip(after, parts, strict=True) if part), default=0)
    assert all(
        level + 1 >= highest for level, part, most in zip(after, parts, room, strict=True) if part < most
    )
