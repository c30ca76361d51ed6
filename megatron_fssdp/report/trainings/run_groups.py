"""Groups of runs that differ only in seed and repetition, and the spread of their figures."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from megatron_fssdp.records.recorded_run import RecordedRun
from megatron_fssdp.records.run_settings import loss_obstacle
from megatron_fssdp.report.tables import Table
from megatron_fssdp.report.trainings.measures import largest_difference, speed_of
from megatron_fssdp.report.trainings.shown_run import not_comparable


class RepeatedFigure(NamedTuple):
    """A figure that every run of a sweep has: name in JSON, label, format of a number, and how to get it."""

    key: str
    label: str
    form: str
    of: Callable[[RecordedRun], float]


LOADS = RepeatedFigure(
    "load_max_over_mean",
    "max/mean device load",
    ".3f",
    lambda run: float(run.load_IL.mean()) if run.layers else np.nan,
)
SPEEDS = RepeatedFigure("tokens_per_s", "tokens/s", ",.0f", lambda run: speed_of(run)[1])
FIGURES = (RepeatedFigure("last_loss", "last loss", ".3f", lambda run: float(run.losses[-1])), LOADS, SPEEDS)


class Spread(NamedTuple):
    """Lower quartile, median and upper quartile of a figure over repeated runs, interpolated linearly."""

    low: float
    median: float
    high: float

    def overlaps(self, other: "Spread") -> bool:
        """Whether the ranges between the quartiles of two figures have a common value."""
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True, eq=False)
class RunGroup:
    """Runs with the same settings.

    Attributes:
        name: Name of the group: the strategy's label and the settings that the sweep varies.
        runs: At least one finished run, by seed and repetition.
    """

    name: str
    runs: Mapping[tuple[int, int], RecordedRun]

    @property
    def first(self) -> RecordedRun:
        """The run with the lowest repetition and seed."""
        return self.runs[min(self.runs, key=lambda repeat: (repeat[1], repeat[0]))]

    def values(self, figure: RepeatedFigure) -> list[float]:
        """Return a figure of the runs that recorded it."""
        return [value for run in self.runs.values() if not np.isnan(value := figure.of(run))]

    def spread(self, figure: RepeatedFigure) -> Spread | None:
        """Return the spread of a figure, or None if no run recorded it."""
        values = self.values(figure)
        return Spread(*map(float, np.quantile(values, (0.25, 0.5, 0.75)))) if values else None

    def loss_difference(self, other: "RunGroup") -> float | None:
        """Return the largest relative difference of a loss from that of the same seed in another group.

        It is None if the groups have no common seed and repetition, or train different things.
        """
        common = [repeat for repeat in self.runs if repeat in other.runs]
        if not common or loss_obstacle([one.runs[common[0]].settings for one in (other, self)]):
            return None
        found = [largest_difference(other.runs[repeat], self.runs[repeat]) for repeat in common]
        return max((one for one in found if one is not None), default=None)


def speed_obstacle(groups: Sequence[RunGroup]) -> str:
    """Return a clause on why the speed of groups must not be compared. Empty if it may be."""
    return not_comparable([run for group in groups for run in group.runs.values()])


def group_table(groups: Sequence[RunGroup]) -> Table:
    """Return the figures of groups. Losses are compared with those of the first."""
    rows = []
    for group in groups:
        difference = None if group is groups[0] else group.loss_difference(groups[0])
        cells = [_cell(group, figure, speed_obstacle(groups)) for figure in FIGURES]
        last = "–" if difference is None else f"{difference:.1e}"
        rows.append((group.name, str(len(group.runs)), *cells, last))
    labels = (figure.label for figure in FIGURES)
    return Table(("group", "runs", *labels, "loss: difference from the first group"), tuple(rows))


def _cell(group: RunGroup, figure: RepeatedFigure, obstacle: str) -> str:
    spread = group.spread(figure)
    if figure is SPEEDS and obstacle:
        return "not comparable"
    if spread is None:
        return "–"
    low, median, high = (f"{value:{figure.form}}" for value in spread)
    return f"{median} ({low} to {high})" if len(group.runs) > 1 else median


def group_records(groups: Sequence[RunGroup]) -> list[dict[str, Any]]:
    """Return the figures of groups as plain values for JSON. Losses are compared with the first group's."""
    return [
        {
            "name": group.name,
            "runs": len(group.runs),
            **{figure.key: _record(group, figure) for figure in FIGURES},
            "loss_difference": group.loss_difference(groups[0]),
        }
        for group in groups
    ]


def _record(group: RunGroup, figure: RepeatedFigure) -> dict[str, Any] | None:
    spread = group.spread(figure)
    if spread is None:
        return None
    names = ("lower_quartile", "median", "upper_quartile")
    return {**dict(zip(names, spread, strict=True)), "runs": group.values(figure)}
