"""Old spellings of settings are refused with the new spelling, and translated in recorded runs."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_fssdp.cli.training.run_folder import RunFolder
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.renamed_settings import RECORDED_RUN_HEADER
from megatron_fssdp.config.run.composition import load_run
from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES
from megatron_fssdp.config.strategy.strategy_selection import resolve_strategy
from megatron_fssdp.reporting.records.recorded_run import run_config_of

TINY = Path(__file__).parents[2] / "configs" / "gpt_moe_tiny.yaml"
RENAMED = {
    "schedule=pipelined": "smart_schedule=true",
    "schedule=plain": "smart_schedule=false",
    "exchange=two_step": "schedule=megatron",
    "exchange=fused": "schedule=s1",
}
NAMES = sorted(set(STRATEGIES) - {"none", "parm", "auto"})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("old", RENAMED)
def test_an_old_flag_is_refused_with_the_new_spelling(name: str, old: str) -> None:
    with pytest.raises(ConfigurationError, match=f"--moe-strategy-set: {old} is now {RENAMED[old]}"):
        resolve_strategy(name, overrides=[old])
    resolve_strategy(name, overrides=[RENAMED[old]])


@pytest.mark.parametrize("old", RENAMED)
def test_an_old_strategy_file_is_refused_with_the_new_spelling(tmp_path: Path, old: str) -> None:
    path = tmp_path / "strategy.yaml"
    path.write_text(old.replace("=", ": ") + "\n")
    with pytest.raises(ConfigurationError, match=f"strategy.yaml: {old} is now {RENAMED[old]}"):
        resolve_strategy("fssdp", path)


def test_an_old_run_file_is_refused_with_all_new_spellings(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(_run_yaml({"schedule": "pipelined", "exchange": "fused"}))
    with pytest.raises(
        ConfigurationError,
        match=r"schedule=pipelined is now smart_schedule=true; exchange=fused is now schedule=s1",
    ):
        load_run([path])


def test_auto_knows_the_smart_schedule_but_no_schedule() -> None:
    with pytest.raises(ConfigurationError, match="schedule=pipelined is now smart_schedule=true"):
        resolve_strategy("auto", overrides=["schedule=pipelined"])
    with pytest.raises(ConfigurationError, match="key 'schedule' has no meaning under strategy 'auto'"):
        resolve_strategy("auto", overrides=["schedule=s1"])


def test_parm_has_no_smart_schedule() -> None:
    with pytest.raises(ConfigurationError, match="schedule: got 'pipelined'"):
        resolve_strategy("parm", overrides=["schedule=pipelined"])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"schedule": "pipelined", "group_size": 2}, {"smart_schedule": True, "group_size": 2}),
        ({"exchange": "fused", "schedule": "plain"}, {"schedule": "s1", "smart_schedule": False}),
        ({"schedule": "plain", "exchange": "two_step"}, {"schedule": "megatron", "smart_schedule": False}),
    ],
)
def test_recorded_runs_with_old_spellings_are_read(
    tmp_path: Path, old: dict[str, Any], new: dict[str, Any]
) -> None:
    (tmp_path / "config.yaml").write_text(RECORDED_RUN_HEADER + _run_yaml(old))
    assert run_config_of(tmp_path).strategy.settings == new
    assert load_run([tmp_path / "config.yaml"]).strategy.settings == new
    assert (tmp_path / "config.yaml").read_text() == RECORDED_RUN_HEADER + _run_yaml(old)
    RunFolder(tmp_path).check_unchanged(load_run([TINY]))


def test_a_written_run_is_recognized_as_recorded(tmp_path: Path) -> None:
    RunFolder(tmp_path / "run").create(load_run([TINY]))
    assert (tmp_path / "run" / "config.yaml").read_text().startswith(RECORDED_RUN_HEADER)


def _run_yaml(settings: dict[str, Any]) -> str:
    run = load_run([TINY]).model_dump(mode="json")
    return yaml.safe_dump({**run, "strategy": {"name": "ep", "settings": settings}})
