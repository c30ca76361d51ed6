"""Groups of runs that differ only in seed and repetition, and the spread of their figures."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from megatron_fssdp.reporting.records.recorded_run import RecordedRun, loss_differences
from megatron_fssdp.reporting.records.run_parts import not_comparable, speed_of
from megatron_fssdp.reporting.records.run_settings import loss_obstacle

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

    @property
    def median(self) -> float:
        """Median of the values."""
        return self.quartiles[1]

    def text(self, form: str) -> str:
        """Return the median with its quartiles, or the value of a single run.

        Args:
            form: Format of one number, for example ``.3f``.
        """
        low, median, high = self.quartiles
        return (
            f"{median:{form}} ({low:{form}} to {high:{form}})" if len(self.values) > 1 else f"{median:{form}}"
        )

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


LOSS = RepeatedFigure("last_loss", "last loss", ".3f", lambda run: float(run.losses[-1]))
LOAD = RepeatedFigure(
    "load_max_over_mean",
    "max/mean device load",
    ".3f",
    lambda run: float(run.load_IL.mean()) if run.layers else None,
)
SPEED = RepeatedFigure("tokens_per_s", "tokens/s", ",.0f", lambda run: speed_of(run.metrics)[1])
FIGURES = (LOSS, LOAD, SPEED)


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
        if not common or loss_obstacle([other.runs[common[0]], self.runs[common[0]]]):
            return None
        found = [loss_differences(other.runs[repeat], self.runs[repeat])[1] for repeat in common]
        return max((float(differences.max()) for differences in found if len(differences)), default=None)


def speed_obstacle(groups: Sequence[RunGroup]) -> str:
    """Return a sentence on why the speed of groups must not be compared. Empty if it may be."""
    return not_comparable([run for group in groups for run in group.runs.values()])


def group_table(groups: Sequence[RunGroup]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the figures of groups as text.

    Args:
        groups: Groups of the sweep. Losses are compared with those of the first.

    Returns:
        The names of the columns, and one row for each group.
    """
    header = ("group", "runs", *(figure.label for figure in FIGURES), "loss: difference from the first group")
    is_hidden = {SPEED.key: "not comparable"} if speed_obstacle(groups) else {}
    rows = []
    for group in groups:
        cells = [is_hidden.get(figure.key) or _text(group.spread(figure), figure) for figure in FIGURES]
        difference = None if group is groups[0] else group.loss_difference(groups[0])
        rows.append(
            (group.name, str(len(group.runs)), *cells, "–" if difference is None else f"{difference:.1e}")
        )
    return header, rows


def group_terminal_table(groups: Sequence[RunGroup]) -> Table:
    """Return the figures of groups as a table that fits into 80 columns.

    Args:
        groups: Groups of the sweep. Losses are compared with those of the first.
    """
    header, rows = group_table(groups)
    table = Table(title="median (quartiles) of repeated runs", box=box.SIMPLE_HEAD)
    for position, name in enumerate(header):
        table.add_column(name, justify="right" if position else "left", overflow="fold")
    for row in rows:  # quartiles on a line of their own
        table.add_row(*(cell.replace(" (", "\n(").replace(" to ", "–") for cell in row))
    return table


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


def _text(spread: Spread | None, figure: RepeatedFigure) -> str:
    return "–" if spread is None else spread.text(figure.form)


def _record(spread: Spread | None) -> dict[str, Any] | None:
    if spread is None:
        return None
    low, median, high = spread.quartiles
    return {"lower_quartile": low, "median": median, "upper_quartile": high, "runs": list(spread.values)}
