"""`megatron-fssdp sweep`: what is run, continued, repeated and named, with a stand-in for training."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from megatron_fssdp.cli.sweep_runs import PAGE_FILE, RESULTS_FILE, listing, prepare, run_sweep
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.launch.train_request import TrainRequest

from ..report.made_runs import write_made_run
from ..report.page_parts import PageParts

ROOT = Path(__file__).parents[2]
SWEEP = """
run: [gpt_moe_tiny]
strategies: [ep, fssdp]
seeds: [1, 2]
iterations: 4
settings: {training.save_checkpoints: %s}
"""


@dataclass
class Trainer:
    """Stands in for `train`: records what it is asked, and writes records of a run, or fails as told."""

    outcomes: dict[str, Callable[[TrainRequest], int]] = field(default_factory=dict)
    asked: list[tuple[str, bool, bool]] = field(default_factory=list)

    def __call__(self, request: TrainRequest, console: Console) -> int:
        name = request.folder.path.name
        self.asked.append((name, request.resume, request.overwrite))
        return self.outcomes.get(name, train_whole)(request)


def train_part(request: TrainRequest, iterations: int) -> None:
    config = request.resolve()
    folder = request.folder
    folder.check(config.training, request.resume, request.overwrite)
    if request.overwrite:
        folder.move_aside()
    write_made_run(folder.path, config.strategy.name, num_iterations=iterations, seed=config.training.seed)
    folder.create(config, request.changed_settings())


def save_checkpoint(request: TrainRequest, iteration: int) -> None:
    request.folder.checkpoints.mkdir(exist_ok=True)
    (request.folder.checkpoints / "latest_checkpointed_iteration.txt").write_text(str(iteration))


def train_whole(request: TrainRequest) -> int:
    train_part(request, 4)
    if request.resolve().training.save_checkpoints:
        save_checkpoint(request, 4)
    return 0


def fail(request: TrainRequest) -> int:
    train_part(request, 2)
    request.folder.log.write_text("[default1]:ValueError: out of luck\n")
    return 1


@pytest.fixture
def sweep(tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Runs the sweep with a trainer: exit code and output."""

    def run(trainer: Trainer, text: str = SWEEP % "false") -> tuple[int, str]:
        (tmp_path / "sweep.yaml").write_text(text)
        output = StringIO()
        console = Console(file=output, width=200)
        code = run_sweep(prepare(tmp_path / "sweep.yaml", tmp_path / "out"), console, trainer)
        return code, output.getvalue()

    return run


def test_every_run_is_trained_and_compared_and_not_repeated(sweep, tmp_path: Path) -> None:
    trainer = Trainer()
    code, output = sweep(trainer)
    assert code == 0
    names = ["ep-seed1", "fssdp-seed1", "ep-seed2", "fssdp-seed2"]
    assert trainer.asked == [(name, False, False) for name in names]
    assert "run 4 of 4: fssdp-seed2 (all runs: about" in output
    page = PageParts((tmp_path / "out" / PAGE_FILE).read_text())
    assert page.anchors[0] == "repeated-runs"
    assert len(page.figures["repeated-runs"][0]["data"][0]["x"]) == 2
    results = json.loads((tmp_path / "out" / RESULTS_FILE).read_text())
    assert [group["name"] for group in results["groups"]] == ["ep", "fssdp"]
    assert {run["state"] for run in results["runs"]} == {"finished"}

    again = Trainer()
    code, output = sweep(again)
    assert (code, again.asked) == (0, [])
    assert "4 of 4 runs are finished already" in output
    assert "median (quartiles)" in output
    code, _ = sweep(again, (SWEEP % "false").replace("[1, 2]", "[1, 2, 3]"))
    assert [name for name, *_ in again.asked] == ["ep-seed3", "fssdp-seed3"]


def test_a_failing_run_is_named_and_run_again_by_the_same_command(sweep, tmp_path: Path) -> None:
    code, output = sweep(Trainer({"fssdp-seed1": fail}))
    assert code == 1
    log = tmp_path / "out" / "fssdp-seed1" / "log.txt"
    assert f"failed: fssdp-seed1: rank 1: ValueError: out of luck; all output: {log}" in output
    assert "3 of 4 runs are finished, 1 failed; the same command runs them again" in output
    assert "Missing" in PageParts((tmp_path / "out" / PAGE_FILE).read_text()).texts["repeated-runs"]
    again = Trainer()
    assert sweep(again)[0] == 0
    assert again.asked == [("fssdp-seed1", False, True)]


def test_an_exit_before_the_last_iteration_is_a_failure(sweep) -> None:
    def end_early(request: TrainRequest) -> int:
        train_part(request, 3)
        return 0

    code, output = sweep(Trainer({"ep-seed1": end_early}))
    assert code == 1
    assert "failed: ep-seed1: the ranks ended before the last iteration" in output


