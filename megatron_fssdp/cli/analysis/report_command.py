"""``megatron-fssdp report`` and ``compare``: write the HTML page of one run or of several runs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_fssdp.cli.analysis.what_if import cost_on_a_cluster, ranking_on
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.written_files import refuse_special_file
from megatron_fssdp.records.json_lines import without_nan
from megatron_fssdp.records.run_settings import differing_settings, loss_obstacle
from megatron_fssdp.report.simulations.simulation_report import SimulationReport, ranking_data
from megatron_fssdp.report.tables import Table, terminal_table
from megatron_fssdp.report.trainings.headline import headline_of
from megatron_fssdp.report.trainings.measures import comparison_table, largest_difference, measures_of
from megatron_fssdp.report.trainings.run_page import run_page
from megatron_fssdp.report.trainings.shown_run import ShownRun, not_comparable, shown_runs

REPORT_FILE = "report.html"
COMPARISON_FILE = "comparison.html"


def write_report(
    paths: Sequence[Path],
    console: Console,
    *,
    out: Path | None = None,
    cluster: str | None = None,
    strategies: Sequence[str] = (),
    loads_only: bool = False,
    as_json: bool = False,
) -> Path:
    """Write the page of one run, or of several runs that are compared with the first, and print the figures.

    The other arguments are the commands' options. Without strategies, all that are registered as ranked are.

    Returns:
        Path of the page: ``out``, or a file in the first run's folder.

    Raises:
        ConfigurationError: A run cannot be read or is given twice, the losses of the runs cannot be compared,
            run and cluster do not fit together, or the page cannot be written.
    """
    if len({path.resolve() for path in paths}) < len(paths):
        raise ConfigurationError("compare: got the same run twice, wanted different runs; give each one once")
    path = out or paths[0] / (REPORT_FILE if len(paths) == 1 else COMPARISON_FILE)
    refuse_special_file(path, "--out")
    runs = shown_runs(paths)
    settings = [one.run.settings for one in runs]
    obstacle = loss_obstacle(settings)
    if obstacle and not loads_only:
        raise ConfigurationError(
            f"compare: the losses of {' and '.join(one.name for one in runs)} say nothing about each other, "
            f"because the runs have {obstacle}; add --loads-only to compare everything else"
        )
    with console.status("reading" if cluster is None else "simulating"):
        what_if = cost_on_a_cluster(runs) if cluster is None else ranking_on(cluster, runs, strategies)
        run_page(runs, what_if, with_losses=not loads_only).write(path)
    sentence, _ = headline_of(runs, what_if, with_losses=not loads_only)
    if as_json:
        data = report_data(runs, sentence, path, what_if, with_losses=not loads_only)
        console.print(json.dumps(without_nan(data), indent=2), highlight=False, soft_wrap=True)
        return path
    problems = [f"{one.name}: {problem}" for one in runs for problem in one.run.problems]
    for line in (sentence, *problems):
        console.print(line, highlight=False, soft_wrap=not console.is_terminal)
    if differing := differing_settings(settings):
        rows = tuple((key, *values) for key, values in differing.items())
        names = tuple(one.name for one in runs)
        table = Table(("setting", *names), rows, frozenset(names))
        console.print(terminal_table(table, "settings that differ"))
    below = ["load: tokens of the busiest device over those of an average one; 1 is even"]
    below += [reason] if (reason := not_comparable([one.run for one in runs])) else []
    below += [f"simulated, not measured: {what_if.title}"] if what_if is not None else []
    figures = comparison_table(runs, with_losses=not loads_only, what_if=what_if)
    console.print(terminal_table(figures, caption="\n".join(below)))
    words = f"wrote {path}; open it in a browser (it works without a network)"
    console.print(words, highlight=False, soft_wrap=not console.is_terminal)
    return path


def report_data(
    runs: Sequence[ShownRun],
    sentence: str,
    page: Path,
    what_if: SimulationReport | None,
    *,
    with_losses: bool,
) -> dict[str, Any]:
    """Return what ``--json`` prints: the figures of every run by key, and the page's first sentence."""
    rows = []
    for one in runs:
        figures = {measure.key: measure.value for measure in measures_of(one.run, what_if)}
        if with_losses and one is not runs[0]:
            figures["largest_loss_difference"] = largest_difference(runs[0].run, one.run)
        about = {"name": one.name, "path": str(one.run.path), "strategy": one.run.strategy}
        rows.append({**about, **figures, "problems": list(one.run.problems)})
    return {
        "sentence": sentence,
        "page": str(page),
        "speed_not_comparable": not_comparable([one.run for one in runs]) or None,
        "runs": rows,
        "settings_that_differ": differing_settings([one.run.settings for one in runs]),
        "simulation": None if what_if is None else ranking_data(what_if),
    }
