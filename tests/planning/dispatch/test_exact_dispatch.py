"""Exact dispatch evens out device loads, and equals what the device computes."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.planning.balanced.replica_planner import plan_materialization
from megatron_fssdp.planning.cost.layer_traffic import dispatch_traffic
from megatron_fssdp.planning.dispatch.even_dispatch import EvenDispatch
from megatron_fssdp.planning.dispatch.exact_dispatch import exact_dispatch
from megatron_fssdp.planning.dispatch.quota_dispatch import QuotaDispatch
from megatron_fssdp.planning.dispatch.token_dispatch import plan_dispatch
from megatron_fssdp.planning.placement.placement import ExpertPlacement, even_owners
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.slots.slot_table import SlotTable
from megatron_fssdp.runtime.slots.exact_shares import Holders, exact_ends_ED
from tests.drawn_examples import examples

from ..placement_cases import placements, random_counts_DE
from ..sent_tables import sent_by, sent_by_all

SEEDS = st.integers(0, 2**32 - 1)


@examples(150)
@given(placements(), SEEDS)
def test_it_equals_the_shares_of_the_device(case: tuple[Topology, ExpertPlacement], seed: int) -> None:
    topology, placement = case
    counts_DE = random_counts_DE(seed, placement.num_devices, placement.num_experts)
    dispatch = exact_dispatch(counts_DE, placement, topology)
    slots = SlotTable.of(placement, int(placement.replicas_per_device_D.max()))
    slot_ED, node_D = (torch.from_numpy(array.copy()) for array in (slots.slot_ED, topology.node_of_device_D))
    for source in range(placement.num_devices):
        end_ED = exact_ends_ED(torch.from_numpy(counts_DE), Holders.of(slot_ED, node_D, source)).numpy()
        # Sums are added in another order, so that a half token may be rounded to either side.
        assert np.abs(sent_by(dispatch, source).cumsum(axis=1) - end_ED).max() <= 1


@examples(150)
@given(placements(), SEEDS)
def test_no_token_is_lost_and_the_highest_load_does_not_rise(
    case: tuple[Topology, ExpertPlacement], seed: int
) -> None:
    topology, placement = case
    counts_DE = random_counts_DE(seed, placement.num_devices, placement.num_experts)
    dispatch = exact_dispatch(counts_DE, placement, topology)
    sent_DED = sent_by_all(dispatch)
    tokens_ED = sent_DED.sum(axis=0)
    if isinstance(dispatch, QuotaDispatch):  # the nearest tokens come first
        own_DE = np.einsum("ded->de", sent_DED)
        np.testing.assert_array_equal(own_DE, np.minimum(tokens_ED.T, counts_DE))
    assert not tokens_ED[~placement.present_ED].any()
    np.testing.assert_array_equal(sent_DED.sum(axis=2), counts_DE)
    even_D = EvenDispatch(counts_DE, placement, topology).device_tokens_D()
    assert dispatch.device_tokens_D().max() <= even_D.max()


def test_it_improves_drifted_loads() -> None:
    """Sixteen experts on eight devices are planned for one load and used under another."""
    topology = Topology.uniform(8, 1)
    excess: dict[str, list[float]] = {"even": [], "exact": []}
    for seed in range(20):
        rng = np.random.default_rng(seed)
        popularity_E = rng.lognormal(sigma=1.0, size=16)
        planned_DE = rng.multinomial(4096, popularity_E / popularity_E.sum(), size=8)
        drifted_E = popularity_E * rng.lognormal(sigma=0.3, size=16)
        counts_DE = rng.multinomial(4096, drifted_E / drifted_E.sum(), size=8)
        placement = plan_materialization(even_owners(16, 8), planned_DE, topology, overlap_degree=16, slots=2)
        for policy, found in excess.items():
            load_D = plan_dispatch(policy, counts_DE, placement, topology).device_tokens_D()  # type: ignore[arg-type]
            found.append(load_D.max() / load_D.mean() - 1)
    assert np.mean(excess["exact"]) < 0.5 * np.mean(excess["even"])


def test_replicas_take_tokens_of_an_overloaded_owner() -> None:
    # Devices 0 and 3 hold expert 0; device 0 also owns expert 1, which all devices use.
    present_ED = np.zeros((2, 4), dtype=bool)
    present_ED[0, [0, 3]] = present_ED[1, 0] = True
    placement, topology = ExpertPlacement(np.array([0, 0]), present_ED), Topology.uniform(4, 1)
    counts_DE = np.array([[10, 20], [10, 20], [10, 20], [10, 20]])
    assert plan_dispatch("even", counts_DE, placement, topology).device_tokens_D().tolist() == [100, 0, 0, 20]
    load_D = plan_dispatch("exact", counts_DE, placement, topology).device_tokens_D()
    # Expert 1 has one holder, so that device 0 computes 80 pairs at least.
    assert load_D.sum() == 120
    assert 80 <= load_D[0] <= 82
    found = dispatch_traffic("exact", counts_DE, placement, topology)
    np.testing.assert_array_equal(found.tokens_D, load_D)


@pytest.mark.parametrize("policy", ["even", "exact"])
def test_without_replicas_and_without_tokens_it_is_even_dispatch(policy: str) -> None:
    plain, topology = ExpertPlacement.owners_only(np.array([0, 1]), 2), Topology.uniform(2, 1)
    none_DE = np.zeros((2, 2), np.int64)
    for counts_DE, placement in ((none_DE + 1, plain), (none_DE, plain.with_replicas([(0, 1)]))):
        dispatch = plan_dispatch(policy, counts_DE, placement, topology)  # type: ignore[arg-type]
        assert isinstance(dispatch, EvenDispatch)
