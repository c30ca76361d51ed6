"""Old spellings of settings are translated in recorded runs."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_fssdp.cli.training.run_folder import RunFolder
from megatron_fssdp.config.renamed_settings import RECORDED_RUN_HEADER
from megatron_fssdp.config.run.composition import load_run
from megatron_fssdp.reporting.records.recorded_run import run_config_of

TINY = Path(__file__).parents[2] / "configs" / "gpt_moe_tiny.yaml"


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
