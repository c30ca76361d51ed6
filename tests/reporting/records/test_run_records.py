import dataclasses
import json
import math
from contextlib import closing

import numpy as np
import pytest

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.reporting.records.run_records import (
    IterationMetrics,
    LayerMetrics,
    LoadsWriter,
    MetricsWriter,
    RecordedLoads,
    parse_metrics_line,
    read_loads,
    read_metrics,
)


def record(iteration: int, loss: float = 3.5) -> IterationMetrics:
    layer = LayerMetrics(
        layer=1,
        ep_load_max_over_mean=2.0,
        load_max_over_mean=1.1,
        num_replicas=3,
        spag_bytes=4,
        sprs_bytes=5,
        cross_node_tokens=6,
        spag_s=0.5,
        spag_exposed_s=0.25,
        sprs_s=0.75,
        sprs_exposed_s=0.125,
    )
    return IterationMetrics(
        iteration=iteration,
        lm_loss=loss,
        grad_norm=0.5,
        iteration_s=0.1,
        tokens_per_s=1e3,
        layers=(layer,),
        resharded_experts=7,
        reshard_bytes=8,
        reshard_s=0.0625,
    )


def counts(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, (2, 4, 8))


def test_metrics_round_trip_and_are_visible_at_once(tmp_path):
    writer = MetricsWriter(tmp_path / "run")
    writer.append(record(1))
    assert read_metrics(tmp_path / "run") == [record(1)]
    writer.append(record(2))
    writer.close()
    assert read_metrics(tmp_path / "run") == [record(1), record(2)]
    first = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["layers"][0]["ep_load_max_over_mean"] == 2.0


def test_losses_that_are_not_finite_are_valid_json(tmp_path):
    with closing(MetricsWriter(tmp_path)) as writer:
        writer.append(record(1, loss=math.nan))
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()
    assert math.isnan(read_metrics(tmp_path)[0].lm_loss)


def test_a_resumed_run_replaces_repeated_iterations(tmp_path):
    with closing(MetricsWriter(tmp_path)) as writer:
        for iteration in (1, 2, 3):
            writer.append(record(iteration))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 4, "lm_')  # killed while writing
    with closing(MetricsWriter(tmp_path)) as writer:
        writer.append(record(2, loss=9.0))
    assert read_metrics(tmp_path) == [record(1), record(2, loss=9.0)]


def test_keys_of_a_later_version_are_ignored():
    text = json.dumps({**json.loads('{"iteration": 1, "lm_loss": 1.0, "grad_norm": null}'), "new": 1})
    with pytest.raises(ValueError, match="not an iteration record"):
        parse_metrics_line(text)
    full = {"iteration": 1, "lm_loss": 1.0, "grad_norm": None, "iteration_s": 1.0, "tokens_per_s": 2.0}
    assert parse_metrics_line(json.dumps({**full, "layers": [], "new": 1})).tokens_per_s == 2.0


def test_keys_that_earlier_versions_did_not_write_are_zero():
    later = ("resharded_experts", "reshard_bytes", "reshard_s")
    of_layer = ("spag_s", "spag_exposed_s", "sprs_s", "sprs_exposed_s")
    old = dataclasses.asdict(record(1))
    for key in later:
        del old[key]
    for key in of_layer:
        del old["layers"][0][key]
    read = parse_metrics_line(json.dumps(old))
    assert [getattr(read, key) for key in later] == [0, 0, 0]
    assert [getattr(read.layers[0], key) for key in of_layer] == [0, 0, 0, 0]
    assert read.layers[0].spag_bytes == 4
    del old["layers"][0]["spag_bytes"]
    with pytest.raises(ValueError, match="not an iteration record"):
        parse_metrics_line(json.dumps(old))


@pytest.mark.parametrize("line", ["{", "3", '{"iteration": 1}', '{"iteration": 1, "layers": [3]}'])
def test_damaged_metrics_name_the_line(tmp_path, line):
    with closing(MetricsWriter(tmp_path)) as writer:
        writer.append(record(1))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(line)
    with pytest.raises(ConfigurationError, match=r"metrics\.jsonl: line 2 is damaged or incomplete"):
        read_metrics(tmp_path)


def test_missing_records_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="no such file"):
        read_metrics(tmp_path)
    with pytest.raises(ConfigurationError, match="no such file"):
        read_loads(tmp_path)


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
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["loads.npz"]


def test_loads_are_written_periodically_and_survive_a_resume(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_fssdp.reporting.records.growing_arrays._MIN_WRITE_INTERVAL_S", 0.0)
    monkeypatch.setattr("megatron_fssdp.reporting.records.growing_arrays._MAX_WRITE_SHARE", 1e9)
    writer = LoadsWriter(tmp_path, layers=[1, 2])
    for iteration in (1, 2, 3):
        writer.append(iteration, counts(iteration))
    monkeypatch.undo()
    assert len(read_loads(tmp_path).iterations) == 3  # without close: the run was killed
    with closing(LoadsWriter(tmp_path, layers=[1, 2])) as resumed:
        resumed.append(3, counts(33))
        resumed.append(4, counts(4))
    loads = read_loads(tmp_path)
    assert loads.iterations.tolist() == [1, 2, 3, 4]
    np.testing.assert_array_equal(loads.counts_ILDE[2], counts(33))


def test_histograms_round_trip_and_continue_a_file_without_them(tmp_path):
    with closing(LoadsWriter(tmp_path, layers=[1, 2])) as older:
        older.append(1, counts(1))
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


def damage_empty(path):
    path.write_bytes(b"")


def damage_cut(path):
    path.write_bytes(path.read_bytes()[:-30])


def damage_text(path):
    path.write_text("counts")


def damage_pickle(path):
    np.savez(path, counts_ILDE=np.array([{"a": 1}], dtype=object), iterations=[1], layers=[1])


def damage_missing_array(path):
    np.savez(path, iterations=[1])


def damage_floats(path):
    np.savez(path, counts_ILDE=np.zeros((1, 1, 1, 1)), iterations=[1], layers=[1])


def damage_shape(path):
    np.savez(path, counts_ILDE=np.zeros((1, 1), np.int32), iterations=[1], layers=[1])


def damage_array(path):
    np.save(path.with_suffix(".npy"), np.zeros(3))
    path.with_suffix(".npy").rename(path)


@pytest.mark.parametrize(
    "damage",
    [
        damage_empty,
        damage_cut,
        damage_text,
        damage_pickle,
        damage_missing_array,
        damage_floats,
        damage_shape,
        damage_array,
    ],
)
def test_damaged_loads_are_one_clear_line(tmp_path, damage):
    with closing(LoadsWriter(tmp_path, layers=[1, 2])) as writer:
        writer.append(1, counts(1))
    damage(tmp_path / "loads.npz")
    with pytest.raises(ConfigurationError) as caught:
        read_loads(tmp_path)
    assert "loads.npz: damaged, incomplete or not a record" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_recorded_loads_refuse_iterations_out_of_order():
    with pytest.raises(ValueError, match="not ascending"):
        RecordedLoads(np.zeros((2, 1, 1, 1), np.int32), np.array([2, 1]), np.array([1]))


def test_folders_that_cannot_be_created_are_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="record_dir"):
        MetricsWriter(tmp_path / "file" / "run")
