import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.planning.dispatch.even_dispatch import EvenDispatch, expected_device_load_D
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology
from tests.drawn_examples import examples

from ..placement_cases import brute_force_dispatch_DED, placements, random_counts_DE
from ..sent_tables import sent_by, sent_by_all

SEEDS = st.integers(0, 2**32 - 1)


def held_by(num_devices, *holders_of_experts):
    present_ED = np.zeros((len(holders_of_experts), num_devices), dtype=bool)
    for expert, holders in enumerate(holders_of_experts):
        present_ED[expert, list(holders)] = True
    return ExpertPlacement(np.array([holders[0] for holders in holders_of_experts]), present_ED)


def test_a_device_with_the_expert_keeps_its_own_tokens():
    counts_DE = np.array([[7], [7], [7]])
    placement = held_by(3, (0, 1))
    row = sent_by(EvenDispatch(counts_DE, placement, Topology.uniform(3, 1)), 1)
    assert row.tolist() == [[0, 7, 0]]


def test_tokens_prefer_devices_with_the_expert_in_their_node():
    topology = Topology.uniform(6, 2)
    placement = held_by(6, (0, 1, 3))
    counts_DE = np.full((6, 1), 10)
    assert sent_by(EvenDispatch(counts_DE, placement, topology), 2).tolist() == [[5, 5, 0, 0, 0, 0]]
    assert sent_by(EvenDispatch(counts_DE, placement, topology), 5).tolist() == [[0, 0, 0, 10, 0, 0]]
    assert EvenDispatch(counts_DE, placement, topology).cross_node_tokens() == 0


def test_without_the_expert_in_the_node_all_holders_share_the_tokens():
    topology = Topology.uniform(6, 3)
    placement = held_by(6, (0, 1, 2))
    counts_DE = np.full((6, 1), 9)
    assert sent_by(EvenDispatch(counts_DE, placement, topology), 4).tolist() == [[3, 3, 3, 0, 0, 0]]
    assert EvenDispatch(counts_DE, placement, topology).cross_node_tokens() == 18  # devices 4 and 5


def test_remaining_tokens_start_at_holder_source_plus_expert():
    topology = Topology.uniform(5, 1)
    placement = held_by(5, (0,), (1, 2, 4))
    counts_DE = np.full((5, 2), 5)  # 5 tokens over 3 holders: each gets 1, and 2 remain
    # source 0: start (0 + 1) % 3 = 1, so the second and third holder; source 3: start 4 % 3 = 1.
    assert sent_by(EvenDispatch(counts_DE, placement, topology), 0)[1].tolist() == [0, 1, 2, 0, 2]
    assert sent_by(EvenDispatch(counts_DE, placement, topology), 3)[1].tolist() == [0, 1, 2, 0, 2]
    assert sent_by_all(EvenDispatch(counts_DE, placement, topology))[:, 1, 2].tolist() == [2, 0, 5, 2, 0]
    assert EvenDispatch(counts_DE, placement, topology).device_tokens_D().tolist() == [25, 7, 9, 0, 9]


@examples(150)
@given(placements(), SEEDS)
def test_rows_and_loads_are_those_of_the_full_tensor(case, seed):
    topology, placement = case
    counts_DE = random_counts_DE(seed, placement.num_devices, placement.num_experts)
    full = brute_force_dispatch_DED(counts_DE, placement, topology)
    for device in range(placement.num_devices):
        row_ED = sent_by(EvenDispatch(counts_DE, placement, topology), device)
        assert row_ED.dtype == np.int64
        np.testing.assert_array_equal(row_ED, full[device])
        np.testing.assert_array_equal(row_ED.sum(axis=1), counts_DE[device])
        assert not row_ED[~placement.present_ED].any()
    tokens_D = EvenDispatch(counts_DE, placement, topology).device_tokens_D()
    np.testing.assert_array_equal(tokens_D, full.sum(axis=(0, 1)))
    assert tokens_D.sum() == counts_DE.sum()
    node_D = np.array(topology.node_of_device)
    crossing_DD = node_D[:, None] != node_D[None, :]
    assert (
        EvenDispatch(counts_DE, placement, topology).cross_node_tokens()
        == full.sum(axis=1)[crossing_DD].sum()
    )


@examples(100)
@given(placements(), SEEDS)
def test_expected_load_is_the_dispatch_without_rounding(case, seed):
    topology, placement = case
    # Multiples of every possible number of holders leave no remainder.
    counts_DE = random_counts_DE(seed, placement.num_devices, placement.num_experts) * 840
    expected_D = expected_device_load_D(counts_DE, placement, topology)
    np.testing.assert_allclose(
        expected_D, EvenDispatch(counts_DE, placement, topology).device_tokens_D(), rtol=1e-9
    )
    fortran = expected_device_load_D(np.asfortranarray(counts_DE), placement, topology)
    np.testing.assert_array_equal(expected_D, fortran)


def test_a_new_topology_does_not_reuse_cached_tables():
    counts_DE = np.full((4, 1), 6)
    placement = held_by(4, (0, 1, 2))
    one, two = Topology.uniform(4, 1), Topology.uniform(4, 2)
    assert sent_by(EvenDispatch(counts_DE, placement, one), 3).tolist() == [[2, 2, 2, 0]]
    assert sent_by(EvenDispatch(counts_DE, placement, two), 3).tolist() == [[0, 0, 6, 0]]
    assert sent_by(EvenDispatch(counts_DE, placement, one), 3).tolist() == [[2, 2, 2, 0]]


def test_bad_arguments_say_what_was_wanted():
    placement = held_by(2, (0,), (1,))
    with pytest.raises(ValueError, match=r"shape \(3, 2\): wanted \(2, 2\)"):
        sent_by(EvenDispatch(np.zeros((3, 2), int), placement, Topology.uniform(2, 1)), 0)
    with pytest.raises(ValueError, match="2 devices and the topology 3"):
        sent_by(EvenDispatch(np.zeros((2, 2), int), placement, Topology.uniform(3, 1)), 0)
    with pytest.raises(ValueError, match="source is 2: wanted a device from 0 to 1"):
        sent_by(EvenDispatch(np.zeros((2, 2), int), placement, Topology.uniform(2, 1)), 2)
