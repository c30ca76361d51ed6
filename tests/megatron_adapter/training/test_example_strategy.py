"""The worked example of docs/adding_a_strategy.md, installed as a user installs it, and used everywhere.

``test_strategy_agreement.py`` trains it.
"""

import json
import os
import shutil

import pytest
import yaml

from ...report.made_runs import write_made_run
from ...report.page_parts import PageParts
from ...support.python_process import ROOT, python_output

PACKAGE = ROOT / "examples" / "second_home"
NAME, COLOUR = "second_home", "#332288"
END = "--- the end of a command"
RUN = f"""
import json, sys
from megatron_fssdp.cli.app import main
for words in json.loads(sys.argv[1]):
    sys.argv[1:] = words
    try:
        main()
    except SystemExit as ended:
        assert not ended.code, (words, ended.code)
    print({END!r})
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder for PYTHONPATH with the package in it, entry point included."""
    folder = tmp_path_factory.mktemp("site")
    source = shutil.copytree(PACKAGE, tmp_path_factory.mktemp("source") / "second_home")
    offline = ("--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check")
    python_output("-m", "pip", "install", "--quiet", *offline, "--target", folder, source)
    return folder


def commands(installed, *commands):
    """What ``megatron-fssdp`` prints for each command, in one process of its own that finds the package."""
    path = os.pathsep.join([str(installed), str(ROOT)])
    words = json.dumps([list(map(str, command)) for command in commands])
    return python_output("-c", RUN, words, PYTHONPATH=path, COLUMNS="300").split(END)[:-1]


def test_commands_know_it(installed, tmp_path):
    """It is listed, simulated, and beats plain expert parallelism on one hot expert; reports show it."""
    words = ("--loads", "W3", "--cluster", "hpwnv", "--cluster-set", "num_nodes=8")
    parts = ("models/hecate-gpt-moe-s", "parallelism/hecate-a", "training/measure", "strategies/hecate")
    job = (*(word for part in parts for word in ("--model", part)), "--iterations", 8)
    only = ["--moe-strategy-set", "fssdp=false"]
    out = tmp_path / "out"
    options = ("--strategies", f"ep,{NAME},auto", *only, "--out", out, "--no-plots")
    folder = write_made_run(tmp_path / "run", NAME, num_iterations=4, num_layers=4)
    run = yaml.safe_load((ROOT / "configs" / "gpt_moe_tiny.yaml").read_text(encoding="utf-8"))
    run["strategy"] = {"name": NAME}
    (folder / "config.yaml").write_text(yaml.safe_dump(run), encoding="utf-8")

    doctor, *_ = commands(installed, ["doctor"], ["simulate", *words, *job, *options], ["report", folder])
    assert "second_home from second-home-strategy" in doctor
    ranking = json.loads((out / "ranking.json").read_text(encoding="utf-8"))
    rows = {row["strategy"]: row for row in ranking["strategies"]}
    assert rows[NAME]["speedup_over_ep"] > 1.05
    assert rows["auto"]["speedup_over_ep"] > 1, "auto has no other candidate that could help"
    assert rows["auto"]["memory"]["replica_bytes"] > 0
    page = PageParts((folder / "report.html").read_text(encoding="utf-8"))
    assert page.figures["loss"][0]["data"][0]["line"]["color"] == COLOUR
