"""Runs a sweep: plans its runs, trains those that are not finished, and compares all on one page."""

import json
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from rich.console import Console

from megatron_fssdp.cli.analysis.what_if import cost_on_a_cluster
from megatron_fssdp.cli.data_command import build_default_corpus
from megatron_fssdp.config import run_lock
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.run.run_config import RunConfig
from megatron_fssdp.config.sweep.planned_runs import PlannedRun, planned_runs
from megatron_fssdp.config.sweep.sweep_config import load_sweep
from megatron_fssdp.config.written_files import refuse_non_folder, written_file
from megatron_fssdp.launch.failure_report import failure_reason
from megatron_fssdp.launch.rank_processes import exit_code_after
from megatron_fssdp.launch.run_folder import RunFolder
from megatron_fssdp.launch.run_state import RunState, state_of
from megatron_fssdp.launch.train_request import TrainRequest
from megatron_fssdp.launch.training import check_startable, train
from megatron_fssdp.records.recorded_run import RecordedRun, load
from megatron_fssdp.report.tables import terminal_table
from megatron_fssdp.report.trainings.repeated_runs import (
    RunGroup,
    detailed_runs,
    group_records,
    group_table,
    sweep_page,
)

PAGE_FILE, RESULTS_FILE = "sweep.html", "sweep.json"

Start = Callable[[TrainRequest, Console], int]
"""Trains one run: takes its options and the console, and returns the exit code."""

_INTERRUPTED = (130, 143)
"""Exit codes of a training that Ctrl-C or SIGTERM ended."""


@dataclass
class Sweep:
    """The runs of a sweep, and what became of them in this start."""

    name: str
    folder: Path  # of all runs
    requests: dict[PlannedRun, TrainRequest] = field(default_factory=dict)
    failures: dict[PlannedRun, str] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)  # of each run

    def states(self) -> dict[PlannedRun, RunState]:
        """Return how far each run is, from what is in its folder."""
        return {run: state_of(request) for run, request in self.requests.items()}


def prepare(file: Path, out: Path | None = None) -> Sweep:
    """Read a sweep and check every run of it, before any run starts.

    Raises:
        ConfigurationError: The sweep or a run is invalid, or a folder holds a run with other settings.
    """
    folder = out or Path("runs") / file.stem
    refuse_non_folder(folder, "--out")
    if taken := RunFolder(folder).taken():
        raise ConfigurationError(
            f"--out {folder}: holds a single run ({', '.join(taken)}), wanted a folder for all; give "
            f"another one"
        )
    config, sweep = load_sweep(file), Sweep(file.stem, folder)
    for run in planned_runs(config):
        request = TrainRequest(
            config_paths=[Path(name) for name in config.run],
            strategy=run.strategy,
            strategy_overrides=run.strategy_overrides,
            overrides=run.overrides,
            iterations=config.iterations,
            out=folder / run.folder,
        )
        try:
            settings = request.resolve()
            check_startable(settings)
            _check_own_folder(settings)
            state_of(request)
        except ConfigurationError as error:
            raise ConfigurationError(f"{file}: run {run.folder}: {error}") from None
        sweep.requests[run] = request
    return sweep


def _check_own_folder(config: RunConfig) -> None:
    """Refuse settings that make several runs write to the same place."""
    for key, value in {
        "training.save": config.training.save,
        "training.tensorboard_dir": config.training.tensorboard_dir,
        "strategy.settings.record_dir": config.strategy.settings.get("record_dir"),
    }.items():
        if value is not None:
            raise ConfigurationError(
                f"{key} {value}: all runs of the sweep would write there; remove it, each run has its own"
            )


def listing(sweep: Sweep) -> str:
    """Return one line for each run of a sweep: its state, and the command that trains it alone."""
    states = sweep.states().items()
    return "\n".join(f"{state:<9} {shlex.join(sweep.requests[run].words())}" for run, state in states)


def _train(request: TrainRequest, console: Console) -> int:
    return train(request, console, build_default_corpus)


def run_sweep(sweep: Sweep, console: Console, start: Start = _train) -> int:
    """Run all runs of a sweep that are not finished, and write the page that compares all.

    Returns:
        0, or 1 if a run failed, or 130 after Ctrl-C, or 143 after SIGTERM. The same command continues.

    Raises:
        ConfigurationError: The folder cannot be written, or another process runs this sweep.
    """
    run_lock.hold(sweep.folder, "--out")
    try:
        try:
            interrupted = _run_all(sweep, console, start)
        except KeyboardInterrupt as interrupt:
            interrupted = exit_code_after(interrupt)
        states = sweep.states()
        groups = _groups(sweep, states)
        _write_results(sweep, states, groups)
        if groups and not interrupted:
            _write_page(sweep, states, groups, console)
    finally:
        run_lock.release(sweep.folder)
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
    except ConfigurationError as error:
        _say(console, f"error: {error}", style="red")
        sweep.failures[run] = str(error)
        return 0
    sweep.seconds.append(time.monotonic() - begin)
    if code != 0 and code not in _INTERRUPTED:
        reason = failure_reason(log, log_start) if log.exists() else f"exit code {code}"
        sweep.failures[run] = f"{reason}; all output: {log}"
    elif code == 0 and state_of(sweep.requests[run]) != "finished":
        sweep.failures[run] = f"the ranks ended before the last iteration; all output: {log}"
    return code


def _groups(sweep: Sweep, states: dict[PlannedRun, RunState]) -> list[RunGroup]:
    """Return the finished runs, those that differ only in seed and repetition together."""
    runs: dict[str, dict[tuple[int, int], RecordedRun]] = {}
    for run, state in states.items():
        if state == "finished":
            recorded = load(sweep.requests[run].folder.path)
            runs.setdefault(run.group, {})[run.seed, run.repetition] = recorded
    return [RunGroup(name, members) for name, members in runs.items()]


def _write_results(sweep: Sweep, states: dict[PlannedRun, RunState], groups: list[RunGroup]) -> None:
    """Write the state of every run and the figures of every group as JSON."""
    runs = [
        {
            **{name: getattr(run, name) for name in ("folder", "group", "seed", "repetition")},
            "state": "failed" if run in sweep.failures else state,
        }
        for run, state in states.items()
    ]
    records = {"sweep": sweep.name, "groups": group_records(groups), "runs": runs}
    with written_file(sweep.folder / RESULTS_FILE, "--out") as partial:
        partial.write_text(json.dumps(records, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_page(
    sweep: Sweep, states: dict[PlannedRun, RunState], groups: list[RunGroup], console: Console
) -> None:
    """Write the page of the finished runs and show their figures."""
    missing = [run.folder for run, state in states.items() if state != "finished"]
    page = sweep.folder / PAGE_FILE
    with console.status("writing the page"):
        details = detailed_runs(groups)
        what_if = cost_on_a_cluster(details)
        sweep_page(f"sweep {sweep.name}", groups, details, missing, what_if).write(page)
    console.print(terminal_table(group_table(groups), "median (quartiles) of repeated runs"))
    _say(console, f"wrote {page}; open it in a browser (it works without a network)")


def _say(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, style=style, highlight=False, soft_wrap=True)
