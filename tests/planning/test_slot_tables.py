import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.planning.dispatch.token_dispatch import plan_dispatch
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.slot_tables import ROWS, SlotTable, dispatch_table, even_table, owner_table
from tests.drawn_examples import examples

from .placement_cases import placements, random_counts_DE

SEEDS = st.integers(0, 2**32 - 1)
POLICIES = st.sampled_from(["even", "exact", "owner"])


def slots_of(placement):
    return SlotTable.of(placement, int(placement.replicas_per_device_D.max()))


def sent_ED(table_JE, count_E, slots):
    """Tokens by expert and receiving device, counted row by row."""
    sent = np.zeros((len(count_E), slots.num_devices), np.int64)
    for expert, count in enumerate(count_E):
        for n in range(count):
            slot = table_JE[n % ROWS, expert]
            assert slots.expert_DU.reshape(-1)[slot] == expert
            sent[expert, slot // slots.slots_per_device] += 1
    return sent


@examples(80)
@given(placements(), SEEDS, st.sampled_from([1, 8]))
def test_even_table_is_even_dispatch(case, seed, scale):
    topology, placement = case
    slots = slots_of(placement)
    count_DE = random_counts_DE(seed, placement.num_devices, placement.num_experts, 30) * scale
    dispatch = plan_dispatch("even", count_DE, placement, topology)
    for source, count_E in enumerate(count_DE):
        table_JE = even_table(slots, placement, topology, source)
        assert (table_JE.shape, table_JE.dtype) == ((ROWS, placement.num_experts), np.int64)
        error_ED = np.abs(sent_ED(table_JE, count_E, slots) - dispatch.sent_ED(source))
        # Up to one round through the table holders differ by a token; then by a row in a round.
        assert (error_ED.max(axis=1) <= 1 + count_E // ROWS).all()


def test_sources_do_not_all_begin_with_the_same_holder():
    placement = ExpertPlacement(np.array([0]), np.array([[1, 1, 1, 0, 0, 0]], bool))
    topology, slots = Topology.uniform(6, 1), slots_of(placement)
    dispatch = plan_dispatch("even", np.full((6, 1), 9), placement, topology)
    tables = [even_table(slots, placement, topology, source) for source in (3, 4, 5)]
    assert len({table[0, 0] for table in tables}) == 3
    assert len({dispatch_table(slots, dispatch, source, tables[0])[0, 0] for source in (3, 4, 5)}) == 3


@examples(40)
@given(placements(), SEEDS)
def test_owner_table_is_owner_dispatch(case, seed):
    topology, placement = case
    slots = slots_of(placement)
    count_DE = random_counts_DE(seed, placement.num_devices, placement.num_experts)
    dispatch = plan_dispatch("owner", count_DE, placement, topology)
    for source, count_E in enumerate(count_DE):
        sent = sent_ED(owner_table(slots, placement, source), count_E, slots)
        np.testing.assert_allclose(sent, dispatch.sent_ED(source), atol=1e-9)


@examples(80)
@given(placements(), SEEDS, POLICIES, st.sampled_from([1, 1000]))
def test_dispatch_table_has_the_shares_of_the_dispatch(case, seed, policy, scale):
    topology, placement = case
    slots = slots_of(placement)
    count_DE = random_counts_DE(seed, placement.num_devices, placement.num_experts) * scale
    dispatch = plan_dispatch(policy, count_DE, placement, topology)
    for source, count_E in enumerate(count_DE):
        otherwise_JE = even_table(slots, placement, topology, source)
        table_JE = dispatch_table(slots, dispatch, source, otherwise_JE)
        some_E = count_E > 0
        np.testing.assert_array_equal(table_JE[:, ~some_E], otherwise_JE[:, ~some_E])
        table_JE, wanted_ED = table_JE[:, some_E], dispatch.sent_ED(source)[some_E]
        share_ED = wanted_ED / count_E[some_E][:, None]
        is_device_JED = (table_JE // slots.slots_per_device)[:, :, None] == np.arange(slots.num_devices)
        rows_ED = is_device_JED.sum(axis=0)
        assert (np.abs(rows_ED - share_ED * ROWS) < 1).all()
        assert (slots.expert_DU.reshape(-1)[table_JE] == np.flatnonzero(some_E)).all()
        # The first n rows have nearly the same shares; the module's docstring states the bound.
        part_ED = rows_ED / ROWS
        prefix_JED = is_device_JED.cumsum(axis=0) - np.arange(1, ROWS + 1)[:, None, None] * part_ED
        num_E1 = (rows_ED > 0).sum(axis=1, keepdims=True)
        bound_ED = np.where((rows_ED > 0) & (num_E1 > 1), (1 + part_ED * (num_E1 - 2)) / 2, 0)
        assert (np.abs(prefix_JED) <= bound_ED + 1e-9).all()


def test_a_dispatch_of_another_placement_is_refused():
    topology, owner_E = Topology.uniform(2, 1), np.array([0])
    placement = ExpertPlacement(owner_E, np.array([[1, 1]], bool))
    dispatch = plan_dispatch("even", np.array([[1], [1]]), placement, topology)
    slots = slots_of(ExpertPlacement.owners_only(owner_E, 2))
    with pytest.raises(ValueError, match="sends tokens of expert 0 to device 1, which has no slot"):
        dispatch_table(slots, dispatch, 1, np.zeros((ROWS, 1), np.int64))


def test_too_many_replicas_are_refused():
    placement = ExpertPlacement(np.array([0, 0, 1]), np.array([[1, 1], [1, 1], [0, 1]], bool))
    message = (
        "device 1 holds 2 replicas and has 1 slots for them: wanted at most 1 replicas on each device; plan"
    )
    with pytest.raises(ValueError, match=message):
        SlotTable.of(placement, 1)


@examples(100)
@given(placements(), st.integers(0, 3), st.sampled_from([1, 2, 4]))
def test_slots_hold_the_experts_of_their_device(case, spare, multiple):
    _, placement = case
    replica_slots = int(placement.replicas_per_device_D.max()) + spare
    slots = SlotTable.of(placement, replica_slots, multiple)
    assert slots.num_experts == placement.num_experts
    added = slots.slots_per_device - placement.owned_per_device_D.max() - replica_slots
    assert 0 <= added < multiple
    assert slots.slots_per_device % multiple == 0
    for device, expert_P in enumerate(slots.expert_DU.tolist()):
        owned = np.flatnonzero(placement.owner_E == device).tolist()
        replicas = [e for e in placement.experts_on(device) if e not in owned]
        empty = slots.slots_per_device - len(owned) - len(replicas)
        assert expert_P == owned + [-1] * empty + replicas
    np.testing.assert_array_equal(slots.slot_ED >= 0, placement.present_ED)
    held_P = slots.expert_DU.reshape(-1)[slots.slot_ED[placement.present_ED]]
    np.testing.assert_array_equal(held_P, np.nonzero(placement.present_ED)[0])
