"""A recorded run on a page: its name, its colour, and how far it is."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_fssdp.records.metrics import METRICS_FILE
from megatron_fssdp.records.recorded_run import RecordedRun, load
from megatron_fssdp.report.colours import distinct_colours

_STILL_RUNNING_S = 120.0  # a run with a younger record still trains: most iterations take less time


@dataclass(frozen=True, eq=False)
class ShownRun:
    """A recorded run on a page."""

    name: str
    colour: str  # of its lines and bars, #RRGGBB
    run: RecordedRun


def shown_runs(paths: Sequence[Path]) -> list[ShownRun]:
    """Read runs for one page, or raise a ConfigurationError.

    Their names are strategies, folders' names or paths: the first of these that differ.
    """
    runs = [load(path) for path in paths]
    strategies = [run.strategy for run in runs]
    choices = (strategies, [path.resolve().name for path in paths], [str(path) for path in paths])
    names = next((choice for choice in choices if len(set(choice)) == len(runs)), choices[-1])
    return [ShownRun(*fields) for fields in zip(names, distinct_colours(strategies), runs, strict=True)]


def progress_of(run: RecordedRun) -> str:
    """Return how much of a run is recorded, such as ``5 of 400 iterations, interrupted``."""
    first, last, count = int(run.iterations[0]), int(run.iterations[-1]), len(run.iterations)
    asked = run.asked_iterations
    words = counted(count, "iteration")
    if asked is not None and last < asked:
        age_s = time.time() - (run.path / METRICS_FILE).stat().st_mtime
        is_stopped = any(stop.startswith(f"{last}:") for stop in run.stops)
        state = "so far" if age_s < _STILL_RUNNING_S and not is_stopped else "interrupted"
        words = f"{count:,} of {asked - first + 1:,} iterations, {state}"
    if first > 1:
        words += f", from iteration {first:,} on"
    if missing := last - first + 1 - count:
        words += f", {missing:,} missing between them"
    return words


def counted(number: int, noun: str) -> str:
    """Return a number of things as text, such as ``2 layers``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def not_comparable(runs: Sequence[ShownRun]) -> str:
    """Return a clause on why the speed of runs must not be compared. Empty if it may be."""
    records = [record for shown in runs for record in shown.run.metrics]
    sessions = [record.session for record in records if record.session is not None]
    shared = next((session.shared_cores for session in sessions if session.shared_cores), "")
    return f"speed is not comparable here: {shared}" if shared else ""
