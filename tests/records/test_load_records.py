import dataclasses
from contextlib import closing

import numpy as np
import pytest

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.records.loads import LoadsWriter, RecordedLoads, read_loads


def counts(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, (2, 4, 8))


def test_loads_round_trip(tmp_path):
    with closing(LoadsWriter(tmp_path / "run", layers=[2, 4])) as writer:
        for iteration in (1, 2, 3):
            writer.append(iteration, counts(iteration))
    loads = read_loads(tmp_path / "run")
    assert loads.counts_ILDE.dtype == np.int32
    assert loads.counts_ILDE.shape == (3, 2, 4, 8)
    np.testing.assert_array_equal(loads.counts_ILDE[1], counts(2))
    assert loads.iterations.tolist() == [1, 2, 3]
    assert loads.layers.tolist() == [2, 4]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["loads.npy"]


def test_loads_are_there_at_once_and_survive_a_resume(tmp_path):
    writer = LoadsWriter(tmp_path, layers=[1, 2])
    for iteration in (1, 2, 3):
        writer.append(iteration, counts(iteration))
    assert len(read_loads(tmp_path).iterations) == 3  # without close: the run was killed
    with closing(LoadsWriter(tmp_path, layers=[1, 2])) as resumed:
        resumed.append(3, counts(33))
        resumed.append(4, counts(4))
    loads = read_loads(tmp_path)
    assert loads.iterations.tolist() == [1, 2, 3, 4]
    np.testing.assert_array_equal(loads.counts_ILDE[2], counts(33))


def test_histograms_round_trip_and_continue_a_file_without_them(tmp_path):
    with closing(LoadsWriter(tmp_path, layers=[1, 2])) as writer:
        writer.append(1, counts(1))
    assert read_loads(tmp_path).by_nodes_ILN is None
    by_nodes, by_devices = np.arange(4).reshape(2, 2), np.arange(8).reshape(2, 4)
    with closing(LoadsWriter(tmp_path, layers=[1, 2])) as resumed:
        resumed.append(2, counts(2), by_nodes, by_devices)
    loads = read_loads(tmp_path)
    np.testing.assert_array_equal(loads.by_nodes_ILN, [0 * by_nodes, by_nodes])
    np.testing.assert_array_equal(loads.by_devices_ILD, [0 * by_devices, by_devices])
    with pytest.raises(ValueError, match="by_nodes_ILN has shape"):
        dataclasses.replace(loads, by_nodes_ILN=loads.by_nodes_ILN[:1])


def test_appended_counts_are_copied(tmp_path):
    array = counts(1).astype(np.int32)
    with closing(LoadsWriter(tmp_path, layers=[1, 2])) as writer:
        writer.append(1, array)
        array[:] = 0
    np.testing.assert_array_equal(read_loads(tmp_path).counts_ILDE[0], counts(1))


def test_runs_that_do_not_fit_together_are_refused(tmp_path):
    with closing(LoadsWriter(tmp_path, layers=[1, 2])) as writer:
        writer.append(1, counts(1))
        with pytest.raises(ValueError, match="wanted"):
            writer.append(2, counts(1)[0])
    with pytest.raises(ConfigurationError, match="choose another output folder"):
        LoadsWriter(tmp_path, layers=[1, 3])
    with pytest.raises(ConfigurationError, match="choose another output folder"):
        LoadsWriter(tmp_path, layers=[1, 2]).append(2, counts(1)[:, :2])


def test_recorded_loads_refuse_iterations_out_of_order():
    with pytest.raises(ValueError, match="not ascending"):
        RecordedLoads(np.zeros((2, 1, 1, 1), np.int32), np.array([2, 1]), np.array([1]))


def test_missing_loads_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"loads\.npy: no such file"):
        read_loads(tmp_path)
