"""Runs of a sweep that differ only in seed and repetition: the spread of their figures, and the page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go

from megatron_fssdp.records.recorded_run import RecordedRun
from megatron_fssdp.records.run_settings import loss_obstacle
from megatron_fssdp.report.colours import distinct_colours
from megatron_fssdp.report.figures import new_figure
from megatron_fssdp.report.page import Page, Section
from megatron_fssdp.report.simulations.simulation_report import SimulationReport
from megatron_fssdp.report.tables import Table
from megatron_fssdp.report.trainings.measures import Spread, largest_difference, measures_of
from megatron_fssdp.report.trainings.run_page import run_page
from megatron_fssdp.report.trainings.shown_run import ShownRun, not_comparable, shown_runs

LOADS, SPEEDS = "load_max_over_mean", "tokens_per_s"
FIGURES = {
    "last_loss": ("last loss", ".3f"),
    LOADS: ("max/mean device load", ".3f"),
    SPEEDS: ("tokens/s", ",.0f"),
}
"""Label and format of the figures that a sweep compares, by their keys among the measures of a run."""

_MOST_DETAILED = 8
"""Groups whose runs are shown in detail. There are about as many colours of strategies."""


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

    def values(self, key: str) -> list[float]:
        """Return a figure of the runs that recorded it."""
        found = (measure for run in self.runs.values() for measure in measures_of(run) if measure.key == key)
        return [measure.value for measure in found if not np.isnan(measure.value)]

    def spread(self, key: str) -> Spread | None:
        """Return the spread of a figure, or None if no run recorded it."""
        values = self.values(key)
        return Spread.of(values) if values else None

    def loss_difference(self, other: "RunGroup") -> float | None:
        """Return the largest relative difference of a loss from that of the same seed in another group.

        It is None if the groups have no common seed and repetition, or train different things.
        """
        common = [repeat for repeat in self.runs if repeat in other.runs]
        if not common or loss_obstacle([one.runs[common[0]].settings for one in (other, self)]):
            return None
        found = [largest_difference(other.runs[repeat], self.runs[repeat]) for repeat in common]
        return max((one for one in found if one is not None), default=None)


def _speed_obstacle(groups: Sequence[RunGroup]) -> str:
    return not_comparable([run for group in groups for run in group.runs.values()])


def group_table(groups: Sequence[RunGroup]) -> Table:
    """Return the figures of groups. Losses are compared with those of the first."""
    obstacle, rows = _speed_obstacle(groups), []
    for group in groups:
        cells = []
        for key, (_, form) in FIGURES.items():
            spread = group.spread(key)
            if key == SPEEDS and obstacle:
                cells.append("not comparable")
            elif spread is None:
                cells.append("–")
            else:
                cells.append(spread.text(form) if len(group.runs) > 1 else f"{spread.median:{form}}")
        difference = None if group is groups[0] else group.loss_difference(groups[0])
        last = "–" if difference is None else f"{difference:.1e}"
        rows.append((group.name, str(len(group.runs)), *cells, last))
    labels = (label for label, _ in FIGURES.values())
    return Table(("group", "runs", *labels, "loss: difference from the first group"), tuple(rows))


def group_records(groups: Sequence[RunGroup]) -> list[dict[str, Any]]:
    """Return the figures of groups as plain values for JSON. Losses are compared with the first group's."""
    names = ("lower_quartile", "median", "upper_quartile")
    return [
        {
            "name": group.name,
            "runs": len(group.runs),
            **{
                key: (spread := group.spread(key))
                and {**dict(zip(names, spread, strict=True)), "runs": group.values(key)}
                for key in FIGURES
            },
            "loss_difference": group.loss_difference(groups[0]),
        }
        for group in groups
    ]


def detailed_runs(groups: Sequence[RunGroup]) -> list[ShownRun]:
    """Read the run of each group that the page shows in detail: the first of the group.

    Raises:
        ConfigurationError: The records of a run are damaged.
    """
    shown = groups[:_MOST_DETAILED]
    return shown_runs([group.first.path for group in shown], [group.name for group in shown])


def sweep_page(
    title: str,
    groups: Sequence[RunGroup],
    details: Sequence[ShownRun],
    unfinished: Sequence[str] = (),
    what_if: SimulationReport | None = None,
) -> Page:
    """Return the page of a sweep.

    Args:
        title: Name of the sweep.
        groups: Groups with their finished runs. All are compared with the first.
        details: One run of each group (:func:`detailed_runs`).
        unfinished: Names of runs that failed or are not finished.
        what_if: Results of a simulation of the runs' loads, or None.
    """
    page = run_page(details, what_if, with_losses=not loss_obstacle([one.run.settings for one in details]))
    obstacle = _speed_obstacle(groups)
    others = groups[1:] or groups  # a sweep of one group has nothing to compare it with
    clauses = [_against(groups[0], group, with_speed=not obstacle) for group in others]
    count = sum(len(group.runs) for group in groups)
    notes = [f"{count} of {count + len(unfinished)} runs are finished, in {len(groups)} groups."]
    notes += [f"{obstacle[0].upper()}{obstacle[1:]}."] if obstacle else []
    if unfinished:
        clauses.append(f"{len(unfinished)} {'run is' if len(unfinished) == 1 else 'runs are'} missing")
        notes.append(f"Missing, because they failed or are not finished: {', '.join(unfinished)}.")
    if len(groups) > _MOST_DETAILED:
        notes.append(f"The sections below show the first {_MOST_DETAILED} of {len(groups)} groups.")
    how = (
        "Runs in a row differ only in seed and repetition. Points are runs; the box reaches from the lower "
        "to the upper quartile, with a line at the median. The sections below show the first run of each row."
    )
    boxes = [_boxes(groups, key) for key in FIGURES if not (key == SPEEDS and obstacle)]
    repeated = Section("Repeated runs", how, [*boxes, group_table(groups), *notes])
    sentence = "; ".join(clause for clause in (*clauses, obstacle) if clause) + "."
    return Page("sweep", title, sentence, page.subjects, [repeated, *page.sections])


def _against(first: RunGroup, group: RunGroup, *, with_speed: bool) -> str:
    clauses = []
    speed, plain = group.spread(SPEEDS), first.spread(SPEEDS)
    if with_speed and group is not first and speed is not None and plain is not None:
        unclear = " (no clear difference: the quartiles overlap)" if speed.overlaps(plain) else ""
        clauses.append(f"{speed.median / plain.median:.2f} × {first.name}{unclear}")
    load, before = group.spread(LOADS), first.spread(LOADS)
    if load is not None:
        change = f"{before.median:.2f} → " if before is not None and group is not first else ""
        clauses.append(f"busiest device {change}{load.median:.2f} × mean load")
    return f"{group.name}: {', '.join(clauses)}" if clauses else ""


def _boxes(groups: Sequence[RunGroup], key: str) -> go.Figure:
    """Return a row for each group: its runs beside a box with their median and quartiles."""
    label, form = FIGURES[key]
    figure = new_figure("", label, "", 110 + 34 * len(groups), showlegend=False)
    figure.update_xaxes(hoverformat=form)
    figure.update_yaxes(autorange="reversed", type="category")
    colours = distinct_colours([group.first.strategy for group in groups])
    for group, colour in zip(groups, colours, strict=True):
        style = {"boxpoints": "all", "quartilemethod": "linear", "marker_color": colour, "line_width": 1.5}
        figure.add_box(x=group.values(key), name=group.name, orientation="h", jitter=0, **style)
    return figure