@pytest.mark.parametrize(("saved", "wanted"), [(0, (False, True)), (2, (True, False))])
def test_an_interrupted_sweep_is_continued(
    sweep, tmp_path: Path, saved: int, wanted: tuple[bool, bool]
) -> None:
    def interrupt(request: TrainRequest) -> int:
        train_part(request, 3)
        if saved:
            save_checkpoint(request, saved)
        return 143

    text = SWEEP % "true"
    code, output = sweep(Trainer({"fssdp-seed1": interrupt}), text)
    assert code == 143
    assert "interrupted; 1 of 4 runs are finished; the same command continues the sweep" in output
    assert not (tmp_path / "out" / PAGE_FILE).exists()
    states = [run["state"] for run in json.loads((tmp_path / "out" / RESULTS_FILE).read_text())["runs"]]
    assert states == ["finished", "continue" if saved else "again", "new", "new"]
    trainer = Trainer()
    assert sweep(trainer, text)[0] == 0
    assert trainer.asked[0] == ("fssdp-seed1", *wanted)
    assert len(trainer.asked) == 3


def test_ctrl_c_between_runs_ends_the_sweep_in_order(sweep) -> None:
    def interrupt(request: TrainRequest) -> int:
        raise KeyboardInterrupt

    code, output = sweep(Trainer({"fssdp-seed1": interrupt}))
    assert code == 130
    assert "interrupted; 1 of 4 runs are finished" in output


def test_records_that_are_damaged_or_lack_the_last_checkpoint_are_not_finished(sweep, tmp_path: Path) -> None:
    text = SWEEP % "true"
    sweep(Trainer(), text)
    (tmp_path / "out" / "ep-seed1" / "metrics.jsonl").write_text('{"iteration": 1, "lm')
    save = tmp_path / "out" / "ep-seed2" / "checkpoints" / "latest_checkpointed_iteration.txt"
    save.write_text("2")
    (tmp_path / "out" / "fssdp-seed2" / "config.yaml").unlink()
    trainer = Trainer()
    sweep(trainer, text)
    assert trainer.asked == [
        ("ep-seed1", False, True),
        ("ep-seed2", True, False),
        ("fssdp-seed2", False, True),
    ]


def test_the_listing_has_the_state_and_the_command_of_every_run(sweep, tmp_path: Path) -> None:
    sweep(Trainer({"fssdp-seed1": fail}))
    lines = listing(prepare(tmp_path / "sweep.yaml", tmp_path / "out")).splitlines()
    assert [line.split()[0] for line in lines] == ["finished", "again", "finished", "finished"]
    assert lines[1].split(maxsplit=1)[1] == (
        "megatron-fssdp train gpt_moe_tiny --moe-strategy fssdp --set training.save_checkpoints=false "
        f"--set training.seed=1 --iters 4 --out {tmp_path / 'out' / 'fssdp-seed1'}"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ("iterations: 4", "iterations: 5"),
            "run ep-seed1: .* holds a run with training.train_iters 4, wanted 5",
        ),
        (("gpt_moe_tiny", "gpt_moe_tinny"), "run ep-seed1: gpt_moe_tinny: no such file.* did you mean"),
        (("fssdp]", "fsdp]"), "run fsdp-seed1: .*did you mean 'fssdp'"),
        (
            ("settings: {", "settings: {training.lr: fast, "),
            "--set training.lr=fast: training.lr: got 'fast'",
        ),
        (
            ("settings: {", "settings: {parallelism.num_nodes: 2, training.global_batch_size: 32, "),
            "this command starts the ranks of one machine",
        ),
        (
            ("[ep, fssdp]", "[ep, {name: fssdp, settings: {record_dir: x}}]"),
            "strategy.settings.record_dir x: all runs of the sweep would write there",
        ),
    ],
)
def test_mistakes_are_found_before_the_first_run(sweep, change, message: str) -> None:
    sweep(Trainer())
    trainer = Trainer()
    with pytest.raises(ConfigurationError, match=message) as caught:
        sweep(trainer, (SWEEP % "false").replace(*change))
    assert trainer.asked == []
    assert "\n" not in str(caught.value)


def test_two_sweeps_in_one_folder_exclude_each_other(sweep, tmp_path: Path) -> None:
    code = "import pathlib, sys, time; from megatron_fssdp.config import run_lock\n"
    code += "run_lock.hold(pathlib.Path(sys.argv[1]), ''); print('held', flush=True); time.sleep(120)"
    words = [sys.executable, "-c", code, str(tmp_path / "out")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ConfigurationError, match="a run is in progress here"):
            sweep(Trainer())
        other.kill()


@pytest.mark.slow
def test_a_small_sweep_really_runs_and_continues(tmp_path: Path) -> None:
    """Two strategies on two ranks; the second start finds all runs finished."""
    small = (
        "data.tokenizer: bytes, data.vocab_size: 257, parallelism.nproc_per_node: 2, "
        "parallelism.expert_model_parallel_size: 2"
    )
    text = (SWEEP % "false").replace("settings: {", f"settings: {{{small}, ").replace("[1, 2]", "[1]")
    (tmp_path / "tiny.yaml").write_text(text)
    environment = {**os.environ, "MEGATRON_FSSDP_DEVICE": "cpu", "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "megatron_fssdp.cli.app", "sweep", "tiny.yaml"]

    def start() -> str:
        done = subprocess.run(
            words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280, check=False
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    output = start()
    assert len(re.findall("done: 4 iterations", output)) == 2
    results = json.loads((tmp_path / "runs" / "tiny" / RESULTS_FILE).read_text())
    assert results["groups"][1]["loss_difference"] < 1e-5
    assert "starting" not in start()
