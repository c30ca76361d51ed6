"""Makes the page of recorded runs."""

from collections.abc import Sequence

from megatron_fssdp.reporting.html.html_page import HtmlPage, Subject
from megatron_fssdp.reporting.html.section import Section
from megatron_fssdp.reporting.page.device_load_section import device_load_section
from megatron_fssdp.reporting.page.expert_load_section import expert_load_section
from megatron_fssdp.reporting.page.headline import headline_of
from megatron_fssdp.reporting.page.loss_section import loss_section
from megatron_fssdp.reporting.page.memory_section import memory_section
from megatron_fssdp.reporting.page.overview_section import (
    model_line,
    overview_section,
    parts_section,
    settings_section,
)
from megatron_fssdp.reporting.page.placement_section import placement_data, placement_section
from megatron_fssdp.reporting.page.replica_section import replica_section
from megatron_fssdp.reporting.page.reported_run import ReportedRun
from megatron_fssdp.reporting.page.selection_section import selection_section
from megatron_fssdp.reporting.page.time_section import time_section
from megatron_fssdp.reporting.page.what_if_section import what_if_section
from megatron_fssdp.reporting.simulation_report import SimulationReport


def report_page(
    runs: Sequence[ReportedRun], what_if: SimulationReport | None = None, *, with_losses: bool = True
) -> HtmlPage:
    """Return the page of one run, or of several runs to compare with the first.

    Args:
        runs: Runs of the page.
        what_if: Results of a simulation of strategies, or None.
        with_losses: Whether losses can be compared.
    """
    return HtmlPage(
        kind="comparison" if len(runs) > 1 else "report",
        title=_title(runs),
        subjects=[Subject(run.name, run.colour, model_line(run)) for run in runs],
        headline=headline_of(runs, what_if, with_losses=with_losses),
        sections=_sections(runs, what_if, with_losses),
        placements=placement_data(runs),
    )


def _sections(
    runs: Sequence[ReportedRun], what_if: SimulationReport | None, with_losses: bool
) -> list[Section]:
    """Return all sections, in order. A section that has nothing to show gives the reason."""
    sections = [
        settings_section(runs),
        parts_section(runs),
        loss_section(runs) if with_losses else None,
        time_section(runs, what_if),
        device_load_section(runs),
        expert_load_section(runs),
        placement_section(runs),
        replica_section(runs),
        selection_section(runs),
        memory_section(runs),
        what_if_section(what_if),
        overview_section(runs, what_if, with_losses=with_losses),
    ]
    return [section for section in sections if section is not None]


def _title(runs: Sequence[ReportedRun]) -> str:
    if len(runs) == 1:
        folder, strategy = runs[0].records.path.resolve().name, runs[0].records.strategy
        return folder if folder == strategy else f"{folder} ({strategy})"
    return " · ".join(run.name for run in runs)
