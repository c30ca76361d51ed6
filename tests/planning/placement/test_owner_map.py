import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.planning.placement.owner_map import EMPTY, OwnerMap, ResidentMap
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from tests.drawn_examples import SEEDS


@st.composite
def owner_maps(draw):
    """A map after some moves, and other owners with the same number of experts for each device."""
    num_layers, local, num_devices = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 5))
    even = OwnerMap.even(num_layers, local * num_devices, num_devices)
    rng = np.random.default_rng(draw(SEEDS))

    def shuffled():
        return rng.permutation(even.device_LE.reshape(-1)).reshape(even.device_LE.shape)

    return even.with_owners(shuffled()), shuffled()


def test_the_even_map_equals_megatrons_assignment():
    even = OwnerMap.even(num_layers=2, num_experts=4, num_devices=2)
    assert even.device_LE.tolist() == [[0, 0, 1, 1]] * 2
    assert even.slot_LE.tolist() == [[0, 1, 0, 1], [2, 3, 2, 3]]
    assert even.is_even
    assert even.slots_on(1, 1) == {2: 2, 3: 3}


@given(owner_maps())
def test_moves_lead_from_one_map_to_the_other_and_lists_back_to_it(case):
    old, device_LE = case
    new = old.with_owners(device_LE)
    assert np.array_equal(new.device_LE, device_LE)
    stays = old.device_LE == device_LE
    assert np.array_equal(new.slot_LE[stays], old.slot_LE[stays])
    moves = old.moves_to(new)
    assert len(moves) == int((~stays).sum())
    for move in moves:
        assert old.slots_on(move.source_device, move.layer)[move.expert] == move.source_slot
        assert new.slots_on(move.device, move.layer)[move.expert] == move.slot
    # Contents leave and enter the same slots, so the moves are a permutation.
    assert {(m.source_device, m.source_slot) for m in moves} == {(m.device, m.slot) for m in moves}
    assert old.moves_to(old) == ()
    assert (new.digest() == old.digest()) == (not moves)
    again = OwnerMap.from_lists(new.as_lists())
    assert new.moves_to(again) == ()
    assert again.digest() == new.digest()


def test_maps_without_some_expert_are_refused():
    even = OwnerMap.even(1, 4, 2)
    with pytest.raises(ValueError, match="used twice"):
        OwnerMap(even.device_LE, [[0, 0, 0, 1]], 2)
    with pytest.raises(ValueError, match="used twice"):
        OwnerMap([[0, 0, 0, 1]], [[0, 1, 2, 0]], 2)
    with pytest.raises(ValueError, match="slots for them"):
        even.with_owners(np.array([[0, 0, 0, 1]]))
    with pytest.raises(ValueError, match="multiple"):
        OwnerMap.even(1, 5, 2)


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 6))
def test_fewer_experts_than_devices_are_spread_over_all_devices(more, experts, layers):
    devices = experts + more
    even = OwnerMap.even(layers, experts, devices)
    for device_E in even.device_LE:
        assert len(set(device_E.tolist())) == experts
    owned_D = np.bincount(even.device_LE.reshape(-1), minlength=devices)
    assert set(owned_D.tolist()) <= {layers * experts // devices, even.slots_per_device}
    assert even.is_even
    # An expert may go to any device with a free slot.
    free = np.flatnonzero(owned_D < even.slots_per_device)
    if len(free):
        device_LE = even.device_LE.copy()
        device_LE[0, 0] = free[0]
        moved = even.with_owners(device_LE)
        assert moved.device_LE.tolist() == device_LE.tolist()
        assert (moved.slot_LE.reshape(-1)[1:] == even.slot_LE.reshape(-1)[1:]).all()


def drawn(rng, owner_E, num_devices, slots):
    """Up to ``slots`` replicas on every device."""
    present_ED = ExpertPlacement.owners_only(owner_E, num_devices).present_ED.copy()
    for device in range(num_devices):
        others = np.flatnonzero(owner_E != device)
        number = min(int(rng.integers(slots + 1)), len(others))
        present_ED[rng.choice(others, number, replace=False), device] = True
    return ExpertPlacement(owner_E, present_ED)


@given(
    seed=st.integers(0, 10**6),
    num_layers=st.integers(1, 3),
    num_devices=st.integers(2, 5),
    local=st.integers(1, 3),
    slots=st.integers(1, 4),
)
def test_copies_turn_the_old_map_into_the_new_one(seed, num_layers, num_devices, local, slots):
    rng = np.random.default_rng(seed)
    owners = OwnerMap.even(num_layers, num_devices * local, num_devices)
    held = {
        (device, slot): (layer, expert)
        for device, layer in np.ndindex(num_devices, num_layers)
        for expert, slot in owners.slots_on(device, layer).items()
    }
    residents = ResidentMap.empty(num_layers, num_devices, slots)
    for _ in range(3):
        placements = [drawn(rng, owner_E, num_devices, slots) for owner_E in owners.device_LE]
        new = residents.holding(placements)
        copies = residents.copies_to(new, owners)
        for copy in copies:
            assert copy.source_device != copy.device
            assert held[copy.source_device, copy.source_slot] == (copy.layer, copy.expert)
            held[copy.device, copy.slot] = (copy.layer, copy.expert)
        kept = (new.expert_LDW == residents.expert_LDW) & (new.expert_LDW != EMPTY)
        appearing = 0
        for layer, placement in enumerate(placements):
            owner_E = owners.device_LE[layer]
            for device in range(num_devices):
                replicas = {e for e in placement.experts_on(device) if owner_E[e] != device}
                assert new.held_by(device, layer).keys() == replicas
                appearing += len(replicas - residents.held_by(device, layer).keys())
                for expert, slot in new.held_by(device, layer).items():
                    place = (device, owners.slots_per_device + layer * slots + slot)
                    assert held[place] == (layer, expert)
        # Replicas that stay are not copied again.
        assert len(copies) == appearing
        assert kept.sum() + appearing == sum(placement.num_replicas for placement in placements)
        residents = new


def test_a_device_without_room_is_refused():
    owner_E = np.array([0, 0, 1, 1])
    placement = ExpertPlacement(owner_E, np.ones((4, 2), bool))
    with pytest.raises(ValueError, match=r"layer 0, device 0: got 2 replicas, wanted at most 1"):
        ResidentMap.empty(1, 2, 1).holding([placement])
