"""``megatron-fssdp sweep``: strategies × settings × seeds from one YAML, and one page that compares them."""

import fcntl
import json
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from rich.console import Console

from megatron_fssdp.cli.analysis.what_if import cost_on_a_cluster
from megatron_fssdp.cli.ranks.failure_report import failure_reason
from megatron_fssdp.cli.ranks.rank_processes import exit_code_after
from megatron_fssdp.cli.training.run_folder import RunFolder
from megatron_fssdp.cli.training.sweep_state import RunState, state_of
from megatron_fssdp.cli.training.train_command import check_startable, train
from megatron_fssdp.cli.training.train_request import TrainRequest
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.run.run_config import RunConfig
from megatron_fssdp.config.sweep.planned_runs import PlannedRun, planned_runs
from megatron_fssdp.config.sweep.sweep_config import load_sweep
from megatron_fssdp.config.written_files import cannot_write, refuse_non_folder, written_file
from megatron_fssdp.records.recorded_run import load
from megatron_fssdp.report.tables import terminal_table
from megatron_fssdp.report.trainings.run_groups import RunGroup, group_records, group_table
from megatron_fssdp.report.trainings.sweep_page import detailed_runs, sweep_page

PAGE_FILE, RESULTS_FILE, _LOCK_FILE = "sweep.html", "sweep.json", ".sweep.lock"

Start = Callable[[TrainRequest, Console], int]
"""Trains one run: takes its options and the console, and returns the exit code."""

_INTERRUPTED = (130, 143)
"""Exit codes of a training that Ctrl-C or SIGTERM ended."""


@dataclass(frozen=True)
class SweepRequest:
    """Options of ``megatron-fssdp sweep``.

    Attributes:
        file: YAML of the sweep.
        out: Folder of all runs and of the page, or None for a folder in ``runs/`` with the file's name.
    """

    file: Path
    out: Path | None = None

    @property
    def folder(self) -> Path:
        """Folder of all runs."""
        return self.out or Path("runs") / self.file.stem


@dataclass
class Sweep:
    """The runs of a sweep and what became of them.

    Attributes:
        name: Name of the sweep.
        folder: Folder of all runs.
        requests: Options of each run's training.
        failures: Reasons of failed runs.
        seconds: Durations of the runs of this start.
    """

    name: str
    folder: Path
    requests: dict[PlannedRun, TrainRequest]
    failures: dict[PlannedRun, str] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)

    def states(self) -> dict[PlannedRun, RunState]:
        """Return how far each run is, from what is in its folder."""
        return {run: state_of(request) for run, request in self.requests.items()}


def prepare(request: SweepRequest) -> Sweep:
    """Read a sweep and check every run of it, before any run starts.

    Raises:
        ConfigurationError: The sweep or a run is invalid, or a folder holds a run with other settings.
    """
    refuse_non_folder(request.folder, "--out")
    if taken := RunFolder(request.folder).taken():
        raise ConfigurationError(
            f"--out {request.folder}: holds a single run ({', '.join(taken)}), wanted a folder for all; give "
            "another one"
        )
    config = load_sweep(request.file)
    sweep = Sweep(request.file.stem, request.folder, {})
    for run in planned_runs(config):
        asked = TrainRequest(
            config_paths=[Path(name) for name in config.run],
            strategy=run.strategy,
            strategy_overrides=run.strategy_overrides,
            overrides=run.overrides,
            iterations=config.iterations,
            out=request.folder / run.folder,
        )
        try:
            settings = asked.resolve()
            check_startable(settings)
            _check_own_folder(settings)
            state_of(asked)
        except ConfigurationError as error:
            raise ConfigurationError(f"{request.file}: run {run.folder}: {error}") from None
        sweep.requests[run] = asked
    return sweep


def _check_own_folder(config: RunConfig) -> None:
    """Refuse settings that make several runs write to the same place."""
    shared = {
        "training.save": config.training.save,
        "training.tensorboard_dir": config.training.tensorboard_dir,
        "strategy.settings.record_dir": config.strategy.settings.get("record_dir"),
    }
    for key, value in shared.items():
        if value is not None:
            raise ConfigurationError(
                f"{key} {value}: all runs of the sweep would write there; remove it, each run has its own"
            )


def listing(sweep: Sweep) -> str:
    """Return one line for each run of a sweep: its state, and the command that trains it alone."""
    lines = [f"{state:<9} {shlex.join(sweep.requests[run].words())}" for run, state in sweep.states().items()]
    return "\n".join(lines)


