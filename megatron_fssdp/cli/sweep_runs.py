"""Runs a sweep: plans its runs, trains those that are not finished, and compares all on one page."""

import json
import shlex
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

from rich.console import Console

from megatron_fssdp.cli.analysis.what_if import what_if
from megatron_fssdp.cli.sweep_plan import PlannedRun, load_sweep, planned_runs
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.files import run_lock
from megatron_fssdp.files.written_files import refuse_non_folder, refuse_unwritable, written_file
from megatron_fssdp.launch.rank_processes import exit_code_after, failure_reason
from megatron_fssdp.launch.run_folder import RunFolder, RunState
from megatron_fssdp.launch.train_request import TrainRequest
from megatron_fssdp.launch.training import INTERRUPTIONS, check_startable, train
from megatron_fssdp.records.recorded_run import RecordedRun, load
from megatron_fssdp.records.run_settings import flat_settings
from megatron_fssdp.report.tables import terminal_table
from megatron_fssdp.report.trainings.shown_run import shown_groups
from megatron_fssdp.report.trainings.sweep_page import MOST_DETAILED, group_records, group_table, sweep_page

PAGE_FILE, RESULTS_FILE = "sweep.html", "sweep.json"


class Sweep:
    """The runs that a sweep's YAML describes, below one folder. Every run is checked before any run starts.

    Raises:
        ConfigurationError: The sweep or a run is invalid, or a folder holds a run with other settings.
    """

    def __init__(self, file: Path, folder: Path, console: Console) -> None:
        refuse_non_folder(folder, "--out")
        if taken := RunFolder(folder).taken():
            holds = f"holds a single run ({', '.join(taken)})"
            raise ConfigurationError(f"--out {folder}: {holds}, wanted a folder for all; give another one")
        self._name, self._folder, self._console = file.stem, folder, console
        self._requests: dict[PlannedRun, TrainRequest] = {}
        self._failures: dict[PlannedRun, str] = {}
        config = load_sweep(file)
        for run in planned_runs(config):
            request = self._requests[run] = TrainRequest(
                config_paths=[Path(name) for name in config.run],
                strategy=run.strategy,
                strategy_overrides=run.strategy_overrides,
                overrides=run.overrides,
                iterations=config.iterations,
                out=folder / run.folder,
            )
            try:
                _check(request)
            except ConfigurationError as error:
                raise ConfigurationError(f"{file}: run {run.folder}: {error}") from None

    def listing(self) -> str:
        """Return one line for each run: its state, and the command that trains it alone."""
        states = self._states().items()
        return "\n".join(f"{state:<9} {shlex.join(self._requests[run].words())}" for run, state in states)

    def run(self) -> int:
        """Run all runs that are not finished, and write the page that compares all.

        Returns:
            0, or 1 if a run failed, or 130 after Ctrl-C, or 143 after SIGTERM. The same command continues.
        """
        refuse_unwritable(self._folder, "--out")
        run_lock.hold(self._folder, "--out")
        try:
            code = self._run_all()
            states = self._states()
            self._write_results(states, with_page=not code)
        finally:
            run_lock.release(self._folder)
        for run, reason in self._failures.items():
            self._console.print(f"failed: {run.folder}: {reason}", style="red")
        finished = f"{list(states.values()).count('finished')} of {len(states)} runs are finished"
        if code:
            self._console.print(f"interrupted; {finished}; the same command continues the sweep")
        elif self._failures:
            failed = f"{len(self._failures)} failed"
            self._console.print(f"{finished}, {failed}; the same command runs them again")
        return code or int(bool(self._failures))

    def _states(self) -> dict[PlannedRun, RunState]:
        return {run: request.state() for run, request in self._requests.items()}

    def _run_all(self) -> int:
        """Run what is not finished, and note failures. Return 0, or the exit code of an interrupted run."""
        states, seconds = self._states(), list[float]()
        pending = [run for run, state in states.items() if state != "finished"]
        if done := len(states) - len(pending):
            self._console.print(f"{self._folder}: {done} of {len(states)} runs are finished already")
        for number, run in enumerate(pending, start=done + 1):
            left = ""
            if seconds:
                left_s = round(median(seconds) * (len(states) - number + 1))
                left = " (all runs: about {}:{:02d} left)".format(*divmod(left_s, 60))
            self._console.print(f"run {number} of {len(states)}: {run.folder}{left}", style="bold")
            begin = time.monotonic()
            try:
                code = self._run_one(run, states[run])
            except ConfigurationError as error:
                self._console.print(f"error: {error}", style="red")
                code, self._failures[run] = 2, str(error)
            except KeyboardInterrupt as interrupt:
                code = exit_code_after(interrupt)
            seconds.append(time.monotonic() - begin)
            if code in INTERRUPTIONS:
                return code
        return 0

    def _run_one(self, run: PlannedRun, state: RunState) -> int:
        """Train a run; note why it failed, and return its exit code."""
        request = self._requests[run]
        log = request.folder.log
        log_start = log.stat().st_size if state == "continue" and log.exists() else 0
        resumed = replace(request, resume=state == "continue", overwrite=state == "again")
        code = train(resumed, self._console)
        if code not in INTERRUPTIONS and (code or request.state() != "finished"):
            reason = "the ranks ended before the last iteration"
            if code:
                reason = failure_reason(log, log_start) if log.exists() else f"exit code {code}"
            self._failures[run] = f"{reason}; all output: {log}"
        return code

    def _write_results(self, states: dict[PlannedRun, RunState], *, with_page: bool) -> None:
        """Write states and figures as JSON, and the page of the finished runs; show their figures.

        Runs that differ only in seed and repetition are a group.
        """
        members: dict[str, dict[tuple[int, int], RecordedRun]] = {}
        runs = []
        for run, state in states.items():
            if state == "finished":
                recorded = load(self._requests[run].folder.path)
                members.setdefault(run.group, {})[run.seed, run.repetition] = recorded
            about = {name: getattr(run, name) for name in ("folder", "group", "seed", "repetition")}
            runs.append({**about, "state": "failed" if run in self._failures else state})
        groups = shown_groups(members)
        records = {"sweep": self._name, "groups": group_records(groups), "runs": runs}
        with written_file(self._folder / RESULTS_FILE, "--out") as partial:
            partial.write_text(json.dumps(records, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        if not groups or not with_page:
            return
        missing = [run.folder for run, state in states.items() if state != "finished"]
        page = self._folder / PAGE_FILE
        with self._console.status("writing the page"):
            simulated = what_if(groups[:MOST_DETAILED])
            sweep_page(f"sweep {self._name}", groups, missing, simulated).write(page)
        self._console.print(terminal_table(group_table(groups), "median (quartiles) of repeated runs"))
        self._console.print(f"wrote {page}; open it in a browser (it works without a network)")


def _check(request: TrainRequest) -> None:
    """Refuse a run that cannot start, that several runs would write over, or that has other settings."""
    config = request.resolve()
    check_startable(config)
    settings = flat_settings(config.model_dump(mode="json"))
    for key in ("training.save", "training.tensorboard_dir", "strategy.settings.record_dir"):
        if (value := settings.get(key)) is not None:
            raise ConfigurationError(
                f"{key} {value}: all runs of the sweep would write there; remove it, each run has its own"
            )
    request.state()
