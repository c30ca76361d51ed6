"""No run replaces the records of another one, and Megatron's arguments describe it."""

import sys
from pathlib import Path

import pytest

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.run.composition import load_run
from megatron_fssdp.config.run.megatron_arguments import Installation, megatron_arguments
from megatron_fssdp.config.run.megatron_options import options, plain
from megatron_fssdp.config.run.sections import ModelArguments
from megatron_fssdp.launch.run_data import data_arguments
from megatron_fssdp.megatron_adapter.iterations.host_settings import HostSettings
from megatron_fssdp.megatron_adapter.iterations.record_folder import described_config, record_folder
from megatron_fssdp.records.metrics import METRICS_FILE
from megatron_fssdp.records.run_settings import write_recorded_settings
from megatron_fssdp.simulation.moe_job import job_of_run

STRATEGY = {"name": "fssdp", "settings": {}}

PLAN = ("training/measure", "strategies/fssdp")
RUNS = {
    "gpt_moe_tiny": ("gpt_moe_tiny",),
    "bert_moe_tiny": ("bert_moe_tiny",),
    "deepseek-v3": ("models/deepseek-v3", "parallelism/h200-deepseek-v3", *PLAN),
    "gpt-oss-120b": ("models/gpt-oss-120b", "parallelism/h200", *PLAN),
}
"""Runs that have nearly all settings of models."""

MODEL = set(ModelArguments.model_fields)


def run_of(*overrides):
    return load_run(["gpt_moe_tiny"], ["training.save=ckpt", "training.global_batch_size=null", *overrides])


def record(folder, run):
    write_recorded_settings(folder, run, STRATEGY)
    (folder / METRICS_FILE).write_text("{}\n")


def test_another_run_gets_a_folder_of_its_own(tmp_path, caplog):
    asked, run = tmp_path / "records", run_of()
    assert record_folder(asked, run, resumes=False) == asked
    assert not caplog.text
    record(asked, run)
    second = tmp_path / "records-2"
    assert record_folder(asked, run, resumes=False) == second
    assert f"go to {second}" in caplog.text
    record(second, run)
    assert record_folder(asked, run, resumes=False) == tmp_path / "records-3"
    (second / METRICS_FILE).write_text("")  # of a run that ended before its first iteration
    assert record_folder(asked, run, resumes=False) == second


def test_a_resumed_run_continues_its_own_records(tmp_path):
    asked = tmp_path / "records"
    record(asked, run_of())
    assert record_folder(asked, run_of("training.train_iters=99"), resumes=True) == asked
    for change in ("model.num_layers=6", "parallelism.num_nodes=2", "training.save=elsewhere"):
        assert record_folder(asked, run_of(change), resumes=True) == tmp_path / "records-2", change
    record(tmp_path / "records-2", run_of())
    assert record_folder(asked, run_of(), resumes=True) == tmp_path / "records-2", "the latest"


def test_runs_that_a_yaml_cannot_describe_are_told_apart_by_that(tmp_path):
    record(tmp_path / "records", None)
    assert record_folder(tmp_path / "records", None, resumes=True) == tmp_path / "records"
    assert record_folder(tmp_path / "records", run_of(), resumes=True) == tmp_path / "records-2"


def test_sizes_that_a_yaml_leaves_to_megatrons_defaults_are_the_same(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("{}\n")
    (folder / "config.yaml").write_text("include: [gpt_moe_tiny.yaml]\n")
    for settings, name in (
        (["model.kv_channels=16", "model.moe_ffn_hidden_size=128"], "run"),
        (["model.hidden_size=128"], "run-2"),
    ):
        assert record_folder(folder, load_run(["gpt_moe_tiny"], settings), resumes=True) == tmp_path / name


def parsed(run, monkeypatch):
    """Megatron's arguments of a run, with what its own checks would add."""
    from megatron.training.arguments import parse_args

    from megatron_fssdp.megatron_adapter.entry.argument_check import add_strategy_arguments

    data = data_arguments(run, Path("d"), run.data.vocab_size, 0, 1000)
    words = megatron_arguments(run, data, Installation(False, True), Path("runs/x"), resume=False)
    monkeypatch.setattr(sys, "argv", ["script.py", *words])
    args = parse_args(add_strategy_arguments)
    args.world_size = run.parallelism.world_size
    return HostSettings((args,))


@pytest.mark.parametrize("name", RUNS)
def test_a_shipped_run_is_read_back_from_its_arguments(name, monkeypatch):
    run = load_run(RUNS[name])
    args = parsed(run, monkeypatch)
    on_cpu = run.training.device == "cpu"
    config = described_config(
        args, run.model.family, run.parallelism.nproc_per_node, on_cpu, run.strategy.model_dump()
    )
    assert config.strategy == run.strategy
    ignored = {"declared_nodes"}
    assert config.parallelism.model_dump(exclude=ignored) == run.parallelism.model_dump(exclude=ignored)
    assert config.model.model_dump(include=MODEL) == run.model.model_dump(include=MODEL)
    assert config.global_batch_size == run.global_batch_size
    for key in ("train_iters", "micro_batch_size", "optimizer", "lr", "precision"):
        assert getattr(config.training, key) == getattr(run.training, key)
    given = {key: value for key, value in run.megatron_values().items() if key not in ("save", "load")}
    recorded = config.megatron_values()
    for key, value in given.items():  # what equals Megatron's default need not be recorded
        assert recorded.get(key, plain(options()[key].default)) == value
    if run.parallelism.ranks_of_a_model == 1:
        assert job_of_run(config) == job_of_run(run)


def test_other_arguments_are_recorded_under_their_own_names(monkeypatch):
    run = load_run(["gpt_moe_tiny"], ["model.moe_expert_capacity_factor=1.5", "training.num_workers=3"])
    config = described_config(parsed(run, monkeypatch), "gpt", 4, True, STRATEGY)
    assert config.model.model_extra["moe_expert_capacity_factor"] == 1.5
    assert config.training.model_extra["num_workers"] == 3


def test_what_a_yaml_cannot_describe_is_refused(monkeypatch):
    args = parsed(load_run(["gpt_moe_tiny"]), monkeypatch)
    args.sources[0].train_iters = None  # --train-samples
    with pytest.raises(ConfigurationError, match=r"training\.train_iters: missing"):
        described_config(args, "gpt", 4, True, STRATEGY)
