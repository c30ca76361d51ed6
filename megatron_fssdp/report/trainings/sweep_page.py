"""Runs of a sweep that differ only in seed and repetition: the spread of their figures, and the page."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatron_fssdp.records.run_settings import loss_obstacle
from megatron_fssdp.report.page import Page, Section
from megatron_fssdp.report.simulations.simulation_report import SimulationReport
from megatron_fssdp.report.tables import Table
from megatron_fssdp.report.trainings.measures import largest_difference, repeated_values, spread_of
from megatron_fssdp.report.trainings.run_page import run_page
from megatron_fssdp.report.trainings.shown_run import ShownRun, counted, not_comparable

FIGURES = {
    "last_loss": ("last loss", ".3f"),
    "load_max_over_mean": ("max/mean device load", ".3f"),
    "tokens_per_s": ("tokens/s", ",.0f"),
}
"""Label and format of the figures that a sweep compares, by their keys among the measures of a run."""

MOST_DETAILED = 8  # groups are shown in detail; there are about as many colours of strategies


def loss_difference(group: ShownRun, other: ShownRun) -> float | None:
    """Return the largest relative difference of a loss from that of the same seed in another group.

    None: they have no common seed and repetition, or train different things.
    """
    pairs = [(other.repeats[repeat], run) for repeat, run in group.repeats.items() if repeat in other.repeats]
    if not pairs or loss_obstacle([run.settings for run in pairs[0]]):
        return None
    found = [largest_difference(*pair) for pair in pairs]
    return max((value for value in found if value is not None), default=None)


def group_table(groups: Sequence[ShownRun]) -> Table:
    """Return the figures of groups. Losses are compared with those of the first."""
    obstacle, rows = not_comparable(groups), []
    for group in groups:
        cells = []
        for key, (_, form) in FIGURES.items():
            cell = "–"
            if key == "tokens_per_s" and obstacle:
                cell = "not comparable"
            elif spread := spread_of(group, key):
                cell = spread.text(form) if len(group.repeats) > 1 else f"{spread.median:{form}}"
            cells.append(cell)
        difference = None if group is groups[0] else loss_difference(group, groups[0])
        last = "–" if difference is None else f"{difference:.1e}"
        rows.append((group.name, str(len(group.repeats)), *cells, last))
    labels = (label for label, _ in FIGURES.values())
    return Table(("group", "runs", *labels, "loss: difference from the first group"), tuple(rows))


def group_records(groups: Sequence[ShownRun]) -> list[dict[str, Any]]:
    """Return the figures of groups as plain values for JSON. Losses are compared with the first group's."""
    records = []
    for group in groups:
        record: dict[str, Any] = {"name": group.name, "runs": len(group.repeats)}
        for key in FIGURES:
            spread = spread_of(group, key)
            record[key] = spread and spread._asdict() | {"runs": repeated_values(group, key)}
        records.append({**record, "loss_difference": loss_difference(group, groups[0])})
    return records


def sweep_page(
    title: str,
    groups: Sequence[ShownRun],
    unfinished: Sequence[str] = (),
    what_if: SimulationReport | None = None,
) -> Page:
    """Compare groups with the first. ``unfinished`` names the runs that have no results."""
    details, obstacle = groups[:MOST_DETAILED], not_comparable(groups)
    page = run_page(
        details, what_if, with_losses=not loss_obstacle([shown.run.settings for shown in details])
    )
    count, missing = sum(len(group.repeats) for group in groups), ""
    notes = [f"{count} of {count + len(unfinished)} runs are finished, in {len(groups)} groups."]
    notes += [f"{obstacle[0].upper()}{obstacle[1:]}."] if obstacle else []
    if unfinished:
        missing = f" {counted(len(unfinished), 'run')} {'is' if len(unfinished) == 1 else 'are'} missing."
        notes.append(f"Missing, because they failed or are not finished: {', '.join(unfinished)}.")
    if len(groups) > MOST_DETAILED:
        notes.append(f"The sections below show the first {MOST_DETAILED} of {len(groups)} groups.")
    how = (
        "Runs in a row differ only in seed and repetition: median (lower to upper quartile). The sections "
        "below show the first run of each row."
    )
    repeated = Section("Repeated runs", how, [group_table(groups), *notes])
    sections = [repeated, *page.sections]
    return replace(page, kind="sweep", title=title, sentence=page.sentence + missing, sections=sections)
