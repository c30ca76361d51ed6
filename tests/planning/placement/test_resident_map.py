import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.planning.placement.owner_map import OwnerMap
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.resident_map import EMPTY, ResidentMap


def drawn(rng: np.random.Generator, owner_E: np.ndarray, num_devices: int, slots: int) -> ExpertPlacement:
    """Up to ``slots`` replicas on every device."""
    present_ED = ExpertPlacement.owners_only(owner_E, num_devices).present_ED.copy()
    for device in range(num_devices):
        others = np.flatnonzero(owner_E != device)
        number = min(int(rng.integers(slots + 1)), len(others))
        present_ED[rng.choice(others, number, replace=False), device] = True
    return ExpertPlacement(owner_E, present_ED, slots=slots)


@given(
    seed=st.integers(0, 10**6),
    num_layers=st.integers(1, 3),
    num_devices=st.integers(2, 5),
    local=st.integers(1, 3),
    slots=st.integers(1, 4),
)
def test_copies_turn_the_old_map_into_the_new_one(
    seed: int, num_layers: int, num_devices: int, local: int, slots: int
) -> None:
    rng = np.random.default_rng(seed)
    owners = OwnerMap.even(num_layers, num_devices * local, num_devices)
    held: dict[tuple[int, int], tuple[int, int]] = {
        (device, slot): owners.expert_in(device, slot)
        for device in range(num_devices)
        for slot in range(owners.slots_per_device)
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
            assert new.placement(layer, owner_E) == placement
            before = residents.placement(layer, owner_E)
            appearing += int((placement.present_ED & ~before.present_ED).sum())
            for device in range(num_devices):
                for expert, slot in new.held_by(device, layer).items():
                    place = (device, owners.slots_per_device + layer * slots + slot)
                    assert held[place] == (layer, expert)
        # Replicas that stay are not copied again.
        assert len(copies) == appearing
        assert kept.sum() + appearing == sum(placement.num_replicas for placement in placements)
        residents = new


def test_a_device_without_room_is_refused() -> None:
    owner_E = np.array([0, 0, 1, 1])
    placement = ExpertPlacement(owner_E, np.ones((4, 2), bool))
    with pytest.raises(ValueError, match=r"layer 0, device 0: got 2 replicas, wanted at most 1"):
        ResidentMap.empty(1, 2, 1).holding([placement])


def test_two_replicas_of_an_expert_on_one_device_are_refused() -> None:
    with pytest.raises(ValueError, match="wanted each once"):
        ResidentMap(np.array([[[2, 2]]]))
