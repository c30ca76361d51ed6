import dataclasses
import json
import math

import pytest

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.files.json_records import parse_record
from megatron_fssdp.records.metrics import (
    IterationMetrics,
    LayerMetrics,
    MetricsWriter,
    last_metrics,
    read_metrics,
)
from tests.full_disk import room_for


def record(iteration, loss=3.5):
    layer = LayerMetrics(1, 2.0, 1.1, 3, 4, 5, 6, 0.5, 0.25, 0.75, 0.125)
    return IterationMetrics(iteration, loss, 0.5, 0.1, 1e3, (layer,), 7, 8, 0.0625)


def test_after_a_kill_and_a_resume_the_last_line_of_an_iteration_counts(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    assert last_metrics(path) is None
    writer = MetricsWriter(path.parent)
    for iteration in (1, 2, 3):
        writer.append(record(iteration))
    assert read_metrics(path.parent) == [record(1), record(2), record(3)]  # at once
    with path.open("a") as file:
        file.write('{"iteration": 4, "lm_')  # killed while writing
    assert len(read_metrics(path.parent)) == 3
    assert last_metrics(path) == record(3)
    writer = MetricsWriter(path.parent)
    writer.append(record(3, loss=0.5))  # as long as the line that it replaces
    assert last_metrics(path) == record(3, loss=0.5)
    writer = MetricsWriter(path.parent)
    writer.append(record(2, loss=9.0))
    writer.append(record(3, loss=math.nan))
    first, second, third = read_metrics(path.parent)
    assert (first, second, third.iteration) == (record(1), record(2, loss=9.0), 3)
    assert math.isnan(third.lm_loss)
    lines = path.read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == [1, 2, 3], "one line for each iteration"
    assert "NaN" not in lines[2]


def test_keys_of_other_versions_are_ignored_or_zero():
    old = dataclasses.asdict(record(1)) | {"new": 1}
    for key in ("resharded_experts", "reshard_s"):
        del old[key]
    del old["layers"][0]["spag_s"]
    read = parse_record(IterationMetrics, json.dumps(old))
    assert (read.resharded_experts, read.reshard_s, read.layers[0].spag_s) == (0, 0, 0)
    del old["layers"][0]["spag_bytes"]
    with pytest.raises(ValueError, match="spag_bytes"):
        parse_record(IterationMetrics, json.dumps(old))


@pytest.mark.parametrize("line", ["{", "3", '{"iteration": 1}', '{"iteration": 1, "layers": [3]}'])
def test_damaged_lines_are_named(tmp_path, line):
    writer = MetricsWriter(tmp_path)
    writer.append(record(1))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ConfigurationError, match=r"metrics\.jsonl: line 2 is damaged or incomplete"):
        read_metrics(tmp_path)


def test_missing_and_impossible_folders_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="no such file"):
        read_metrics(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="record_dir"):
        MetricsWriter(tmp_path / "file" / "run")


def test_a_full_disk_costs_only_the_line_that_does_not_fit(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.append(record(1))
    refused = pytest.raises(ConfigurationError, match="cannot be written")
    with room_for((tmp_path / "metrics.jsonl").stat().st_size + 50), refused:
        writer.append(record(2))
    assert read_metrics(tmp_path) == [record(1)]
    writer.append(record(2))
    assert read_metrics(tmp_path) == [record(1), record(2)]
