import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.simulation.ddl_roofline import RooflinePoint, ideal_flops_per_s, semi_ideal_flops_per_s


def test_points_equal_those_worked_out_by_hand() -> None:
    """Two devices of 10 FLOP/s: 6 s of compute, then 3 s of communication, 90 FLOPs in total."""
    point = RooflinePoint(6.0, 3.0, 9.0, 90.0, 2)
    assert point.ratio == 2
    assert point.mean_flops_per_s == 5
    assert ideal_flops_per_s(point.ratio, 10.0) == 10
    assert semi_ideal_flops_per_s(point.ratio, 10.0) == pytest.approx(20 / 3)
    assert ideal_flops_per_s(np.array([0.5, 4.0]), 10.0).tolist() == [5, 10]


@given(compute_s=st.floats(1e-3, 1e3), communication_s=st.floats(1e-3, 1e3), unevenness=st.floats(1, 8))
def test_points_lie_on_and_below_the_curves(
    compute_s: float, communication_s: float, unevenness: float
) -> None:
    """Even loads are semi-ideal without overlap and ideal with overlap; uneven loads lie below."""
    peak, num_devices = 7.0, 4
    flops = peak * compute_s * num_devices
    in_turn = RooflinePoint(compute_s, communication_s, compute_s + communication_s, flops, num_devices)
    together = RooflinePoint(compute_s, communication_s, max(compute_s, communication_s), flops, num_devices)
    assert in_turn.mean_flops_per_s == pytest.approx(semi_ideal_flops_per_s(in_turn.ratio, peak))
    assert together.mean_flops_per_s == pytest.approx(ideal_flops_per_s(together.ratio, peak))
    slow_s = unevenness * compute_s
    uneven = RooflinePoint(slow_s, communication_s, slow_s + communication_s, flops, num_devices)
    assert uneven.mean_flops_per_s <= semi_ideal_flops_per_s(uneven.ratio, peak) * (1 + 1e-9)


def test_layers_that_do_not_communicate_are_refused() -> None:
    with pytest.raises(ValueError, match="communication_s: got 0"):
        RooflinePoint(1.0, 0.0, 1.0, 1.0, 1)
