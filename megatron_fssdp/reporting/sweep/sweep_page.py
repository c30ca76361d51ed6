"""The page of a sweep: all groups with their spread, and below one run of each group in detail."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron_fssdp.reporting.colours import distinct_colours
from megatron_fssdp.reporting.html.html_page import Headline, HtmlPage, Tile
from megatron_fssdp.reporting.html.section import GREY, Figure, Section, Table, titled
from megatron_fssdp.reporting.page.report_page import report_page
from megatron_fssdp.reporting.page.reported_run import ReportedRun, read_reported_runs
from megatron_fssdp.reporting.records.run_settings import loss_obstacle
from megatron_fssdp.reporting.simulation_report import SimulationReport
from megatron_fssdp.reporting.sweep.run_groups import (
    FIGURES,
    LOAD,
    SPEED,
    RepeatedFigure,
    RunGroup,
    group_table,
    speed_obstacle,
)

MOST_DETAILED = 8
"""Groups whose runs are shown in detail. There are about as many colours of strategies."""


def detailed_runs(groups: Sequence[RunGroup]) -> list[ReportedRun]:
    """Read the run of each group that the page shows in detail: the first of the group.

    Raises:
        ConfigurationError: The records of a run are damaged.
    """
    shown = groups[:MOST_DETAILED]
    runs = read_reported_runs([group.first.path for group in shown])
    return [replace(run, name=group.name) for run, group in zip(runs, shown, strict=True)]


def sweep_page(
    title: str,
    groups: Sequence[RunGroup],
    details: Sequence[ReportedRun],
    unfinished: Sequence[str] = (),
    what_if: SimulationReport | None = None,
) -> HtmlPage:
    """Return the page of a sweep.

    Args:
        title: Name of the sweep.
        groups: Groups with their finished runs. All are compared with the first.
        details: One run of each group (:func:`detailed_runs`).
        unfinished: Names of runs that failed or are not finished.
        what_if: Results of a simulation of the runs' loads, or None.
    """
    with_losses = not loss_obstacle([run.records for run in details])
    page = report_page(details, what_if, with_losses=with_losses)
    return replace(
        page,
        kind="sweep",
        title=title,
        headline=sweep_headline(groups, unfinished),
        sections=[repeated_section(groups, unfinished), *page.sections],
    )


def sweep_headline(groups: Sequence[RunGroup], unfinished: Sequence[str] = ()) -> Headline:
    """Return the top of the page: speeds and loads of all groups against the first, in one sentence.

    Args:
        groups: Groups of the sweep.
        unfinished: Names of runs that failed or are not finished.
    """
    obstacle = speed_obstacle(groups)
    others = groups[1:] or groups  # a sweep of one group has nothing to compare it with
    clauses = [_against(groups[0], group, with_speed=not obstacle) for group in others]
    clauses += [obstacle] if obstacle else []
    if unfinished:
        clauses.append(f"{len(unfinished)} {'run is' if len(unfinished) == 1 else 'runs are'} missing")
    count = sum(len(group.runs) for group in groups)
    tiles = [Tile("finished runs", str(count), f"of {count + len(unfinished)}, in {len(groups)} groups")]
    for figure, words, best in ((LOAD, "most even", min), (SPEED, "fastest", max)):
        if not (figure is SPEED and obstacle):
            tiles += _best(groups, figure, words, best)
    return Headline("; ".join(clause for clause in clauses if clause) + ".", tuple(tiles))


def repeated_section(groups: Sequence[RunGroup], unfinished: Sequence[str] = ()) -> Section:
    """Make the section with the spread of every group.

    Args:
        groups: Groups of the sweep.
        unfinished: Names of runs that failed or are not finished.
    """
    obstacle = speed_obstacle(groups)
    figures = [
        _dots(groups, figure)
        for figure in FIGURES
        if any(group.spread(figure) for group in groups) and not (figure is SPEED and obstacle)
    ]
    header, rows = group_table(groups)
    notes = [f"{obstacle[0].upper()}{obstacle[1:]}."] if obstacle else []
    if unfinished:
        notes.append(f"Missing, because they failed or are not finished: {', '.join(unfinished)}.")
    if len(groups) > MOST_DETAILED:
        notes.append(f"The sections below show the first {MOST_DETAILED} of {len(groups)} groups.")
    lead = (
        "Runs in a row differ only in seed and repetition. Circles are runs. The diamond is their median, "
        "and the bar reaches from the lower to the upper quartile. The speed of a run is the median of its "
        "iterations. The sections below show the first run of each row."
    )
    table = Table(header, tuple(rows))
    return Section("repeated", "Repeated runs", lead, tuple(figures), table=table, notes=tuple(notes))


def _against(first: RunGroup, group: RunGroup, *, with_speed: bool) -> str:
    clauses = []
    speed, plain = group.spread(SPEED), first.spread(SPEED)
    if with_speed and group is not first and speed is not None and plain is not None:
        unclear = " (no clear difference: the quartiles overlap)" if speed.overlaps(plain) else ""
        clauses.append(f"{speed.median / plain.median:.2f} × {first.name}{unclear}")
    load, before = group.spread(LOAD), first.spread(LOAD)
    if load is not None:
        change = f"{before.median:.2f} → " if before is not None and group is not first else ""
        clauses.append(f"busiest device {change}{load.median:.2f} × mean load")
    return f"{group.name}: {', '.join(clauses)}" if clauses else ""


def _best(
    groups: Sequence[RunGroup], figure: RepeatedFigure, words: str, best: Callable[..., str]
) -> list[Tile]:
    """Return the tile of the best group. None if its quartiles overlap with another's."""
    spreads = {group.name: spread for group in groups if (spread := group.spread(figure)) is not None}
    if not spreads:
        return []
    name = best(spreads, key=lambda one: spreads[one].median)
    low, median, high = spreads[name].quartiles
    if any(spread.overlaps(spreads[name]) for other, spread in spreads.items() if other != name):
        return []
    hint = f"{figure.label}; quartiles {low:{figure.form}} to {high:{figure.form}}"
    return [Tile(f"{words}: {name}", f"{median:{figure.form}}", hint)]


