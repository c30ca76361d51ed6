from itertools import pairwise

import numpy as np
import pytest

from benchmarks.testbed.testbed_loads import device_max_over_mean, expert_max_over_mean, replay
from megatron_fssdp.simulation.workloads import (
    DRIFT_SIGMA,
    LOG_NORMAL_SIGMAS,
    WORKLOADS,
    WorkloadShape,
    counts_of_shares,
)

SHAPES = [
    WorkloadShape(8, 16, 1024, 2, 10),
    WorkloadShape(4, 8, 128, 2, 10),
    WorkloadShape(4, 4, 37, 1, 10),
    WorkloadShape(2, 8, 50, 3, 10),
    WorkloadShape(4, 8, 128, 2, 10, 4),
]
RECORD_SHAPE = SHAPES[0]


def heats(name, shape=RECORD_SHAPE):
    """Expert and device max/mean of every iteration."""
    counts_IDE = WORKLOADS[name].counts(shape)
    return [(expert_max_over_mean(counts_DE), device_max_over_mean(counts_DE)) for counts_DE in counts_IDE]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", WORKLOADS)
def test_every_token_can_have_its_experts(name, shape):
    counts_IDE = WORKLOADS[name].counts(shape)
    assert counts_IDE.shape == (shape.num_iterations, shape.num_devices, shape.num_experts)
    assert counts_IDE.dtype == np.int64
    assert counts_IDE.min() >= 0
    sent_ID = counts_IDE.sum(axis=2)
    assert np.all(sent_ID.sum(axis=1) == shape.num_devices * shape.tokens_per_device * shape.top_k)
    assert not np.any(sent_ID % shape.top_k)
    assert np.all(counts_IDE.max(axis=2) <= sent_ID // shape.top_k)
    if name != "W4":
        assert np.all(sent_ID == shape.tokens_per_device * shape.top_k)
    np.testing.assert_array_equal(counts_IDE, WORKLOADS[name].counts(shape))


def test_the_balanced_workload_is_even():
    assert heats("W0") == [(1.0, 1.0)] * 10
    # This also holds where the tokens of one source cannot be divided evenly.
    counts_DE = WORKLOADS["W0"].counts(WorkloadShape(8, 16, 1021))[0]
    assert np.ptp(counts_DE.sum(axis=0)) <= 2


def test_popular_experts_are_on_one_device_or_spread_or_one_alone():
    # Half of all tokens are on 1 of 8 devices; with two hot devices, cold experts add to their load.
    assert heats("W1") == [(4.0, 4.0)] * 10
    assert heats("W2") == [(4.0, pytest.approx((0.25 + 0.5 / 14) * 8, rel=1e-2))] * 10
    together, spread = (WORKLOADS[name].counts(RECORD_SHAPE)[0].sum(axis=0) for name in ("W1", "W2"))
    np.testing.assert_allclose(np.sort(together), np.sort(spread), atol=8)
    assert np.flatnonzero(together > together.mean()).tolist() == [0, 1]
    assert len({expert // 2 for expert in np.flatnonzero(spread > spread.mean())}) == 2
    alone = (0.4 * 16, (0.4 + 0.6 / 15) * 8)  # two fifths of all tokens on one of 16 experts
    assert heats("W3") == [pytest.approx(alone, rel=1e-2)] * 10


def test_one_device_and_some_experts_of_the_others_are_idle():
    load_E = WORKLOADS["W5"].counts(RECORD_SHAPE)[0].sum(axis=0)
    assert np.flatnonzero(load_E == 0).tolist() == [0, 4, 8, 12, 14, 15]
    assert np.ptp(load_E[load_E > 0]) <= 8
    for expert_heat, device_heat in heats("W5"):
        assert expert_heat == pytest.approx(1.6, rel=1e-2)
        assert device_heat == pytest.approx(1.6, rel=1e-2)


def test_the_hotspot_moves_every_three_iterations():
    counts_IDE = WORKLOADS["W6"].counts(WorkloadShape(8, 16, 1024, 2, 30))
    hottest_I = counts_IDE.sum(axis=1).reshape(30, 8, 2).sum(axis=2).argmax(axis=1)
    assert hottest_I.tolist() == [i // 3 % 8 for i in range(30)]
    assert {device_max_over_mean(counts_DE) for counts_DE in counts_IDE} == {4.0}


def test_bursts_last_two_of_five_iterations_on_random_experts():
    shape = WorkloadShape(8, 16, 1024, 2, 50)
    counts_IDE = WORKLOADS["W7"].counts(shape)
    hot_I = np.array([expert_max_over_mean(counts_DE) for counts_DE in counts_IDE])
    is_burst_I = np.arange(50) % 5 >= 3
    assert np.all(hot_I[~is_burst_I] == 1.0)
    np.testing.assert_allclose(hot_I[is_burst_I], 6.4, rtol=1e-2)
    hottest_I = counts_IDE.sum(axis=1).argmax(axis=1)[is_burst_I].reshape(-1, 2)
    assert np.all(hottest_I[:, 0] == hottest_I[:, 1])
    assert len(set(hottest_I[:, 0].tolist())) > 1
    assert not np.array_equal(counts_IDE, WORKLOADS["W7"].counts(shape, seed=1))


def test_log_normal_strengths_have_their_standard_deviation():
    shape = WorkloadShape(8, 1024, 1 << 20)
    previous_E = None
    for strength, sigma in LOG_NORMAL_SIGMAS.items():
        load_E = WORKLOADS[f"lognormal-{strength}"].counts(shape)[0].sum(axis=0)
        assert np.log(load_E).std() == pytest.approx(sigma, rel=0.1)
        if previous_E is not None:
            np.testing.assert_array_equal(np.argsort(load_E)[-20:], np.argsort(previous_E)[-20:])
        previous_E = load_E


def test_drift_is_noise_around_one_popularity():
    shape = WorkloadShape(8, 1024, 1 << 22, 2, 3, 4)
    load_IZE = WORKLOADS["drift"].micro_batches(shape).sum(axis=2)
    assert load_IZE.shape == (3, 4, 1024)
    assert np.all(load_IZE.sum(axis=2) == 8 * (1 << 20) * 2)
    noise_IZE = np.log(load_IZE) - np.log(load_IZE).mean(axis=(0, 1))
    assert noise_IZE.std(axis=2) == pytest.approx(DRIFT_SIGMA, rel=0.1)
    assert not np.array_equal(load_IZE[0, 0], load_IZE[0, 1])
    steady_E = np.log(WORKLOADS["lognormal-medium"].counts(shape)[0].sum(axis=0))
    assert np.corrcoef(np.log(load_IZE).mean(axis=(0, 1)), steady_E)[0, 1] > 0.98


def test_the_hot_device_jumps_with_every_micro_batch_in_no_order():
    shape = WorkloadShape(8, 16, 1024, 2, 20, 4)
    counts_IZDE = WORKLOADS["jump-micro"].micro_batches(shape)
    assert {device_max_over_mean(counts_DE) for counts_DE in counts_IZDE.reshape(-1, 8, 16)} == {4.0}
    hottest_IZ = counts_IZDE.sum(axis=2).reshape(20, 4, 8, 2).sum(axis=3).argmax(axis=2)
    assert np.all(np.diff(hottest_IZ.reshape(-1)) != 0)
    # Neither the first one nor what follows on a device is known from before.
    assert len(set(hottest_IZ[:, 0].tolist())) > 4
    assert len({(before, after) for order in hottest_IZ.tolist() for before, after in pairwise(order)}) > 30
    assert not np.array_equal(counts_IZDE, WORKLOADS["jump-micro"].micro_batches(shape, seed=1))


def test_shares_above_one_choice_per_token_are_cut():
    counts = counts_of_shares(np.array([[[0.9, 0.06, 0.04, 0.0]]]), np.array([100]), 2)
    assert counts.tolist() == [[[100, 60, 40, 0]]]
    counts = counts_of_shares(np.array([[[1.0, 0.0, 0.0]]]), np.array([10]), 2)
    assert counts.tolist() == [[[10, 5, 5]]]


@pytest.mark.parametrize(("num_sources", "wanted"), [(4, [[6, 2], [1, 7]]), (1, [[4, 4], [3, 5]])])
def test_replay_keeps_the_shares_of_mapped_sources(num_sources, wanted):
    of_four_DE = np.array([[4, 0], [2, 2], [1, 3], [0, 4]])
    recorded_IDE = np.stack([np.zeros((4, 2), int) + 1, of_four_DE])
    recorded_IDE = recorded_IDE.reshape(2, num_sources, -1, 2).sum(axis=2)
    counts_IDE = replay(recorded_IDE, WorkloadShape(2, 2, 8, 1, 1), first_iteration=1)
    assert counts_IDE[0].tolist() == wanted


@pytest.mark.parametrize(
    "sizes", [(4, 10, 1), (4, 4, 1, 5), (4, 4, 0), (4, 4, 7, 1, 1, 2), (4, 4, 7, 1, 1, 0)]
)
def test_invalid_sizes_are_refused(sizes):
    with pytest.raises(ValueError, match="wanted sizes of at least 1, at least top_k experts"):
        WorkloadShape(*sizes)