def run_sweep(sweep: Sweep, console: Console, start: Start = train) -> int:
    """Run all runs of a sweep that are not finished, and write the page that compares all.

    Args:
        sweep: The sweep (:func:`prepare`).
        console: Console that shows the progress.
        start: Trains one run.

    Returns:
        0, or 1 if a run failed, or 130 after Ctrl-C, or 143 after SIGTERM. The same command continues.

    Raises:
        ConfigurationError: The folder cannot be written, or another process runs this sweep.
    """
    with _locked(sweep.folder):
        try:
            interrupted = _run_all(sweep, console, start)
        except KeyboardInterrupt as interrupt:
            interrupted = exit_code_after(interrupt)
        states = sweep.states()
        _write_results(sweep, states)
        if not interrupted:
            _write_page(sweep, states, console)
    for run, reason in sweep.failures.items():
        _say(console, f"failed: {run.folder}: {reason}", style="red")
    finished = f"{list(states.values()).count('finished')} of {len(states)} runs are finished"
    if interrupted:
        _say(console, f"interrupted; {finished}; the same command continues the sweep")
    elif sweep.failures:
        _say(console, f"{finished}, {len(sweep.failures)} failed; the same command runs them again")
    return interrupted or (1 if sweep.failures else 0)


def _run_all(sweep: Sweep, console: Console, start: Start) -> int:
    """Run what is not finished. Return 0, or the exit code of an interrupted training."""
    states = sweep.states()
    pending = [run for run, state in states.items() if state != "finished"]
    if done := len(states) - len(pending):
        _say(console, f"{sweep.folder}: {done} of {len(states)} runs are finished already")
    for number, run in enumerate(pending, start=done + 1):
        left = ""
        if sweep.seconds:
            minutes, seconds = divmod(round(median(sweep.seconds) * (len(states) - number + 1)), 60)
            left = f" (all runs: about {minutes}:{seconds:02d} left)"
        _say(console, f"run {number} of {len(states)}: {run.folder}{left}", style="bold")
        code = _run_one(sweep, run, states[run], console, start)
        if code in _INTERRUPTED:
            return code
    return 0


def _run_one(sweep: Sweep, run: PlannedRun, state: RunState, console: Console, start: Start) -> int:
    request = replace(sweep.requests[run], resume=state == "continue", overwrite=state == "again")
    log = request.folder.log
    log_start = log.stat().st_size if state == "continue" and log.exists() else 0
    begin = time.monotonic()
    try:
        code = start(request, console)
        if code in _INTERRUPTED:
            return code
        if code != 0:
            reason = failure_reason(log, log_start) if log.exists() else f"exit code {code}"
            sweep.failures[run] = f"{reason}; all output: {log}"
        elif state_of(sweep.requests[run]) != "finished":
            sweep.failures[run] = f"the ranks ended before the last iteration; all output: {log}"
    except ConfigurationError as error:
        _say(console, f"error: {error}", style="red")
        sweep.failures[run] = str(error)
        return 0
    sweep.seconds.append(time.monotonic() - begin)
    return code


def _write_results(sweep: Sweep, states: dict[PlannedRun, RunState]) -> None:
    """Write the state of every run and the figures of every group as JSON."""
    groups = _groups(sweep, states)
    records = {
        "sweep": sweep.name,
        "groups": group_records(groups),
        "runs": [
            {
                "folder": run.folder,
                "group": run.group,
                "seed": run.seed,
                "repetition": run.repetition,
                "state": "failed" if run in sweep.failures else state,
            }
            for run, state in states.items()
        ],
    }
    with written_file(sweep.folder / RESULTS_FILE, "--out") as partial:
        partial.write_text(json.dumps(records, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_page(sweep: Sweep, states: dict[PlannedRun, RunState], console: Console) -> None:
    """Write the page of the finished runs and show their figures; without a finished run, do nothing."""
    groups = _groups(sweep, states)
    if not groups:
        return
    missing = [run.folder for run, state in states.items() if state != "finished"]
    page = sweep.folder / PAGE_FILE
    with console.status("writing the page"):
        details = detailed_runs(groups)
        what_if = cost_on_a_cluster(details)
        sweep_page(f"sweep {sweep.name}", groups, details, missing, what_if).write(page)
    console.print(terminal_table(group_table(groups), "median (quartiles) of repeated runs"))
    _say(console, f"wrote {page}; open it in a browser (it works without a network)")


def _groups(sweep: Sweep, states: dict[PlannedRun, RunState]) -> list[RunGroup]:
    groups: dict[str, RunGroup] = {}
    for run, state in states.items():
        if state == "finished":
            known = groups.get(run.group, RunGroup(run.group, {}))
            recorded = load(sweep.requests[run].folder.path)
            groups[run.group] = RunGroup(run.group, {**known.runs, (run.seed, run.repetition): recorded})
    return list(groups.values())


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Create the folder, and keep other processes from running the same sweep."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / _LOCK_FILE).open("w")
    except OSError as error:
        raise cannot_write(folder, "--out", error) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigurationError(
                f"--out {folder}: another process runs a sweep here; wait for it, or give another folder"
            ) from None
        yield


def _say(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, style=style, highlight=False, soft_wrap=True)
