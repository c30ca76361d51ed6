from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.planning.placement.placement import even_owners
from megatron_fssdp.strategies.fastermoe.fastermoe_strategy import ShadowingCosts, select_shadows
from tests.drawn_examples import SEEDS

# A token takes a second on the network and a third of a second in each of three passes; an expert 2 s.
COSTS = ShadowingCosts(token_bytes=1, expert_bytes=2, flops_per_token=1, flops_per_s=3, bytes_per_s=1)
# FasterMoE's Fig. 6 in numbers: three workers, and most tokens select worker 1's expert.
FIGURE_6 = np.array([[1, 4, 1], [1, 4, 1], [0, 5, 1]])


def test_the_shadows_of_figure_6():
    owners, heavy = even_owners(3, 3), ShadowingCosts(1, 100, 1, 3, 1)
    # Worker 1 has 13 tokens; with its expert everywhere, workers have 6, 4 and 8. More gains nothing.
    assert select_shadows(owners, FIGURE_6, COSTS, most=3) == (1,)
    assert select_shadows(owners, FIGURE_6, heavy, most=3) == ()
    assert select_shadows(owners, FIGURE_6, COSTS, most=0) == ()
    # Without shadows 13 + 52 s; with expert 1 8 + 4 + 4·3 = 24 s, then 7 + 8 + 4·2 = 23 s, then 6 + 12 s.
    assert select_shadows(owners, FIGURE_6, COSTS, most=3, remaining_exchange=True) == (1, 2, 0)


@given(SEEDS, st.integers(1, 3), st.integers(1, 2000), st.booleans())
def test_the_search_stops_where_the_latency_no_longer_falls(seed, per_device, expert_bytes, complete):
    rng = np.random.default_rng(seed)
    num_experts = 4 * per_device
    owners = even_owners(num_experts, 4)
    counts_DE = rng.poisson(rng.gamma(0.4, 40, num_experts), (4, num_experts))
    costs = ShadowingCosts(2.0, expert_bytes, 3.0, 5.0, 7.0)
    taken = select_shadows(owners, counts_DE, costs, most=num_experts, remaining_exchange=complete)
    order = np.argsort(-counts_DE.sum(axis=0), kind="stable").tolist()
    assert list(taken) == order[: len(taken)]

    def latency_s(number):
        shadows, others = order[:number], order[number:]
        received_D = np.bincount(owners[others], counts_DE[:, others].sum(axis=0), minlength=4)
        most = (received_D + counts_DE[:, shadows].sum(axis=1)).max()
        exchanged = received_D.max() if complete or not number else 0
        return costs.latency_s(most, number, exchanged)

    seconds = [latency_s(number) for number in range(num_experts + 1)]
    assert all(later < earlier for earlier, later in pairwise(seconds[: len(taken) + 1]))
    if len(taken) < num_experts:
        assert seconds[len(taken) + 1] >= seconds[len(taken)]


def test_the_authors_formula_divides_transfers_by_the_devices_and_counts_compute_four_times():
    """``policy_fn`` of the authors' plotting/fig11.py, written out with its own constants."""
    hidden, alpha, devices, tokens, shadows = 1024, 2, 16, 900.0, 3
    flops_per_s, bytes_per_s, data_size = 11.5e12, 50e9 / 8, 4
    sized = alpha * hidden**2 * data_size
    costs = ShadowingCosts(hidden * data_size, 2 * sized, 4 * alpha * hidden**2, flops_per_s, bytes_per_s)
    costs = costs.of_the_authors(devices)
    without = 3 * 4 * tokens * sized / flops_per_s + 4 * tokens * hidden * data_size / bytes_per_s
    model_s = 2 * sized / bytes_per_s * 2 / devices
    assert costs.latency_s(tokens, 0, tokens) == pytest.approx(without)
    with_shadows = tokens * 12 * sized / flops_per_s + shadows * model_s
    assert costs.latency_s(tokens, shadows, 0) == pytest.approx(with_shadows)
