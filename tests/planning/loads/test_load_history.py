import numpy as np
import pytest

from megatron_fssdp.planning.loads.load_history import LoadHistory


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


def test_appended_counts_are_copied():
    history = LoadHistory(5, 1, 2)
    counts_DE = np.array([[1, 2]])
    history.append(counts_DE)
    counts_DE[:] = 9
    assert history.counts_DE(0).tolist() == [[1, 2]]


def test_bad_counts_say_what_was_wanted():
    history = LoadHistory(5, 2, 2)
    with pytest.raises(ValueError, match=r"shape \(2,\): wanted \(2, 2\)"):
        history.append(np.array([1, 2]))
    with pytest.raises(ValueError, match="dtype float64: wanted integers"):
        history.append(np.zeros((2, 2)))
    with pytest.raises(ValueError, match=r"counts_DE\[1, 0\] is -3"):
        history.append(np.array([[0, 0], [-3, 0]]))
    with pytest.raises(ValueError, match="window is 0"):
        LoadHistory(0, 1, 1)
    with pytest.raises(ValueError, match="age is 0"):
        history.counts_DE(0)


def test_loads_before_a_jump_are_forgotten() -> None:
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


def test_without_a_jump_the_whole_window_counts() -> None:
    history = LoadHistory(3, 2, 4)
    rng = np.random.default_rng(0)
    for _ in range(5):
        history.append(rng.multinomial(100, [0.4, 0.3, 0.2, 0.1], size=2))
    np.testing.assert_allclose(history.forecast_DE(), history.mean_DE())


def test_the_forecast_that_fits_the_last_iterations_best_is_used() -> None:
    """Loads drift by a constant step: the trend is exact, and the mean is two and a half steps late."""
    start, step = np.array([[1000, 500, 500]]), np.array([[-20, 30, -10]])
    drifting = LoadHistory(5, 1, 3)
    for iteration in range(8):
        drifting.append(start + iteration * step)
    np.testing.assert_allclose(drifting.forecast_DE(), start + 8 * step)


def test_a_load_that_wanders_is_predicted_by_its_last_value() -> None:
    wandering = LoadHistory(5, 1, 2)
    rng = np.random.default_rng(3)
    position = 5000
    for _ in range(40):
        position += int(rng.integers(-400, 400))
        wandering.append(np.array([[position, 10000 - position]]))
    assert abs(wandering.forecast_DE()[0, 0] - position) < abs(wandering.mean_DE()[0, 0] - position)


def test_a_forecast_is_never_negative() -> None:
    history = LoadHistory(5, 1, 2)
    for load in (200, 150, 100, 50, 0):
        history.append(np.array([[load, 1000 - load]]))
    np.testing.assert_allclose(history.forecast_DE(), [[0, 1050]])


def test_the_history_after_one_more_iteration_has_the_same_forecast() -> None:
    history = LoadHistory(5, 1, 3)
    rng = np.random.default_rng(0)
    for iteration in range(12):
        counts_DE = rng.integers(100, 200, (1, 3)) + 30 * iteration
        following = history.followed_by(counts_DE)
        history.append(counts_DE)
        np.testing.assert_array_equal(following.forecast_DE(), history.forecast_DE())
