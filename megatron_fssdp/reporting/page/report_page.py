"""Writes the sections of a page into one self-contained HTML file."""

import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from megatron_fssdp.config.written_files import written_file
from megatron_fssdp.reporting.page.device_load_section import device_load_section
from megatron_fssdp.reporting.page.expert_load_section import expert_load_section
from megatron_fssdp.reporting.page.headline import Headline, headline_of
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
from megatron_fssdp.reporting.page.section import Section
from megatron_fssdp.reporting.page.selection_section import selection_section
from megatron_fssdp.reporting.page.time_section import time_section
from megatron_fssdp.reporting.page.what_if_section import what_if_section
from megatron_fssdp.reporting.records.run_records import without_nan
from megatron_fssdp.reporting.simulation_report import SimulationReport

_PACKAGE = "megatron_fssdp.reporting.page"
_SCRIPTS = ("theme.js", "placement_viewer.js", "figures.js")


def page_sections(
    runs: Sequence[ReportedRun], what_if: SimulationReport | None = None, *, with_losses: bool = True
) -> list[Section]:
    """Return all sections of a page, in order. A section that has nothing to show gives the reason.

    Args:
        runs: One run, or several runs to compare.
        what_if: Results of a simulation of strategies, or None.
        with_losses: Whether losses can be compared.
    """
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


def page_html(
    runs: Sequence[ReportedRun],
    sections: Sequence[Section],
    headline: Headline | None = None,
    *,
    title: str | None = None,
) -> str:
    """Return the page as HTML text.

    Args:
        runs: Runs of the page.
        sections: Sections of the page, from :func:`page_sections`.
        headline: Top of the page. Default: that of the runs without a simulation.
        title: Title of the page. Default: the names of the runs.
    """
    environment = Environment(
        loader=PackageLoader(_PACKAGE, "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    figures = [figure.drawn for section in sections for figure in section.figures]
    return environment.get_template("page.html.j2").render(
        title=title or _title(runs),
        runs=[{"name": run.name, "colour": run.colour, "line": model_line(run)} for run in runs],
        headline=headline or headline_of(runs),
        sections=sections,
        style=Markup(_text("page.css")),
        plotly=Markup(get_plotlyjs()),
        scripts=[Markup(_text(name)) for name in _SCRIPTS],
        figures=_script_json(figures),
        placements=_script_json(placement_data(runs)),
    )


def write_page(path: Path, html: str) -> None:
    """Write a page completely or not at all.

    Args:
        path: File to write. Its folder is created if it does not exist.
        html: HTML text of the page.

    Raises:
        ConfigurationError: The file cannot be written.
    """
    with written_file(path, "--out") as partial:
        partial.write_text(html, encoding="utf-8")


def _title(runs: Sequence[ReportedRun]) -> str:
    if len(runs) == 1:
        folder, strategy = runs[0].records.path.resolve().name, runs[0].records.strategy
        return folder if folder == strategy else f"{folder} ({strategy})"
    return " · ".join(run.name for run in runs)


def _text(name: str) -> str:
    return files(_PACKAGE).joinpath(name).read_text(encoding="utf-8")


def _script_json(value: Any) -> Markup:
    """Return JSON text that is safe inside an HTML script element."""
    text = json.dumps(without_nan(value), allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c"))
