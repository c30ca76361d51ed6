import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.planning.cost.cost_model import LEAST_BETA_S_PER_BYTE, LinkCost, LinkFit, fit_link_cost

SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 24)


def test_a_fit_to_noise_gives_valid_costs():
    faster_when_larger = fit_link_cost((1000, 2000, 3000), (3e-5, 2e-5, 1e-5))
    assert faster_when_larger.beta_s_per_byte == LEAST_BETA_S_PER_BYTE
    assert faster_when_larger.alpha_s > 0
    below_the_origin = fit_link_cost((1000, 2000, 3000), (1e-6, 3e-6, 5e-6))
    assert below_the_origin.alpha_s == 0.0
    assert below_the_origin.beta_s_per_byte > 0


@given(
    alpha_s=st.floats(1e-7, 1e-2),
    beta_s_per_byte=st.floats(1e-12, 1e-7),
    noise=st.lists(st.floats(-0.05, 0.05), min_size=len(SIZES), max_size=len(SIZES)),
)
def test_a_fit_recovers_a_known_line_and_reports_its_error(alpha_s, beta_s_per_byte, noise):
    planted = LinkCost(alpha_s, beta_s_per_byte)
    exact = LinkFit.of(SIZES, [planted.time_s(size) for size in SIZES])
    share = alpha_s / planted.time_s(SIZES[0])  # the accuracy to which alpha can be observed
    assert exact.cost.alpha_s == pytest.approx(alpha_s, rel=1e-6 / share)
    seen = beta_s_per_byte * SIZES[-1] / planted.time_s(SIZES[-1])
    assert exact.cost.beta_s_per_byte == pytest.approx(beta_s_per_byte, rel=1e-6 / seen)
    assert exact.worst_relative_error < 1e-6
    seconds = [planted.time_s(size) * (1 + error) for size, error in zip(SIZES, noise, strict=True)]
    noisy = LinkFit.of(SIZES, seconds)
    # The least-squares fit cannot have a larger sum of squares than the planted line.
    squares = sum((noisy.cost.time_s(n) / s - 1) ** 2 for n, s in zip(SIZES, seconds, strict=True))
    assert squares <= sum((error / (1 + error)) ** 2 for error in noise) + 1e-9
    assert noisy.worst_relative_error <= squares**0.5 + 1e-9
    assert noisy.r_squared <= 1
