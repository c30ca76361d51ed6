"""Writes the pages of ``report`` and ``compare``, and prints their figures."""

from collections.abc import Sequence
from pathlib import Path

from pydantic_core import to_json
from rich.console import Console
from rich.table import Table

from megatron_fssdp.cli.analysis.simulated_loads import loads_for_job
from megatron_fssdp.cli.analysis.strategy_ranking import recorded_settings
from megatron_fssdp.cli.shared_options import plain_console
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.run.composition import load_run
from megatron_fssdp.files.written_files import refuse_special_file, refuse_unwritable
from megatron_fssdp.records.run_settings import differing_settings
from megatron_fssdp.report.measures import (
    comparison_table,
    losses_differ_because,
    measures_of,
    not_comparable,
    shown_runs,
)
from megatron_fssdp.report.page import Page, terminal_table
from megatron_fssdp.report.run_page import run_page, settings_table
from megatron_fssdp.report.simulation_page import loads_page
from megatron_fssdp.simulation.moe_job import job_of_run


def write_loads_page(
    source: str, path: Path, model: Sequence[Path] | None, changes: Sequence[str], *, as_json: bool
) -> None:
    """Write the page of loads that no run of this package recorded, and print their figures."""
    refuse_special_file(path, "--out")
    refuse_unwritable(path, "--out")
    config = load_run(model or recorded_settings(source), changes)
    console, name = plain_console(stderr=as_json), Path(source).resolve().name
    with console.status("reading"):
        record, note = loads_for_job(source, job_of_run(config))
        page = loads_page(name, record.of_whole_iterations(), note)
        page.write(path)
    if as_json:
        _print_json(page, path)
    else:
        print_lines(console, page.sentence, note, _where(path))


def write_run_page(paths: Sequence[Path], path: Path, *, as_json: bool) -> None:
    """Write the page of one run, or of several that are compared with the first, and print the figures."""
    refuse_special_file(path, "--out")
    if len({run.resolve() for run in paths}) < len(paths):
        raise ConfigurationError("compare: got the same run twice, wanted different runs; give each one once")
    runs, console = shown_runs(paths), plain_console(stderr=as_json)
    refuse_unwritable(path, "--out")
    settings = [shown.run.settings for shown in runs]
    with console.status("reading"):
        page = run_page(runs)
        page.write(path)
    reason = not_comparable(runs)
    if as_json:
        rows, first = [], None if losses_differ_because(runs) else runs[0].run
        for shown in runs:
            about = {"name": shown.name, "path": str(shown.run.path), "strategy": shown.run.strategy}
            figures = {measure.key: measure.value for measure in measures_of(shown.run, first)}
            rows.append({**about, **figures, "problems": shown.run.problems})
        differing = differing_settings(settings)
        more = {"speed_not_comparable": reason or None, "runs": rows, "settings_that_differ": differing}
        _print_json(page, path, **more)
        return
    below = ["load: tokens of the busiest device over those of an average one; 1 is even"]
    below += [reason] if reason else []
    table = settings_table(runs)
    tables = [terminal_table(table, "settings that differ")] if table.rows else []
    tables.append(terminal_table(comparison_table(runs), caption="\n".join(below)))
    problems = (f"{shown.name}: {problem}" for shown in runs for problem in shown.run.problems)
    print_lines(console, page.sentence, *problems, *tables, _where(path))


def print_lines(console: Console, *lines: str | Table) -> None:
    """Print sentences and tables. A log keeps each sentence on one line, so that a search finds it."""
    for line in filter(None, lines):
        wraps = console.is_terminal or not isinstance(line, str)
        console.print(line, soft_wrap=not wraps)


def _print_json(page: Page, path: Path, **more: object) -> None:
    report = {"sentence": page.sentence, "page": str(path), **more}
    print(to_json(report, indent=2, inf_nan_mode="null").decode())


def _where(path: Path) -> str:
    return f"wrote {path}; open it in a browser (it works without a network)"
