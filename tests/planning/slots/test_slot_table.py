import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.slots.slot_table import SlotTable
from tests.drawn_examples import examples

from ..placement_cases import placements


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
