"""The page of a sweep: all groups with their spread, and below one run of each group in detail."""

from collections.abc import Sequence

import plotly.graph_objects as go

from megatron_fssdp.records.run_settings import loss_obstacle
from megatron_fssdp.report.colours import distinct_colours
from megatron_fssdp.report.figures import GREY, new_figure
from megatron_fssdp.report.page import Page, Section, Tile
from megatron_fssdp.report.simulations.simulation_report import SimulationReport
from megatron_fssdp.report.trainings.run_groups import (
    FIGURES,
    LOADS,
    SPEEDS,
    RepeatedFigure,
    RunGroup,
    group_table,
    speed_obstacle,
)
from megatron_fssdp.report.trainings.run_page import run_page
from megatron_fssdp.report.trainings.shown_run import ShownRun, shown_runs

_MOST_DETAILED = 8
"""Groups whose runs are shown in detail. There are about as many colours of strategies."""


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
    with_losses = not loss_obstacle([one.run.settings for one in details])
    page = run_page(details, what_if, with_losses=with_losses)
    obstacle = speed_obstacle(groups)
    others = groups[1:] or groups  # a sweep of one group has nothing to compare it with
    clauses = [_against(groups[0], group, with_speed=not obstacle) for group in others]
    notes = [f"{obstacle[0].upper()}{obstacle[1:]}."] if obstacle else []
    if unfinished:
        clauses.append(f"{len(unfinished)} {'run is' if len(unfinished) == 1 else 'runs are'} missing")
        notes.append(f"Missing, because they failed or are not finished: {', '.join(unfinished)}.")
    if len(groups) > _MOST_DETAILED:
        notes.append(f"The sections below show the first {_MOST_DETAILED} of {len(groups)} groups.")
    count = sum(len(group.runs) for group in groups)
    tiles = [Tile("finished runs", str(count), f"of {count + len(unfinished)}, in {len(groups)} groups")]
    how = (
        "Runs in a row differ only in seed and repetition: circles are runs, the diamond their median, and "
        "the bar reaches from the lower to the upper quartile. The sections below show the first run of each "
        "row."
    )
    shown = (figure for figure in FIGURES if not (figure is SPEEDS and obstacle))
    parts = [*(_dots(groups, figure) for figure in shown), group_table(groups), *notes]
    sentence = "; ".join(clause for clause in (*clauses, obstacle) if clause) + "."
    sections = [Section("Repeated runs", how, parts), *page.sections]
    return Page("sweep", title, sentence, tiles, page.subjects, sections)


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


def _dots(groups: Sequence[RunGroup], figure: RepeatedFigure) -> go.Figure:
    """Return a row for each group: its runs, their median and quartiles."""
    colours = distinct_colours([group.first.strategy for group in groups])
    shown = new_figure("", figure.label, "", 110 + 34 * len(groups), showlegend=False)
    shown.update_yaxes(autorange="reversed", type="category")
    for group, colour in zip(groups, colours, strict=True):
        spread, values = group.spread(figure), group.values(figure)
        if spread is None:
            continue
        form = f"%{{x:{figure.form}}}<extra>{group.name}</extra>"
        style = {"mode": "markers", "hovertemplate": form}
        marker = {"size": 9, "color": colour, "symbol": "circle-open"}
        shown.add_scatter(x=values, y=[group.name] * len(values), marker=marker, **style)
        low, median, high = spread
        bar = {"symmetric": False, "array": [high - median], "arrayminus": [median - low], "color": GREY}
        marker = {**marker, "symbol": "diamond"}
        shown.add_scatter(x=[median], y=[group.name], marker=marker, error_x=bar, **style)
    return shown
