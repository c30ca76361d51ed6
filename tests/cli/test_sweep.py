import json
import re
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from megatron_fssdp.cli import sweep_runs
from megatron_fssdp.cli.sweep_runs import PAGE_FILE, RESULTS_FILE, Sweep
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.launch.train_request import TrainRequest

from ..report.made_runs import write_made_run
from ..report.page_parts import PageParts
from ..support.python_process import ROOT, python_output

SWEEP = """
run: [gpt_moe_tiny]
strategies: [ep, fssdp]
seeds: [1, 2]
iterations: 4
settings: {training.save_checkpoints: false}
"""
SAVING = SWEEP.replace("false", "true")

Outcome = Callable[[TrainRequest], int]


def ends(iterations: int, code: int, *, saved: int = 0, log: str = "") -> Outcome:
    """A stand-in for `train` that leaves these iterations, this checkpoint and this log."""

    def train(request: TrainRequest) -> int:
        config, folder = request.resolve(), request.folder
        folder.check(config.training, request.resume, request.overwrite)
        if request.overwrite:
            folder.move_aside()
        write_made_run(
            folder.path, config.strategy.name, num_iterations=iterations, seed=config.training.seed
        )
        folder.create(config, request.changed_settings())
        if saved and config.training.save_checkpoints:
            folder.checkpoints.mkdir(exist_ok=True)
            (folder.checkpoints / "latest_checkpointed_iteration.txt").write_text(str(saved))
        if log:
            folder.log.write_text(log)
        return code

    return train


WHOLE = ends(4, 0, saved=4)
FAILED = ends(2, 1, log="[default1]:ValueError: out of luck\n")


