import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.planning.dispatch.token_dispatch import plan_dispatch
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.slot_tables import ROWS, SlotTable, even_table, owner_table
from tests.drawn_examples import SEEDS, examples

from .placement_cases import placements, random_counts_DE, slots_of


def sent_ED(table_JE, count_E, slots):
    """Tokens by expert and receiving device, counted row by row."""
    sent = np.zeros((len(count_E), slots.num_devices), np.int64)
    for expert, count in enumerate(count_E):
        for n in range(count):
            slot = table_JE[n % ROWS, expert]
            assert slots.expert_DU.reshape(-1)[slot] == expert
            sent[expert, slot // slots.slots_per_device] += 1
    return sent


@pytest.mark.parametrize("policy", ["even", "owner"])
@examples(60)
@given(placements(), SEEDS, st.sampled_from([1, 8]))
def test_a_table_is_its_dispatch(policy, case, seed, scale):
    topology, placement = case
    slots = slots_of(placement)
    count_DE = random_counts_DE(seed, placement.num_devices, placement.num_experts, 30) * scale
    dispatch = plan_dispatch(policy, count_DE, placement, topology)
    for source, count_E in enumerate(count_DE):
        if policy == "owner":
            table_JE, most_E = owner_table(slots, placement, source), np.zeros(len(count_E))
        else:
            # Up to one round through the table holders differ by a token; then by a row in a round.
            table_JE, most_E = even_table(slots, placement, topology, source), 1 + count_E // ROWS
        assert (table_JE.shape, table_JE.dtype) == ((ROWS, placement.num_experts), np.int64)
        error_ED = np.abs(sent_ED(table_JE, count_E, slots) - dispatch.sent_ED(source))
        assert (error_ED.max(axis=1) <= most_E + 1e-9).all()


def test_sources_do_not_all_begin_with_the_same_holder():
    placement = ExpertPlacement(np.array([0]), np.array([[1, 1, 1, 0, 0, 0]], bool))
    topology, slots = Topology.uniform(6, 1), slots_of(placement)
    tables = [even_table(slots, placement, topology, source) for source in (3, 4, 5)]
    assert len({table[0, 0] for table in tables}) == 3


def test_too_many_replicas_are_refused():
    placement = ExpertPlacement(np.array([0, 0, 1]), np.array([[1, 1], [1, 1], [0, 1]], bool))
    with pytest.raises(ValueError, match="device 1 holds 2 replicas and has 1 slots for them: wanted"):
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
