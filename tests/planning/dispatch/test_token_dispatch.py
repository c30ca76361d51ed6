from dataclasses import astuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.planning.dispatch.token_dispatch import TokenDispatch, plan_dispatch
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology
from tests.drawn_examples import SEEDS, examples
from tests.planning.placement_cases import (
    brute_force_dispatch_DED,
    pairs_traffic,
    placements,
    random_counts_DE,
)
from tests.runtime.slots.remap.exact_reference import exact_sent_ED

WHOLE = 840
"""Multiples of this number are divided among any number of holders without remainder."""


def sent_by_all(dispatch):
    """Tokens by source, expert and receiving device, ``[D, E, D]``."""
    return np.stack([dispatch.sent_ED(source) for source in range(len(dispatch.counts_DE))])


@examples(150)
@given(placements(), SEEDS)
def test_even_dispatch_is_the_one_written_down_token_by_token(case, seed):
    topology, placement = case
    counts_DE = WHOLE * random_counts_DE(seed, placement.num_devices, placement.num_experts)
    full = brute_force_dispatch_DED(counts_DE, placement, topology)
    dispatch = plan_dispatch("even", counts_DE, placement, topology)
    np.testing.assert_allclose(sent_by_all(dispatch), full, rtol=1e-9, atol=1e-6)
    np.testing.assert_allclose(dispatch.device_tokens_D, full.sum(axis=(0, 1)), rtol=1e-9)
    busiest, wanted = dispatch.busiest, pairs_traffic(full.sum(axis=1), topology)
    assert astuple(busiest) == pytest.approx(astuple(wanted), rel=1e-9, abs=1e-6)


@examples(150)
@given(placements(), SEEDS, st.sampled_from(["exact", "owner", "quotas"]))
def test_any_dispatch_loses_nothing_and_fills_with_the_nearest_tokens(case, seed, kind):
    topology, placement = case
    counts_DE = random_counts_DE(seed, placement.num_devices, placement.num_experts)
    if kind == "quotas":
        rng = np.random.default_rng(seed)
        share_ED = (rng.random(placement.present_ED.shape) + 1e-12) * placement.present_ED
        tokens_ED = counts_DE.sum(axis=0)[:, None] * share_ED / share_ED.sum(axis=1, keepdims=True)
        dispatch = TokenDispatch(counts_DE, tokens_ED, topology)
    else:
        dispatch = plan_dispatch(kind, counts_DE, placement, topology)
    sent_DED = sent_by_all(dispatch)
    assert sent_DED.min() >= -1e-9
    assert not sent_DED[:, ~placement.present_ED].any()
    np.testing.assert_allclose(sent_DED.sum(axis=2), counts_DE, atol=1e-6)
    np.testing.assert_allclose(sent_DED.sum(axis=0), dispatch.tokens_ED, atol=1e-6)
    own_DE = np.einsum("ded->de", sent_DED)
    np.testing.assert_allclose(own_DE, np.minimum(dispatch.tokens_ED.T, counts_DE), atol=1e-6)
    # A node does not send tokens away that its own holders could still compute, nor get others' then.
    is_far_DD = np.array(topology.node_of_device)[:, None] != np.array(topology.node_of_device)
    for expert in range(placement.num_experts):
        far_DD = np.where(is_far_DD, sent_DED[:, expert], 0)
        for devices in map(list, topology.devices_by_node):
            assert min(far_DD[devices].sum(), far_DD[:, devices].sum()) <= 1e-6
    busiest, wanted = dispatch.busiest, pairs_traffic(sent_DED.sum(axis=1), topology)
    assert astuple(busiest) == pytest.approx(astuple(wanted), rel=1e-9, abs=1e-6)
    if kind == "owner":
        replicas_ED = placement.present_ED.copy()
        replicas_ED[np.arange(placement.num_experts), placement.owner_E] = False
        np.testing.assert_array_equal(dispatch.tokens_ED[replicas_ED], counts_DE.T[replicas_ED])
    if kind == "exact":
        even_D = plan_dispatch("even", counts_DE, placement, topology).device_tokens_D
        assert dispatch.device_tokens_D.max() <= even_D.max() * (1 + 1e-9)


@examples(100)
@given(placements(), SEEDS)
def test_exact_dispatch_is_what_the_device_computes(case, seed):
    """The device rounds to whole tokens."""
    topology, placement = case
    counts_DE = WHOLE * random_counts_DE(seed, placement.num_devices, placement.num_experts)
    dispatch = plan_dispatch("exact", counts_DE, placement, topology)
    sources = range(placement.num_devices)
    device_ED = sum(exact_sent_ED(counts_DE, placement, topology, source) for source in sources)
    assert np.abs(dispatch.tokens_ED - device_ED).max() <= 1


def optimum(count_E, placement):
    """The lowest possible highest load: the most tokens that must stay in a set of devices, per device."""
    device_D, sets = np.arange(placement.num_devices), np.arange(1, 2**placement.num_devices)
    within_SD = (sets[:, None] >> device_D & 1).astype(bool)
    outside_SE = ~within_SD @ placement.present_ED.T
    return ((~outside_SE * count_E).sum(axis=1) / within_SD.sum(axis=1)).max()


@examples(50)
@given(placements(), SEEDS)
def test_loads_of_exact_dispatch_are_near_the_optimum(case, seed):
    topology, placement = case
    counts_DE = random_counts_DE(seed, placement.num_devices, placement.num_experts, 4000)
    best = optimum(counts_DE.sum(axis=0), placement)
    highest = plan_dispatch("exact", counts_DE, placement, topology).device_tokens_D.max()
    assert best - 1e-6 <= highest <= 1.04 * best + 1e-6


def test_bad_arguments_say_what_was_wanted():
    placement = ExpertPlacement.owners_only(np.array([0, 1]), 2)
    with pytest.raises(ValueError, match=r"shape \(3, 2\).* wanted \(2, 2\)"):
        plan_dispatch("even", np.zeros((3, 2), int), placement, Topology.uniform(2, 1))
    with pytest.raises(ValueError, match=r"placement 2 devices: wanted \(3, 2\)"):
        plan_dispatch("even", np.zeros((3, 2), int), placement, Topology.uniform(3, 1))
