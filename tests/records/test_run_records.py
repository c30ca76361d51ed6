import dataclasses
import json
import math
from contextlib import closing

import pytest

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.records.metrics import IterationMetrics, LayerMetrics
from megatron_fssdp.records.metrics_file import MetricsWriter, parse_metrics_line, read_metrics


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


def test_missing_keys_are_zero():
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
        file.write(line + "\n")
    with pytest.raises(ConfigurationError, match=r"metrics\.jsonl: line 2 is damaged or incomplete"):
        read_metrics(tmp_path)


def test_missing_records_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="no such file"):
        read_metrics(tmp_path)


def test_folders_that_cannot_be_created_are_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="record_dir"):
        MetricsWriter(tmp_path / "file" / "run")


@pytest.mark.parametrize("line", ["{", '{"iteration": 2, "lm_loss": 1.0', '{"iteration": 2}'])
def test_a_half_written_last_line_is_ignored(tmp_path, line):
    with closing(MetricsWriter(tmp_path)) as writer:
        writer.append(record(1))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(line)
    assert read_metrics(tmp_path) == [record(1)]
