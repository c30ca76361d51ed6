"""A layer changes only to a strategy that is modelled to be clearly faster."""

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
        ([10.0, 9.8, 9.9], 0, (), 0),  # 2 % counts as equal
        ([10.0, 9.0, 8.9], 0, (), 1),  # the first of the strategies that count as equal
        ([10.0, 9.0, 8.0], 0, (), 2),
        ([10.0, 9.0, 8.0], 0, (2,), 1),
        ([10.0, 9.0, 8.0], 0, (1, 2), 0),
        ([8.1, 9.0, 8.0], 2, (), 2),  # a layer does not change back for an equal strategy
        ([7.0, 9.0, 8.0], 2, (), 0),
        ([10.0, np.inf, 11.0], 1, (), 0),  # the present strategy can no longer serve the layer
        ([0.0, 0.0], 1, (), 1),
    ],
)
def test_selections_equal_those_worked_out_by_hand(
    seconds: list[float], present: int, barred: tuple[int, ...], wanted: int
) -> None:
    barred_LC = np.array([[index in barred for index in range(len(seconds))]])
    chosen_L = select_by_seconds(
        np.array([seconds]), np.array([present]), least_gain=0.03, barred_LC=barred_LC
    )
    assert chosen_L.tolist() == [wanted]


@given(shapes.flatmap(lambda shape: arrays.arrays(float, shape, elements=st.floats(0.001, 1))), st.data())
@examples(100)
def test_every_layer_gets_nearly_the_best_or_keeps_its_strategy(
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
    assert again_L.tolist() == chosen_L.tolist(), "a selection stays under the same seconds"


def test_unknown_seconds_are_refused() -> None:
    with pytest.raises(ValueError, match="wanted a number"):
        select_by_seconds(np.array([[np.nan, 1.0]]), np.array([0]), least_gain=0.0)
