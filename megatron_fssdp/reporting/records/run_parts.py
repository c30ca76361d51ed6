"""The parts of a run: one for each start of its training. A run that was never resumed has one part."""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_fssdp.reporting.records.recorded_run import RecordedRun
from megatron_fssdp.reporting.records.run_records import METRICS_FILE, IterationMetrics

STILL_RUNNING_S = 120.0
"""A run whose last record is younger counts as still training: most iterations take less than two minutes."""


@dataclass(frozen=True)
class RunPart:
    """Consecutive iterations that one start of the training ran.

    Attributes:
        strategy: Name of the strategy.
        records: Metrics of at least one iteration, in order.
    """

    strategy: str
    records: tuple[IterationMetrics, ...]

    @property
    def first(self) -> int:
        """Number of the first iteration."""
        return self.records[0].iteration

    @property
    def last(self) -> int:
        """Number of the last iteration."""
        return self.records[-1].iteration


def parts_of(run: RecordedRun) -> list[RunPart]:
    """Return the parts of a run in order. A run that does not record its starts has one part."""
    starts = [i for i, record in enumerate(run.metrics) if record.session is not None]
    borders = [0, *(i for i in starts if i > 0), len(run.metrics)]
    parts = []
    for begin, end in itertools.pairwise(borders):
        session = run.metrics[begin].session
        strategy = run.strategy if session is None else session.strategy
        parts.append(RunPart(strategy, run.metrics[begin:end]))
    return parts


def progress_of(run: RecordedRun) -> str:
    """Return how much of a run is recorded, such as ``5 of 400 iterations, interrupted``."""
    first, last, count = int(run.iterations[0]), int(run.iterations[-1]), len(run.iterations)
    asked = run.asked_iterations
    words = f"{count:,} iteration{'s' if count > 1 else ''}"
    if asked is not None and last < asked:
        age_s = time.time() - (run.path / METRICS_FILE).stat().st_mtime
        state = "so far" if age_s < STILL_RUNNING_S else "interrupted"
        words = f"{count:,} of {asked - first + 1:,} iterations, {state}"
    if first > 1:
        words += f", from iteration {first:,} on"
    if missing := last - first + 1 - count:
        words += f", {missing:,} missing between them"
    return words


def speed_of(records: tuple[IterationMetrics, ...]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile of tokens per second."""
    low, median, high = np.quantile([record.tokens_per_s for record in records], (0.25, 0.5, 0.75))
    return float(low), float(median), float(high)


def not_comparable(runs: Sequence[RecordedRun]) -> str:
    """Return a sentence on why the speed of runs must not be compared. Empty if it may be."""
    shared = next((run.shared_cores for run in runs if run.shared_cores), "")
    return f"speed is not comparable here: {shared}" if shared else ""


def speed_text(records: tuple[IterationMetrics, ...]) -> str:
    """Return the median of tokens per second with its quartiles as text."""
    low, median, high = speed_of(records)
    return f"{median:,.0f} ({low:,.0f} to {high:,.0f})"
