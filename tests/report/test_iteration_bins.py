import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from megatron_fssdp.reporting.html.iteration_bins import IterationBins


@given(st.integers(1, 400), st.integers(1, 60), st.integers(0, 1000))
def test_bins_fit_the_available_room_and_keep_the_mean(count: int, most: int, start: int) -> None:
    bins = IterationBins(np.arange(start, start + count), most)
    values = np.random.default_rng(count).random((count, 2))
    means, peaks = bins.mean(values), bins.peak(values)
    assert len(bins.middles) == len(means) == len(peaks) <= most
    sizes = np.full(len(means), bins.width)
    sizes[-1] = count - bins.width * (len(means) - 1)
    assert 1 <= sizes[-1] <= bins.width
    np.testing.assert_allclose((means * sizes[:, None]).sum(axis=0), values.sum(axis=0))
    assert (peaks.max(axis=0) == values.max(axis=0)).all()
    assert (np.diff(bins.middles) > 0).all()
    assert bool(bins.describe()) == (count > most)


def test_unknown_values_are_left_out_of_the_mean() -> None:
    bins = IterationBins(np.arange(4), 2)
    assert bins.mean(np.array([1.0, np.nan, 3.0, 5.0])).tolist() == [1.0, 4.0]
    assert np.isnan(bins.mean(np.array([np.nan, np.nan, 3.0, 5.0]))[0])
