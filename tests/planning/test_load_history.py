import numpy as np
import pytest

from megatron_fssdp.planning.load_history import LoadHistory


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
    np.testing.assert_array_equal(history.latest_DE(), np.arange(6).reshape(2, 3) * 4)
    assert history.mean_DE().dtype == np.float64


def test_appended_counts_are_copied():
    history = LoadHistory(5, 1, 2)
    counts_DE = np.array([[1, 2]])
    history.append(counts_DE)
    counts_DE[:] = 9
    assert history.latest_DE().tolist() == [[1, 2]]


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
    with pytest.raises(ValueError, match="at least one append"):
        history.latest_DE()
