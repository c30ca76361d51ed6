import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.simulation.roofline import (
    RooflinePoint,
    ideal_flops_per_s,
    roofline_point,
    semi_ideal_flops_per_s,
)
from megatron_fssdp.simulation.simulator import simulate

from .small_jobs import cluster_of, job_of, loads, settings_of


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


def test_the_smart_schedule_exceeds_the_semi_ideal_curve() -> None:
    """FasterMoE, Fig. 5, arrow 2; no point exceeds the ideal curve."""
    cluster = cluster_of(nodes=4, per_node=1)
    job = job_of(devices=4, experts=4, token_bytes=2)
    counts = loads(np.full((4, 4), 2).tolist())
    plain, smart = (
        roofline_point(
            simulate("ep", settings_of("ep", smart_schedule=smart_schedule), counts, cluster, job), job
        )
        for smart_schedule in (False, True)
    )
    assert smart.ratio == pytest.approx(plain.ratio)
    assert smart.mean_flops_per_s > 1.05 * semi_ideal_flops_per_s(smart.ratio, 10.0)
    assert smart.mean_flops_per_s <= ideal_flops_per_s(smart.ratio, 10.0) * (1 + 1e-9)