class Sweeping:
    """Runs the sweep of a folder; `asked` has the runs of the last start with `resume` and `overwrite`."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.out, self.patch = folder, folder / "out", patch

    def planned(self, text: str = SWEEP, console: Console | None = None, **outcomes: Outcome) -> Sweep:
        self.asked: list[tuple[str, bool, bool]] = []

        def train(request: TrainRequest, console: Console) -> int:
            name = request.folder.path.name
            self.asked.append((name, request.resume, request.overwrite))
            return outcomes.get(name.replace("-", "_"), WHOLE)(request)

        (self.folder / "sweep.yaml").write_text(text)
        self.patch.setattr(sweep_runs, "train", train)
        return Sweep(self.folder / "sweep.yaml", self.out, console or Console())

    def __call__(self, text: str = SWEEP, **outcomes: Outcome) -> tuple[int, str]:
        output = StringIO()
        code = self.planned(text, Console(file=output, width=200), **outcomes).run()
        return code, output.getvalue()

    def results(self) -> dict:
        return json.loads((self.out / RESULTS_FILE).read_text())


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sweeping:
    return Sweeping(tmp_path, monkeypatch)


def test_every_run_is_trained_and_compared_and_not_repeated(sweep: Sweeping) -> None:
    code, output = sweep()
    assert code == 0
    names = ["ep-seed1", "fssdp-seed1", "ep-seed2", "fssdp-seed2"]
    assert sweep.asked == [(name, False, False) for name in names]
    assert "run 4 of 4: fssdp-seed2 (all runs: about" in output
    page = PageParts((sweep.out / PAGE_FILE).read_text())
    assert page.anchors[0] == "repeated-runs"
    found = [(group["name"], group["runs"]) for group in sweep.results()["groups"]]
    assert found == [("ep", 2), ("fssdp", 2)]
    assert {run["state"] for run in sweep.results()["runs"]} == {"finished"}

    code, output = sweep()
    assert (code, sweep.asked) == (0, [])
    assert "4 of 4 runs are finished already" in output
    assert "median (quartiles)" in output
    sweep(SWEEP.replace("[1, 2]", "[1, 2, 3]"))
    assert [name for name, *_ in sweep.asked] == ["ep-seed3", "fssdp-seed3"]


def test_a_failing_run_is_named_and_run_again_by_the_same_command(sweep: Sweeping) -> None:
    code, output = sweep(fssdp_seed1=FAILED)
    assert code == 1
    log = sweep.out / "fssdp-seed1" / "log.txt"
    assert f"failed: fssdp-seed1: rank 1: ValueError: out of luck; all output: {log}" in output
    assert "3 of 4 runs are finished, 1 failed; the same command runs them again" in output
    assert "Missing" in PageParts((sweep.out / PAGE_FILE).read_text()).texts["repeated-runs"]
    lines = sweep.planned().listing().splitlines()
    assert [line.split()[0] for line in lines] == ["finished", "again", "finished", "finished"]
    assert lines[1].split(maxsplit=1)[1] == (
        "megatron-fssdp train gpt_moe_tiny --moe-strategy fssdp --set training.save_checkpoints=false "
        f"--set training.seed=1 --iters 4 --out {sweep.out / 'fssdp-seed1'}"
    )
    assert sweep()[0] == 0
    assert sweep.asked == [("fssdp-seed1", False, True)]


def test_an_exit_before_the_last_iteration_is_a_failure(sweep: Sweeping) -> None:
    code, output = sweep(ep_seed1=ends(3, 0))
    assert code == 1
    assert "failed: ep-seed1: the ranks ended before the last iteration" in output


@pytest.mark.parametrize(("saved", "wanted"), [(0, (False, True)), (2, (True, False))])
def test_an_interrupted_sweep_is_continued(sweep: Sweeping, saved: int, wanted: tuple[bool, bool]) -> None:
    code, output = sweep(SAVING, fssdp_seed1=ends(3, 143, saved=saved))
    assert code == 143
    assert "interrupted; 1 of 4 runs are finished; the same command continues the sweep" in output
    assert not (sweep.out / PAGE_FILE).exists()
    states = [run["state"] for run in sweep.results()["runs"]]
    assert states == ["finished", "continue" if saved else "again", "new", "new"]
    assert sweep(SAVING)[0] == 0
    assert sweep.asked[0] == ("fssdp-seed1", *wanted)
    assert len(sweep.asked) == 3


def test_ctrl_c_between_runs_ends_the_sweep_in_order(sweep: Sweeping) -> None:
    def interrupt(request: TrainRequest) -> int:
        raise KeyboardInterrupt

    code, output = sweep(fssdp_seed1=interrupt)
    assert code == 130
    assert "interrupted; 1 of 4 runs are finished" in output


def test_records_that_are_damaged_or_lack_the_last_checkpoint_are_not_finished(sweep: Sweeping) -> None:
    sweep(SAVING)
    (sweep.out / "ep-seed1" / "metrics.jsonl").write_text('{"iteration": 1, "lm')
    (sweep.out / "ep-seed2" / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("2")
    (sweep.out / "fssdp-seed2" / "config.yaml").unlink()
    sweep(SAVING)
    wanted = [("ep-seed1", False, True), ("ep-seed2", True, False), ("fssdp-seed2", False, True)]
    assert sweep.asked == wanted


# What replaces a part of the sweep, and what is said about it.
MISTAKES = [
    ("iterations: 4", "iterations: 5", "run ep-seed1: .*train_iters is 5, but .* was started with 4"),
    ("gpt_moe_tiny", "gpt_moe_tinny", "run ep-seed1: gpt_moe_tinny: no such file.* did you mean"),
    ("fssdp]", "fsdp]", "run fsdp-seed1: .*did you mean 'fssdp'"),
    ("settings: {", "settings: {training.lr: fast, ", "training.lr: got 'fast'"),
    (
        "settings: {",
        "settings: {parallelism.num_nodes: 2, training.global_batch_size: 32, ",
        "this command starts the ranks of one machine; use --dry-run",
    ),
    (
        "[ep, fssdp]",
        "[ep, {name: fssdp, settings: {record_dir: x}}]",
        "strategy.settings.record_dir x: all runs of the sweep would write there",
    ),
]


def test_mistakes_are_found_before_the_first_run(sweep: Sweeping) -> None:
    sweep()
    for old, new, message in MISTAKES:
        with pytest.raises(ConfigurationError, match=message) as caught:
            sweep(SWEEP.replace(old, new))
        assert sweep.asked == []
        assert "\n" not in str(caught.value)


def test_two_sweeps_in_one_folder_exclude_each_other(sweep: Sweeping, held: Callable) -> None:
    with held(sweep.out), pytest.raises(ConfigurationError, match="a run is in progress here"):
        sweep()


@pytest.mark.slow
def test_a_small_sweep_really_runs_and_continues(tmp_path: Path) -> None:
    """Two strategies on two ranks; the second start finds all runs finished."""
    small = (
        "data.tokenizer: bytes, data.vocab_size: 257, parallelism.nproc_per_node: 2, "
        "parallelism.expert_model_parallel_size: 2"
    )
    text = SWEEP.replace("settings: {", f"settings: {{{small}, ").replace("[1, 2]", "[1]")
    (tmp_path / "tiny.yaml").write_text(text)
    environment = {"MEGATRON_FSSDP_DEVICE": "cpu", "PYTHONPATH": str(ROOT)}

    def start() -> str:
        words = ("-m", "megatron_fssdp.cli.app", "sweep", "tiny.yaml")
        return python_output(*words, cwd=tmp_path, **environment)

    output = start()
    assert len(re.findall("done: 4 iterations", output)) == 2
    results = json.loads((tmp_path / "runs" / "tiny" / RESULTS_FILE).read_text())
    assert results["groups"][1]["loss_difference"] < 1e-5
    assert "starting" not in start()
