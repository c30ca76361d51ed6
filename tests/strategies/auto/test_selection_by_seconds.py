"""A layer changes only to what is modelled to be clearly faster."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from megatron_fssdp.strategies.auto.selection_by_seconds import select_by_seconds
from tests.drawn_examples import examples

shapes = st.tuples(st.integers(1, 5), st.integers(1, 6))


@pytest.mark.parametrize(
    ("seconds", "present", "barred", "wanted"),
    [
        ([10.0, 9.8, 9.9], 0, (), 0),  # 2 % is nothing
        ([10.0, 9.0, 8.9], 0, (), 1),  # the first of those that cannot be told apart
        ([10.0, 9.0, 8.0], 0, (), 2),
        ([10.0, 9.0, 8.0], 0, (2,), 1),
        ([10.0, 9.0, 8.0], 0, (1, 2), 0),
        ([8.1, 9.0, 8.0], 2, (), 2),  # nor does a layer go back for nothing
        ([7.0, 9.0, 8.0], 2, (), 0),
        ([10.0, np.inf, 11.0], 1, (), 0),  # what it has cannot serve it any more
        ([0.0, 0.0], 1, (), 1),
    ],
)
def test_by_hand(seconds: list[float], present: int, barred: tuple[int, ...], wanted: int) -> None:
    barred_LC = np.array([[index in barred for index in range(len(seconds))]])
    chosen_L = select_by_seconds(
        np.array([seconds]), np.array([present]), least_gain=0.03, barred_LC=barred_LC
    )
    assert chosen_L.tolist() == [wanted]


@given(shapes.flatmap(lambda shape: arrays.arrays(float, shape, elements=st.floats(0.001, 1))), st.data())
@examples(100)
def test_every_layer_ends_close_to_the_best_or_where_it_was(
    seconds_LC: np.ndarray, data: st.DataObject
) -> None:
    num_layers, num_candidates = seconds_LC.shape
    present_L = np.array([data.draw(st.integers(0, num_candidates - 1)) for _ in range(num_layers)])
    gain = data.draw(st.floats(0, 0.5))
    chosen_L = select_by_seconds(seconds_LC, present_L, least_gain=gain)
    for seconds_C, present, chosen in zip(seconds_LC, present_L, chosen_L, strict=True):
        if chosen != present:
            assert seconds_C[chosen] < (1 - gain) * seconds_C[present]
            assert seconds_C[chosen] <= (1 + gain) * seconds_C.min()
    again_L = select_by_seconds(seconds_LC, chosen_L, least_gain=gain)
    assert again_L.tolist() == chosen_L.tolist(), "chosen once, chosen for good"


def test_unknown_seconds_are_refused() -> None:
    with pytest.raises(ValueError, match="wanted a number"):
        select_by_seconds(np.array([[np.nan, 1.0]]), np.array([0]), least_gain=0.0)
