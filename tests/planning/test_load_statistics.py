import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.planning.load_statistics import balance_ratio, load_similarity, max_over_mean

LOADS = st.lists(st.integers(0, 1000), min_size=2, max_size=8)


def test_by_hand() -> None:
    assert max_over_mean(np.array([6, 2, 4])) == 1.5
    assert max_over_mean(np.zeros(3)) == 1.0
    # A quarter of the pairs moved from the first expert to the last.
    assert load_similarity(np.array([1, 2, 1]), np.array([4, 4, 0])) == pytest.approx(0.75)
    assert load_similarity(np.array([1, 1]), np.zeros(2)) is None
    assert balance_ratio(np.array([0, 8]), np.array([3, 5])) == 4
    assert balance_ratio(np.array([0, 8]), np.array([4, 4])) is None
    assert balance_ratio(np.array([4, 4]), np.array([4, 4])) == 1


@given(load=LOADS, other=LOADS, factor=st.integers(1, 9))
def test_similarity_is_a_share_and_knows_no_batch_size(
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
