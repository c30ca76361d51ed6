"""Runs of different models, data or learning-rate schedules say nothing about each other's losses."""

import json
from contextlib import closing
from pathlib import Path

import pytest

from megatron_fssdp.records.metrics import IterationMetrics
from megatron_fssdp.records.metrics_file import MetricsWriter
from megatron_fssdp.records.recorded_run import RecordedRun, load
from megatron_fssdp.records.run_settings import differing_settings, loss_obstacle

GPT = """
model: {family: gpt, hidden_size: 64}
data: {path: a, vocab_size: 2048}
training: {train_iters: 10, lr: 0.001, seed: 1, device: cpu}
strategy: {name: ep, settings: {}}
"""


def run_of(folder: Path, config: str | None) -> RecordedRun:
    with closing(MetricsWriter(folder)) as writer:
        writer.append(IterationMetrics(1, 2.0, None, 1.0, 10.0))
    if config is not None:
        (folder / "config.yaml").write_text(config)
    return load(folder)


def test_strategies_and_seeds_may_differ_and_are_named(tmp_path: Path) -> None:
    other = GPT.replace("name: ep, settings: {}", "name: fssdp, settings: {slots: 2}").replace(
        "seed: 1", "seed: 2"
    )
    runs = [run_of(tmp_path / "a", GPT), run_of(tmp_path / "b", other)]
    assert differing_settings(runs) == {
        "training.seed": ("1", "2"),
        "strategy.name": ("ep", "fssdp"),
        "strategy.settings.slots": ("–", "2"),
    }
    assert loss_obstacle(runs) == ""


@pytest.mark.parametrize(
    ("old", "new", "obstacle"),
    [
        ("gpt", "bert", "different model (model.family gpt and bert)"),
        (
            "train_iters: 10",
            "train_iters: 20",
            "different learning-rate schedule (training.train_iters 10 and 20)",
        ),
        ("path: a", "path: b", "different data (data.path a and b)"),
        (
            "hidden_size: 64",
            "hidden_size: 64, moe_expert_capacity_factor: 1.5",
            "different model (model.moe_expert_capacity_factor – and 1.5)",
        ),
    ],
)
def test_other_models_schedules_and_data_are_an_obstacle(
    old: str, new: str, obstacle: str, tmp_path: Path
) -> None:
    runs = [run_of(tmp_path / "a", GPT), run_of(tmp_path / "b", GPT.replace(old, new))]
    assert loss_obstacle(runs) == obstacle


def test_the_same_data_in_two_folders_is_no_difference(tmp_path: Path) -> None:
    runs = []
    for name in ("a", "b"):
        (tmp_path / f"data-{name}").mkdir()
        manifest = {"files": {"text.bin": {"num_bytes": 3, "sha256": "0"}}}
        (tmp_path / f"data-{name}" / "manifest.json").write_text(json.dumps(manifest))
        runs.append(run_of(tmp_path / name, GPT.replace("path: a", f"path: {tmp_path}/data-{name}")))
    assert differing_settings(runs) == {}


def test_unknown_settings_count_as_equal(tmp_path: Path) -> None:
    runs = [
        run_of(tmp_path / "a", GPT),
        run_of(tmp_path / "b", None),
        run_of(tmp_path / "c", "strategy: {name: ep}\n"),
    ]
    assert differing_settings(runs) == {}
