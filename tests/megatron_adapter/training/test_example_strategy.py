"""The worked example of docs/adding_a_strategy.md, installed as a user installs it, and used everywhere.

``test_strategy_agreement.py`` trains it.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ...report.made_runs import write_made_run
from ...report.page_parts import PageParts

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "examples" / "second_home"
NAME, COLOUR = "second_home", "#332288"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH with the package in it, entry point included."""
    folder = tmp_path_factory.mktemp("site")
    source = shutil.copytree(PACKAGE, tmp_path_factory.mktemp("source") / "second_home")
    offline = ("--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check")
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", *offline, "--target", folder, source],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def command(installed: Path, *words: object) -> str:
    """What ``megatron-fssdp`` prints in a process of its own that finds the package."""
    path = os.pathsep.join([str(installed), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", "from megatron_fssdp.cli.app import main; main()", *map(str, words)],
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "300"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_doctor_knows_it(installed: Path) -> None:
    assert "second_home from second-home-strategy" in command(installed, "doctor")


def test_it_is_simulated_and_beats_plain_expert_parallelism_on_one_hot_expert(
    installed: Path, tmp_path: Path
) -> None:
    words = ("--loads", "W3", "--cluster", "hpwnv", "--cluster-set", "num_nodes=8")
    parts = ("models/hecate-gpt-moe-s", "parallelism/hecate-a", "training/measure", "strategies/hecate")
    job = (*(word for part in parts for word in ("--model", part)), "--iterations", 12)
    keys = ("fssdp", "prophet", "fastermoe", "quota", "smartmoe")
    only = [word for key in keys for word in ("--moe-strategy-set", f"{key}=false")]
    out = tmp_path / "out"
    command(
        installed, "simulate", *words, *job, "--strategies", f"ep,{NAME},auto", *only, "--out", out,
        "--no-break-even", "--no-plots",
    )  # fmt: skip
    ranking = json.loads((out / "ranking.json").read_text(encoding="utf-8"))
    rows = {row["strategy"]: row for row in ranking["strategies"]}
    assert rows[NAME]["speedup_over_ep"] > 1.05
    assert rows["auto"]["speedup_over_ep"] > 1, "auto has no other candidate that could help"
    assert rows["auto"]["memory"]["replica_bytes"] > 0


def test_a_report_ranks_it_by_default_and_shows_its_colour_and_name(installed: Path, tmp_path: Path) -> None:
    folder = write_made_run(tmp_path / "run", NAME, num_iterations=4, num_layers=4)
    run = yaml.safe_load((ROOT / "configs" / "gpt_moe_tiny.yaml").read_text(encoding="utf-8"))
    run["strategy"] = {"name": NAME}
    (folder / "config.yaml").write_text(yaml.safe_dump(run), encoding="utf-8")
    command(installed, "report", folder, "--cluster", "hpwnv")
    page = PageParts((folder / "report.html").read_text(encoding="utf-8"))
    assert page.figures["loss"][0]["data"][0]["line"]["color"] == COLOUR
    assert NAME in page.texts["what-if"]
