"""``megatron-fssdp report`` and ``compare`` from folders to files."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_fssdp.cli.app import app
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.report.colours import TIME_PARTS

from ...report.made_runs import write_made_run
from ...report.page_parts import PageParts, unpacked

ROOT = Path(__file__).parents[3]
TINY = ROOT / "configs" / "gpt_moe_tiny.yaml"
NAMES_AND_COLOURS = {(part.name, part.colour) for part in TIME_PARTS.values()}
CLUSTER = str(ROOT / "configs" / "clusters" / "hpwnv.yaml")


def command(*words: object) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Write records like those of the tiny configuration."""
    folder = write_made_run(tmp_path / "run", num_iterations=4, num_layers=4)
    shutil.copy(TINY, folder / "config.yaml")
    return folder


def test_a_page_lies_in_the_run_s_folder_unless_asked_for_elsewhere(run: Path, tmp_path: Path) -> None:
    assert "report.html" in command("report", run)
    assert len(PageParts((run / "report.html").read_text()).figures) > 5
    command("report", run, "--out", tmp_path / "new" / "page.html")
    assert (tmp_path / "new" / "page.html").read_text() == (run / "report.html").read_text()


def test_strategies_are_ranked_on_a_named_cluster(run: Path) -> None:
    command("report", run, "--cluster", CLUSTER, "--strategies", "ep,fssdp,quota")
    page = PageParts((run / "report.html").read_text())
    assert "iterations 1 to 4, on hpwnv" in page.texts["what-if"]
    traces = page.figures["what-if"]["data"]
    assert set(traces[0]["y"]) == {"ep", "fssdp", "quota"}
    assert {(trace["name"], trace["marker"]["color"]) for trace in traces} <= NAMES_AND_COLOURS
    measured = page.figures["time-means"]["data"]
    assert {(trace["name"], trace["marker"]["color"]) for trace in measured} <= NAMES_AND_COLOURS
    seconds = sum(unpacked(trace["x"]) for trace in traces)
    assert (seconds[:-1] <= seconds[1:]).all()
    assert all(f"{1e3 * value:.4g}" in page.texts["what-if"] for value in seconds)


def test_two_and_three_runs_are_compared_in_the_terminal_and_on_a_page(run: Path, tmp_path: Path) -> None:
    ep = write_made_run(tmp_path / "plain", "ep", num_iterations=4, num_layers=4)
    output = command("compare", ep, run)
    assert "exact" not in output
    assert "0.0e+00 relative" in output
    assert (ep / "comparison.html").exists()
    third = write_made_run(tmp_path / "third", "quota", num_iterations=2, num_layers=4)
    output = command("compare", ep, run, third, "--out", tmp_path / "c.html", "--png", tmp_path / "c.png")
    assert "quota" in output
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    assert len(PageParts((tmp_path / "c.html").read_text()).figures["loss"]["data"]) == 3


def test_a_picture_that_fails_does_not_cost_the_page(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ConfigurationError("no picture")

    monkeypatch.setattr("megatron_fssdp.cli.analysis.report_command.draw_device_loads", fail)
    ep = write_made_run(tmp_path / "plain", "ep", num_iterations=4, num_layers=4)
    words = ["compare", str(ep), str(run), "--png", str(tmp_path / "loads.png")]
    with pytest.raises(ConfigurationError, match="no picture"):
        CliRunner().invoke(app, words, catch_exceptions=False)
    assert (ep / "comparison.html").is_file()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["report", "{nowhere}"], "no such file"),
        (["report", "{run}/metrics.jsonl"], "metrics.jsonl: is a file, wanted the folder of a run"),
        (
            ["simulate", "--loads", "{nowhere}", "--cluster", CLUSTER, "--out", "{nowhere}"],
            "unknown workload or run",
        ),
        (
            ["train", "gpt_moe_tiny", "--dry-run", "--out", "{run}/config.yaml/x"],
            "config.yaml is not a folder but",
        ),
        (["compare", "{run}"], "got one run, wanted two or more"),
        (["report", "{run}", "--cluster", "nowhere"], "unknown cluster"),
        (["report", "{run}", "--cluster", CLUSTER, "--strategies", "fsdp"], "did you mean 'fssdp'"),
        (["report", "{run}", "--out", "{run}"], "is a folder, wanted a file"),
        (["compare", "{run}", "{run}", "--png", "{run}"], "--png .* is a folder, wanted a file"),
        (["report", "{run}", "--out", "{run}/config.yaml/x.html"], "is not a folder"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(words, message, run: Path, tmp_path: Path) -> None:
    places = {"run": run, "nowhere": tmp_path / "nowhere"}
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigurationError, match=message) as caught:
        CliRunner().invoke(app, [word.format(**places) for word in words], catch_exceptions=False)
    assert "\n" not in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_losses_of_unlike_runs_are_not_compared(run: Path, tmp_path: Path) -> None:
    other = write_made_run(tmp_path / "other", "fssdp", num_iterations=4, num_layers=4)
    text = TINY.read_text().replace("train_iters: 60", "train_iters: 20")
    (other / "config.yaml").write_text(text)
    with pytest.raises(ConfigurationError, match=r"training\.train_iters 60 and 20.*--loads-only") as caught:
        CliRunner().invoke(app, ["compare", str(run), str(other)], catch_exceptions=False)
    assert "\n" not in str(caught.value)
    output = command("compare", run, other, "--loads-only")
    assert "settings that differ" in output
    assert "training.train_iters" in output
    assert "load: mean" in output
    assert "loss: " not in output
    page = PageParts((run / "comparison.html").read_text())
    assert page.anchors[0] == "settings"
    assert "loss" not in page.anchors


def test_loads_of_ranks_that_share_cores_are_simulated_on_a_cluster(run: Path, tmp_path: Path) -> None:
    ep = write_made_run(tmp_path / "plain", "ep", num_iterations=4, num_layers=4)
    for folder in (ep, run):
        lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
        session = json.dumps({"strategy": "x", "iterations": 4, "ranks": 4, "cores": 2})
        lines[0] = lines[0].replace('"session": null', f'"session": {session}')
        (folder / "metrics.jsonl").write_text("".join(lines))
    output = " ".join(command("compare", ep, run).split())
    assert "speed is not comparable here: 4 ranks share 2 cores" in output
    assert "simulated, not measured: the loads of ep in 4 layers of Mixtral" in output
    page = PageParts((ep / "comparison.html").read_text())
    assert "These times are simulated, not measured" in page.texts["what-if"]
    assert set(page.figures["what-if"]["data"][0]["y"]) == {"ep", "fssdp"}


def test_ranking_needs_recorded_loads(run: Path) -> None:
    (run / "loads.npy").unlink()
    with pytest.raises(ConfigurationError, match="no run has recorded loads"):
        CliRunner().invoke(app, ["report", str(run), "--cluster", CLUSTER], catch_exceptions=False)
