import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.planning.loads.load_statistics import (
    balance_ratio,
    has_jumped,
    load_similarity,
    max_over_mean,
)

LOADS = st.lists(st.integers(0, 1000), min_size=2, max_size=8)


def test_load_statistics_equal_those_worked_out_by_hand() -> None:
    assert max_over_mean(np.array([6, 2, 4])) == 1.5
    assert max_over_mean(np.zeros(3)) == 1.0
    # A quarter of the pairs moved from the first expert to the last.
    assert load_similarity(np.array([1, 2, 1]), np.array([4, 4, 0])) == pytest.approx(0.75)
    assert load_similarity(np.array([1, 1]), np.zeros(2)) is None
    assert balance_ratio(np.array([0, 8]), np.array([3, 5])) == 4
    assert balance_ratio(np.array([0, 8]), np.array([4, 4])) is None
    assert balance_ratio(np.array([4, 4]), np.array([4, 4])) == 1


@given(load=LOADS, other=LOADS, factor=st.integers(1, 9))
def test_similarity_is_between_0_and_1_and_independent_of_the_batch_size(
    load: list[int], other: list[int], factor: int
) -> None:
    size = min(len(load), len(other))
    load_E, other_E = np.array(load[:size]), np.array(other[:size])
    similarity = load_similarity(load_E, other_E)
    assert (similarity is None) == (not load_E.any() or not other_E.any())
    if similarity is not None:
        assert -1e-9 <= similarity <= 1 + 1e-9
        assert load_similarity(other_E, load_E) == pytest.approx(similarity)
        assert load_similarity(load_E, factor * load_E) == pytest.approx(1)


def test_a_jump_is_told_from_drift() -> None:
    before_E = np.array([400, 200, 200, 200])
    assert not has_jumped(before_E, before_E)
    assert not has_jumped(np.array([250, 300, 250, 200]), before_E)  # 15 % of the load moved
    assert has_jumped(np.array([100, 500, 200, 200]), before_E)  # 30 % of the load moved
    assert has_jumped(np.array([0, 0, 0, 5000]), before_E)
    assert not has_jumped(np.zeros(4), before_E)


@given(seed=st.integers(0, 10_000), total=st.integers(4, 3000), num_experts=st.integers(2, 64))
def test_sampling_noise_is_not_a_jump(seed: int, total: int, num_experts: int) -> None:
    """Two draws from one distribution never count as a jump, however few tokens there are."""
    rng = np.random.default_rng(seed)
    share_E = rng.dirichlet(np.full(num_experts, 0.5))
    assert not has_jumped(rng.multinomial(total, share_E), rng.multinomial(5 * total, share_E))