def _dots(groups: Sequence[RunGroup], figure: RepeatedFigure) -> Figure:
    colours = distinct_colours([group.first.strategy for group in groups])
    known = [
        (group.name, spread, colour)
        for group, colour in zip(groups, colours, strict=True)
        if (spread := group.spread(figure)) is not None
    ]
    quartiles = [spread.quartiles for _, spread, _ in known]
    runs = {
        "type": "scatter",
        "mode": "markers",
        "name": "one run",
        "x": [value for _, spread, _ in known for value in spread.values],
        "y": [name for name, spread, _ in known for _ in spread.values],
        "marker": {
            "symbol": "circle-open",
            "size": 9,
            "color": [colour for _, spread, colour in known for _ in spread.values],
        },
        "hovertemplate": f"%{{x:{figure.form}}}<extra>%{{y}}</extra>",
    }
    medians = {
        "type": "scatter",
        "mode": "markers",
        "name": "median and quartiles",
        "x": [median for _, median, _ in quartiles],
        "y": [name for name, _, _ in known],
        "marker": {"symbol": "diamond", "size": 9, "color": [colour for _, _, colour in known]},
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [high - median for _, median, high in quartiles],
            "arrayminus": [median - low for low, median, _ in quartiles],
            "color": GREY,
        },
        "hovertemplate": f"median %{{x:{figure.form}}}<extra>%{{y}}</extra>",
    }
    layout = {
        "xaxis": titled(figure.label),
        "yaxis": {"autorange": "reversed", "automargin": True, "type": "category"},
        "showlegend": False,
    }
    return Figure(f"repeated-{figure.key.replace('_', '-')}", [runs, medians], layout, 110 + 34 * len(known))
