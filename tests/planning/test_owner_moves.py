import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.planning.owner_moves import ReshardClock, closed_part, paying_owners
from megatron_fssdp.planning.placement.owner_map import OwnerMap


@pytest.mark.parametrize(
    ("longest", "moved_at", "wanted"), [(30, None, [5, 15, 35, 65, 95]), (100, 15, [5, 15, 20, 30, 50, 90])]
)
def test_intervals_double_while_nothing_moves_and_begin_again_after_a_move(
    longest: int, moved_at: int | None, wanted: list[int]
) -> None:
    clock, due = ReshardClock(5, longest), []
    for iteration in range(100):
        if clock.is_due(iteration):
            due.append(iteration)
            clock.reconsidered(moved=iteration == moved_at)
    assert due == wanted


def test_new_owners_last_as_long_again_as_the_present_ones_did() -> None:
    clock = ReshardClock(5, 100)
    assert not clock.is_due(1000)  # A resumed training starts anywhere.
    assert clock.is_due(1005)
    assert clock.lasting_iterations == 5
    clock.reconsidered(moved=False)
    assert clock.is_due(1015)
    assert clock.lasting_iterations == 15
    clock.reconsidered(moved=True)
    assert clock.is_due(1020)
    assert clock.lasting_iterations == 5


OLD = OwnerMap.even(2, 4, 2)
# Layer 0 gets its two busy experts apart. Layer 1 gets them together.
NEW = OLD.with_owners(np.array([[0, 1, 0, 1], [0, 1, 0, 1]]))
LOAD_LE = np.array([[5.0, 5, 1, 1], [5, 1, 5, 1]])


@pytest.mark.parametrize(("move_s", "iterations", "moved"), [(1.0, 1, [0]), (5.0, 1, []), (5.0, 2, [0])])
def test_only_layers_that_become_faster_move_and_only_if_it_pays(
    move_s: float, iterations: int, moved: list[int]
) -> None:
    """Layer 0 saves 4 seconds in an iteration by one exchange of two experts."""
    result = paying_owners(
        OLD,
        NEW,
        layer_s=lambda layer, owner_E: np.bincount(owner_E, weights=LOAD_LE[layer], minlength=2).max(),
        moving_s=lambda owners: move_s * (owners.device_LE != OLD.device_LE).sum() / 2,
        num_iterations=iterations,
    )
    changed = np.flatnonzero((result.device_LE != OLD.device_LE).any(axis=1))
    assert changed.tolist() == moved


@given(st.data())
def test_a_part_keeps_every_device_full_and_moves_nothing_else(data: st.DataObject) -> None:
    num_layers, num_devices = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([2, 4]))
    old = OwnerMap.even(num_layers, 8, num_devices)
    new = old.with_owners(
        np.array(data.draw(st.permutations(old.device_LE.reshape(-1).tolist()))).reshape(num_layers, 8)
    )
    layers = data.draw(st.sets(st.integers(0, num_layers - 1)))
    part = closed_part(old, new, layers)  # An OwnerMap refuses devices with other numbers of experts.
    moved = part.device_LE != old.device_LE
    np.testing.assert_array_equal(part.device_LE[moved], new.device_LE[moved])
    assert not moved[[layer for layer in range(num_layers) if layer not in layers]].any()
    if len(layers) == num_layers:
        np.testing.assert_array_equal(part.device_LE, new.device_LE)
