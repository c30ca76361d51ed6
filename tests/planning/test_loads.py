from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.planning.arrays import frozen_array
from megatron_fssdp.planning.loads import (
    LoadHistory,
    balance_ratio,
    has_jumped,
    load_similarity,
    max_over_mean,
)


def test_load_statistics_equal_those_worked_out_by_hand():
    assert max_over_mean(np.array([6, 2, 4])) == 1.5
    assert max_over_mean(np.zeros(3)) == 1.0
    # A quarter of the pairs moved from the first expert to the last.
    assert load_similarity(np.array([1, 2, 1]), np.array([4, 4, 0])) == pytest.approx(0.75)
    assert load_similarity(np.array([1, 1]), np.zeros(2)) is None
    assert balance_ratio(np.array([0, 8]), np.array([3, 5])) == 4
    assert balance_ratio(np.array([0, 8]), np.array([4, 4])) is None
    assert balance_ratio(np.array([4, 4]), np.array([4, 4])) == 1


def test_a_jump_is_told_from_drift():
    before_E = np.array([400, 200, 200, 200])
    assert not has_jumped(before_E, before_E)
    assert not has_jumped(np.array([250, 300, 250, 200]), before_E)  # 15 % of the load moved
    assert has_jumped(np.array([100, 500, 200, 200]), before_E)  # 30 % of the load moved
    assert has_jumped(np.array([0, 0, 0, 5000]), before_E)
    assert not has_jumped(np.zeros(4), before_E)


@given(seed=st.integers(0, 10_000), total=st.integers(4, 3000), num_experts=st.integers(2, 64))
def test_sampling_noise_is_not_a_jump(seed, total, num_experts):
    """Two draws from one distribution never count as a jump, however few tokens there are."""
    rng = np.random.default_rng(seed)
    share_E = rng.dirichlet(np.full(num_experts, 0.5))
    assert not has_jumped(rng.multinomial(total, share_E), rng.multinomial(5 * total, share_E))


def test_mean_is_over_the_latest_iterations_only():
    history = LoadHistory(window=2, num_devices=2, num_experts=3)
    assert history.is_empty
    assert history.mean_DE().tolist() == [[0, 0, 0], [0, 0, 0]]
    for scale in (100, 1, 4):
        history.append(np.arange(6).reshape(2, 3) * scale)
    assert len(history) == 2
    assert not history.is_empty
    np.testing.assert_array_equal(history.mean_DE(), np.arange(6).reshape(2, 3) * 2.5)
    np.testing.assert_array_equal(history.mean_E(), [7.5, 12.5, 17.5])
    np.testing.assert_array_equal(history.counts_DE(0), np.arange(6).reshape(2, 3) * 4)
    assert history.mean_DE().dtype == np.float64


def test_single_micro_batches_are_asked_for_evenly_and_belong_to_the_latest_iteration():
    history, asked = LoadHistory(3, 1, 2), []

    def micro_batch(number):
        asked.append(number)
        return np.array([[number, 1]])

    history.append(np.array([[21, 7]]), [partial(micro_batch, number) for number in range(7)])
    assert not asked
    assert [counts.tolist() for counts in history.iterations_like(3)] == [[[0, 7]], [[14, 7]], [[28, 7]]]
    assert asked == [0, 2, 4]
    assert len(history.iterations_like(99)) == len(history.excerpt(1).iterations_like(99)) == 7
    resumed = LoadHistory(3, 1, 2)
    resumed.resume(history.state())
    history.append(np.array([[5, 6]]))
    earlier = history.excerpt(3, without_latest=1)
    for alone, counts in ((history, [[5, 6]]), (resumed, [[21, 7]]), (earlier, [[21, 7]])):
        assert [counts_DE.tolist() for counts_DE in alone.iterations_like(99)] == [counts]


def test_an_array_that_comes_again_and_again_is_as_good_as_copies_of_it():
    rng = np.random.default_rng(0)
    first, second = (frozen_array(rng.integers(0, 100, (2, 4)), np.int64) for _ in range(2))
    repeated, copied = LoadHistory(3, 2, 4), LoadHistory(3, 2, 4)
    for counts_DE in (second, *[first] * 12, second, *[first] * 2):
        repeated.append(counts_DE)
        copied.append(counts_DE.copy())
        (counts_IDE, *known), (copied_IDE, *wanted) = (loads.state().values() for loads in (repeated, copied))
        assert (counts_IDE.tolist(), known) == (copied_IDE.tolist(), wanted)
        for window in (1, 2):
            excerpt, anew = (loads.excerpt(window).state().values() for loads in (repeated, copied))
            assert repr([*excerpt]) == repr([*anew])
        assert repeated.forecast_DE().tolist() == copied.forecast_DE().tolist()
    assert not repeated.repeats


def test_bad_counts_say_what_was_wanted():
    history = LoadHistory(5, 2, 2)
    with pytest.raises(ValueError, match=r"shape \(2,\).*wanted integers \(2, 2\)"):
        history.append(np.array([1, 2]))
    with pytest.raises(ValueError, match="dtype float64: wanted integers"):
        history.append(np.zeros((2, 2)))
    with pytest.raises(ValueError, match=r"counts_DE\[1, 0\] is -3"):
        history.append(np.array([[0, 0], [-3, 0]]))


def test_loads_before_a_jump_are_forgotten():
    """After two even iterations the load moves to expert 1, so only the last two iterations count."""
    history = LoadHistory(5, 2, 4)
    even, jumped = np.full((2, 4), 100), np.array([[0, 400, 0, 0], [10, 380, 10, 0]])
    assert not history.forecast_DE().any()
    for counts_DE in (even, even, jumped, jumped + 2):
        history.append(counts_DE)
    np.testing.assert_array_equal(history.forecast_DE(), jumped + 1)
    assert history.mean_DE()[0, 0] > 50
    history.append(jumped)
    np.testing.assert_allclose(history.forecast_DE(), jumped + 2 / 3)


def test_a_load_that_wanders_is_predicted_by_its_last_value():
    wandering = LoadHistory(5, 1, 2)
    rng = np.random.default_rng(3)
    position = 5000
    for _ in range(40):
        position += int(rng.integers(-400, 400))
        wandering.append(np.array([[position, 10000 - position]]))
    assert abs(wandering.forecast_DE()[0, 0] - position) < abs(wandering.mean_DE()[0, 0] - position)
