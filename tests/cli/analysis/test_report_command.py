import json
import re
import shutil

import pytest

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.report.colours import TIME_PARTS
from tests.support.python_process import ROOT

from ...report.made_runs import write_made_run
from ...report.page_parts import PageParts
from .test_other_loads import command

TINY = ROOT / "configs" / "gpt_moe_tiny.yaml"
OLD_RUN = ROOT / "tests" / "records" / "old_run"
NAMES_AND_COLOURS = {(part.name, part.colour) for part in TIME_PARTS.values()}


@pytest.fixture
def run(tmp_path):
    """Records like those of the tiny configuration."""
    folder = write_made_run(tmp_path / "run", num_iterations=4, num_layers=4)
    shutil.copy(TINY, folder / "config.yaml")
    return folder


def test_a_run_of_the_present_format_has_a_page_where_it_is_asked_for(tmp_path):
    out = tmp_path / "new" / "page.html"
    output = command("report", OLD_RUN, "--out", out)
    assert str(out) in output
    assert " replicas a layer of 24 possible" in output
    page = PageParts(out.read_text())
    assert len(page.figures) == 5
    bars = page.figures["iteration-time"][0]["data"]
    assert {(bar["name"], bar["marker"]["color"]) for bar in bars} <= NAMES_AND_COLOURS
    assert not (OLD_RUN / "report.html").exists()


def test_figures_are_printed_as_a_table_or_as_json(run, tmp_path):
    ep = write_made_run(tmp_path / "plain", "ep", num_iterations=4, num_layers=4)
    assert "0.0e+00 relative" in command("compare", ep, run)
    assert (ep / "comparison.html").exists()
    third = write_made_run(tmp_path / "third", "quota", num_iterations=2, num_layers=4)
    comparison = json.loads(command("compare", ep, run, third, "--out", tmp_path / "c.html", "--json"))
    assert comparison["page"] == str(tmp_path / "c.html")
    assert [run_facts["name"] for run_facts in comparison["runs"]] == ["ep", "fssdp", "quota"]
    assert [run_facts["iterations"] for run_facts in comparison["runs"]] == [4, 4, 2]
    assert comparison["runs"][1]["largest_loss_difference"] == 0.0
    assert comparison["runs"][1]["load_max_over_mean"] < comparison["runs"][1]["ep_load_max_over_mean"]
    assert comparison["settings_that_differ"]["strategy.name"] == ["ep", "fssdp", "quota"]
    alone = json.loads(command("report", run, "--json"))
    assert alone["sentence"].startswith("fssdp: 4 of 60 iterations, so far; busiest device")
    assert alone["runs"][0]["replicas_per_layer"] == 3.0
    assert len(PageParts((tmp_path / "c.html").read_text()).figures["loss"][0]["data"]) == 3


def test_damaged_loads_are_named_and_cannot_be_simulated(run):
    (run / "loads.npy").write_bytes(b"damaged")
    lines = [line for line in command("report", run).splitlines() if "loads.npy" in line]
    assert len(lines) == 1
    assert "everything that needs it is left out" in lines[0]
    with pytest.raises(ConfigurationError, match=r"loads\.npy"):
        command("simulate", "--loads", run, "--cluster", "hpwnv", "--out", run / "new")


def test_losses_of_unlike_runs_are_not_compared(run, tmp_path):
    unlike = write_made_run(tmp_path / "other", "fssdp", num_iterations=4, num_layers=4)
    text = TINY.read_text().replace("train_iters: 60", "train_iters: 20")
    (unlike / "config.yaml").write_text(text)
    output = command("compare", run, unlike)
    assert re.search(r"losses are not compared, .*training\.train_iters 60 and 20", output)
    assert "settings that differ" in output
    assert "training.train_iters" in output
    assert "load: mean" in output
    assert "loss: " not in output
    page = PageParts((run / "comparison.html").read_text())
    assert page.anchors[0] == "settings-that-differ"
    assert "loss" not in page.anchors
