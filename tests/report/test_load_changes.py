import numpy as np
import pytest

from megatron_fssdp.planning.loads import max_over_mean
from megatron_fssdp.report.load_changes import load_changes, plain_load


def test_plain_load_is_that_of_even_owners():
    counts = np.random.default_rng(0).integers(0, 9, (3, 2, 4, 8))
    wanted = [[max_over_mean(of.sum(axis=0).reshape(4, 2).sum(axis=1)) for of in row] for row in counts]
    np.testing.assert_allclose(plain_load(counts), wanted)
    assert plain_load(np.zeros((4, 8))) == 1


def counts_of(load_IZE):
    """Counts of two devices with equal tokens, from loads of experts."""
    return np.repeat(np.array(load_IZE)[:, :, None], 2, axis=2)


# Of four experts on two devices, one expert is hot, in each micro-batch the same or another one.
HOT_0, HOT_1, NONE = [300, 100, 0, 0], [100, 300, 0, 0], [0, 0, 0, 0]
STEADY = [[HOT_0, HOT_0, HOT_0]] * 4
IN_TURN = [[HOT_0, HOT_1]] * 4
ACROSS = [[[800, 0, 0, 0], [0, 0, 800, 0]]] * 3


def figures_of(load_IZE, iterations, slots):
    return load_changes(counts_of(load_IZE), np.array(iterations), slots, 50)


def test_figures_of_steady_and_of_changing_micro_batches():
    steady = figures_of(STEADY, [1, 2, 3, 4], 2)
    assert steady == pytest.approx([2, 2, 2, 2, 1, 0, 1, 0, 1, 1, 1], abs=0.02)
    # Only with one slot is it a matter of which expert has a replica: 200 of 300 tokens move, or all 100.
    turning = figures_of(IN_TURN, [1, 2, 3, 4], 1)
    assert turning[4:8] == pytest.approx([0.5, 1, 1, 0])
    assert turning[10] == pytest.approx(1, abs=0.02)
    assert turning[9] == pytest.approx(0.5, abs=0.02)
    # Each micro-batch has all of its load on one device, and the iteration is even.
    across = figures_of(ACROSS, [1, 2, 3], 2)
    assert across[:8] == pytest.approx([2, 2, 1, 1, 0, 1, 1, 0])
    assert across[10] == pytest.approx(1)
    assert across[9] == pytest.approx(0)


def test_figures_leave_out_padding_and_neighbours_that_are_not_recorded():
    padded = [[HOT_0, HOT_0, NONE], [HOT_1, NONE, NONE], [HOT_1, HOT_1, HOT_1]]
    figures = figures_of(padded, [1, 2, 9], 2)
    assert figures[:8] == pytest.approx([2, 2, 2, 2, 1, 0, 0.5, 1])
    assert np.isnan(figures[8:]).all()  # no iteration with two micro-batches has a recorded one before it
    assert np.isnan(figures_of(STEADY[:1], [5], 2)[6:]).all()
