"""Megatron's arguments describe a run."""

import sys

import pytest

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.run.composition import load_run
from megatron_fssdp.config.run.described_run import described_config
from megatron_fssdp.config.run.megatron_arguments import Installation
from megatron_fssdp.config.run.megatron_options import options, plain
from megatron_fssdp.config.run.sections import ModelArguments
from megatron_fssdp.megatron_adapter.iterations.host_settings import HostSettings
from megatron_fssdp.simulation.moe_job import job_of_run

from ...launch.tiny_run import arguments_of

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


def parsed(run, monkeypatch):
    """Megatron's arguments of a run, with what its own checks would add."""
    from megatron.training.arguments import parse_args

    from megatron_fssdp.megatron_adapter.entry.argument_check import add_strategy_arguments

    monkeypatch.setattr(sys, "argv", ["script.py", *arguments_of(run, Installation(False, True))])
    return HostSettings((parse_args(add_strategy_arguments),))


@pytest.mark.parametrize("name", RUNS)
def test_a_shipped_run_is_read_back_from_its_arguments(name, monkeypatch):
    run = load_run(RUNS[name])
    args = parsed(run, monkeypatch)
    on_cpu = run.training.device == "cpu"
    sizes = run.parallelism.world_size, run.parallelism.nproc_per_node
    config = described_config(args, run.model.family, *sizes, on_cpu, run.strategy.model_dump())
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
    config = described_config(parsed(run, monkeypatch), "gpt", 4, 4, True, STRATEGY)
    assert config.model.model_extra["moe_expert_capacity_factor"] == 1.5
    assert config.training.model_extra["num_workers"] == 3


def test_what_a_yaml_cannot_describe_is_refused(monkeypatch):
    args = parsed(load_run(["gpt_moe_tiny"]), monkeypatch)
    args.sources[0].train_iters = None  # --train-samples
    with pytest.raises(ConfigurationError, match=r"training\.train_iters: missing"):
        described_config(args, "gpt", 4, 4, True, STRATEGY)
