"""Settings that are read back from Megatron's arguments."""

import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.run.argument_reader import run_config_from_arguments
from megatron_fssdp.config.run.composition import load_run
from megatron_fssdp.config.run.megatron_arguments import Installation, TokenizedData, megatron_arguments
from megatron_fssdp.config.run.run_config import RunConfig
from megatron_fssdp.config.shipped_files import shipped_runs
from megatron_fssdp.reporting.records.recorded_settings import SETTINGS_FILE, write_recorded_settings
from megatron_fssdp.simulation.moe_job import job_of_run

COMPLETE = [name for name in shipped_runs() if "/" not in name or name.startswith("experiments/")]
TYPICAL = {"gpt_moe_tiny", "bert_moe_tiny", "experiments/deepseek-v3", "experiments/gpt-oss-120b"}
"""Runs that have nearly all settings of models. The others are read in the slow tests."""

STRATEGY = {"name": "ep", "settings": {}}


def parsed(run: RunConfig, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Megatron's arguments of a run, with what its own checks would add."""
    from megatron.training.arguments import parse_args

    from megatron_fssdp.megatron_adapter.entry.registration import add_strategy_arguments

    data = TokenizedData(Path("d/text"), run.data.vocab_size, 0, 1000, Path("d/cache"))
    words = megatron_arguments(run, data, Installation(False, True), Path("runs/x"), resume=False)
    monkeypatch.setattr(sys, "argv", ["script.py", *words])
    args = parse_args(add_strategy_arguments)
    args.world_size = run.parallelism.world_size
    args.virtual_pipeline_model_parallel_size = run.parallelism.virtual_pipeline
    return args


@pytest.mark.parametrize(
    "name", [name if name in TYPICAL else pytest.param(name, marks=pytest.mark.slow) for name in COMPLETE]
)
def test_a_shipped_run_is_read_back_from_its_arguments(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = load_run([name])
    args = parsed(run, monkeypatch)
    on_cpu = run.training.device == "cpu"
    found = run_config_from_arguments(
        args, run.model.family, run.parallelism.nproc_per_node, on_cpu, run.strategy.model_dump()
    )
    assert found.strategy == run.strategy
    ignored = {"declared_nodes"}
    assert found.parallelism.model_dump(exclude=ignored) == run.parallelism.model_dump(exclude=ignored)
    read, wanted = found.model.model_dump(), run.model.model_dump()
    if wanted["moe_pre_softmax"] is None:
        wanted["moe_pre_softmax"] = run.model.moe_top_k == 1
    different = {key: (read[key], wanted[key]) for key in wanted if read[key] != wanted[key]}
    assert set(different) <= {"order_head", "ffn_hidden_size", "moe_ffn_hidden_size"}, different
    for key in ("iterations", "global_batch_size", "micro_batch_size", "optimizer", "lr", "precision"):
        assert getattr(found.training, key) == getattr(run.training, key)
    if run.parallelism.pipeline == run.parallelism.tensor == 1:
        assert job_of_run(found) == job_of_run(run)


def test_what_a_yaml_cannot_describe_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    args = parsed(load_run(["gpt_moe_tiny"]), monkeypatch)
    args.moe_router_load_balancing_type = ["aux_loss", "seq_aux_loss"]
    with pytest.raises(ConfigurationError, match=r"model\.moe_balancing: got a list"):
        run_config_from_arguments(args, "gpt", 4, True, STRATEGY)


def test_settings_of_the_command_line_stay_and_own_ones_are_written_again(tmp_path: Path) -> None:
    run = load_run(["gpt_moe_tiny"])
    assert write_recorded_settings(tmp_path, None, STRATEGY)
    assert write_recorded_settings(tmp_path, run, STRATEGY)
    assert load_run([tmp_path / SETTINGS_FILE]) == run
    from megatron_fssdp.cli.training.run_folder import RunFolder

    RunFolder(tmp_path).create(run)
    assert not write_recorded_settings(tmp_path, None, STRATEGY)
