"""Groups of runs that differ only in seed and repetition, and the spread of their figures."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_fssdp.records.recorded_run import RecordedRun
from megatron_fssdp.records.run_settings import loss_obstacle
from megatron_fssdp.report.tables import Table
from megatron_fssdp.report.trainings.measures import SPEED, largest_difference, speed_of
from megatron_fssdp.report.trainings.shown_run import not_comparable

Repeat = tuple[int, int]
"""Seed and repetition of a run."""


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of a figure over repeated runs.

    Attributes:
        values: The figure of each run, at least one.
    """

    values: tuple[float, ...]

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """Lower quartile, median and upper quartile, interpolated linearly."""
        low, median, high = np.quantile(self.values, (0.25, 0.5, 0.75))
        return float(low), float(median), float(high)

    def text(self, form: str) -> str:
        """Return the median with its quartiles, or the value of a single run; ``form`` such as ``.3f``."""
        low, median, high = self.quartiles
        return f"{median:{form}}" + (f" ({low:{form}} to {high:{form}})" if len(self.values) > 1 else "")

    def overlaps(self, other: "Spread") -> bool:
        """Whether the ranges between the quartiles of two figures have a common value."""
        (low, _, high), (other_low, _, other_high) = self.quartiles, other.quartiles
        return low <= other_high and other_low <= high


@dataclass(frozen=True)
class RepeatedFigure:
    """A figure that every run of a sweep has.

    Attributes:
        key: Name in JSON.
        label: Name with unit, in tables and pictures.
        form: Format of a number.
        of: The figure of one run, or None if the run did not record it.
    """

    key: str
    label: str
    form: str
    of: Callable[[RecordedRun], float | None]


LOADS = RepeatedFigure(
    "load_max_over_mean",
    "max/mean device load",
    ".3f",
    lambda run: float(run.load_IL.mean()) if run.layers else None,
)
SPEEDS = RepeatedFigure(SPEED, "tokens/s", ",.0f", lambda run: speed_of(run)[1])
FIGURES = (
    RepeatedFigure("last_loss", "last loss", ".3f", lambda run: float(run.losses[-1])),
    LOADS,
    SPEEDS,
)


@dataclass(frozen=True, eq=False)
class RunGroup:
    """Runs with the same settings.

    Attributes:
        name: Name of the group: the strategy's label and the settings that the sweep varies.
        runs: At least one finished run, by seed and repetition.
    """

    name: str
    runs: Mapping[Repeat, RecordedRun]

    @property
    def first(self) -> RecordedRun:
        """The run with the lowest repetition and seed."""
        return self.runs[min(self.runs, key=lambda repeat: (repeat[1], repeat[0]))]

    def spread(self, figure: RepeatedFigure) -> Spread | None:
        """Return the spread of a figure, or None if no run recorded it."""
        values = [value for run in self.runs.values() if (value := figure.of(run)) is not None]
        return Spread(tuple(values)) if values else None

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
    hidden = {SPEEDS.key: "not comparable"} if speed_obstacle(groups) else {}
    rows = []
    for group in groups:
        spreads = [(group.spread(figure), figure) for figure in FIGURES]
        cells = [
            hidden.get(figure.key) or ("–" if spread is None else spread.text(figure.form))
            for spread, figure in spreads
        ]
        difference = None if group is groups[0] else group.loss_difference(groups[0])
        rows.append(
            (group.name, str(len(group.runs)), *cells, "–" if difference is None else f"{difference:.1e}")
        )
    labels = (figure.label for figure in FIGURES)
    return Table(("group", "runs", *labels, "loss: difference from the first group"), tuple(rows))


def group_records(groups: Sequence[RunGroup]) -> list[dict[str, Any]]:
    """Return the figures of groups as plain values for JSON. Losses are compared with the first group's."""
    return [
        {
            "name": group.name,
            "runs": len(group.runs),
            **{figure.key: _record(group.spread(figure)) for figure in FIGURES},
            "loss_difference": group.loss_difference(groups[0]),
        }
        for group in groups
    ]


def _record(spread: Spread | None) -> dict[str, Any] | None:
    if spread is None:
        return None
    low, median, high = spread.quartiles
    return {"lower_quartile": low, "median": median, "upper_quartile": high, "runs": list(spread.values)}
