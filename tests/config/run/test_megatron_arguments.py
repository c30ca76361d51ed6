"""Settings that are read back from Megatron's arguments."""

import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.run.composition import load_run
from megatron_fssdp.config.run.megatron_arguments import (
    Installation,
    TokenizedData,
    megatron_arguments,
    run_config_from_arguments,
)
from megatron_fssdp.config.run.megatron_options import options, plain
from megatron_fssdp.config.run.run_config import RunConfig
from megatron_fssdp.config.run.sections import ModelArguments
from megatron_fssdp.simulation.moe_job import job_of_run

PLAN = ("training/measure", "strategies/fssdp")
RUNS = {
    "gpt_moe_tiny": ("gpt_moe_tiny",),
    "bert_moe_tiny": ("bert_moe_tiny",),
    "deepseek-v3": ("models/deepseek-v3", "parallelism/h200-deepseek-v3", *PLAN),
    "gpt-oss-120b": ("models/gpt-oss-120b", "parallelism/h200", *PLAN),
}
"""Runs that have nearly all settings of models."""

MODEL = set(ModelArguments.model_fields)
STRATEGY = {"name": "ep", "settings": {}}


def parsed(run: RunConfig, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Megatron's arguments of a run, with what its own checks would add."""
    from megatron.training.arguments import parse_args

    from megatron_fssdp.megatron_adapter.entry.argument_check import add_strategy_arguments

    data = TokenizedData(Path("d/text"), run.data.vocab_size, 0, 1000, Path("d/cache"))
    words = megatron_arguments(run, data, Installation(False, True), Path("runs/x"), resume=False)
    monkeypatch.setattr(sys, "argv", ["script.py", *words])
    args = parse_args(add_strategy_arguments)
    args.world_size = run.parallelism.world_size
    return args


@pytest.mark.parametrize("name", RUNS)
def test_a_shipped_run_is_read_back_from_its_arguments(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = load_run(RUNS[name])
    args = parsed(run, monkeypatch)
    on_cpu = run.training.device == "cpu"
    found = run_config_from_arguments(
        args, run.model.family, run.parallelism.nproc_per_node, on_cpu, run.strategy.model_dump()
    )
    assert found.strategy == run.strategy
    ignored = {"declared_nodes"}
    assert found.parallelism.model_dump(exclude=ignored) == run.parallelism.model_dump(exclude=ignored)
    assert found.model.model_dump(include=MODEL) == run.model.model_dump(include=MODEL)
    assert found.global_batch_size == run.global_batch_size
    for key in ("train_iters", "micro_batch_size", "optimizer", "lr", "precision"):
        assert getattr(found.training, key) == getattr(run.training, key)
    given = {key: value for key, value in run.megatron_values().items() if key not in ("save", "load")}
    found_values = found.megatron_values()
    for key, value in given.items():  # what equals Megatron's default need not be recorded
        assert found_values.get(key, plain(options()[key].default)) == value
    if run.parallelism.ranks_of_a_model == 1:
        assert job_of_run(found) == job_of_run(run)


def test_other_arguments_are_recorded_under_their_own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    run = load_run(["gpt_moe_tiny"], ["model.moe_expert_capacity_factor=1.5", "training.num_workers=3"])
    found = run_config_from_arguments(parsed(run, monkeypatch), "gpt", 4, True, STRATEGY)
    assert found.model.model_extra["moe_expert_capacity_factor"] == 1.5
    assert found.training.model_extra["num_workers"] == 3


def test_what_a_yaml_cannot_describe_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    args = parsed(load_run(["gpt_moe_tiny"]), monkeypatch)
    args.train_iters = None  # --train-samples
    with pytest.raises(ConfigurationError, match=r"training\.train_iters: missing"):
        run_config_from_arguments(args, "gpt", 4, True, STRATEGY)
