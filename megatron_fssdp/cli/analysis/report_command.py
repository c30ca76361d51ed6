"""What ``megatron-fssdp report`` and ``compare`` do: they write the HTML page of runs."""

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from megatron_fssdp.cli.analysis.what_if import cost_on_a_cluster, ranking_on
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.written_files import refuse_special_file
from megatron_fssdp.records.json_lines import without_nan
from megatron_fssdp.records.run_settings import differing_settings, loss_obstacle
from megatron_fssdp.report.simulations.simulation_report import ranking_data
from megatron_fssdp.report.tables import Table, terminal_table
from megatron_fssdp.report.trainings.measures import comparison_table, largest_difference, measures_of
from megatron_fssdp.report.trainings.run_page import run_page
from megatron_fssdp.report.trainings.shown_run import not_comparable, shown_runs


def write_report(
    paths: Sequence[Path],
    page: Path,
    cluster: str | None,
    strategies: Sequence[str],
    *,
    loads_only: bool = False,
    as_json: bool = False,
) -> None:
    """Write the page of one run, or of several runs that are compared with the first, and print the figures.

    The other arguments are the commands' options. Without strategies, all that are registered as ranked are.

    Raises:
        ConfigurationError: A run cannot be read or is given twice, the losses of the runs cannot be compared,
            run and cluster do not fit together, or the page cannot be written.
    """
    if len({path.resolve() for path in paths}) < len(paths):
        raise ConfigurationError("compare: got the same run twice, wanted different runs; give each one once")
    refuse_special_file(page, "--out")
    runs, console = shown_runs(paths), Console(markup=False)
    settings = [one.run.settings for one in runs]
    obstacle = loss_obstacle(settings)
    if obstacle and not loads_only:
        raise ConfigurationError(
            f"compare: the losses of {' and '.join(one.name for one in runs)} say nothing about each other, "
            f"because the runs have {obstacle}; add --loads-only to compare everything else"
        )
    with console.status("reading" if cluster is None else "simulating"):
        what_if = cost_on_a_cluster(runs) if cluster is None else ranking_on(cluster, runs, strategies)
        made = run_page(runs, what_if, with_losses=not loads_only)
        made.write(page)
    differing, reason = differing_settings(settings), not_comparable([one.run for one in runs])
    if as_json:
        rows = []
        for one in runs:
            figures = {measure.key: measure.value for measure in measures_of(one.run, what_if)}
            if not loads_only and one is not runs[0]:
                figures["largest_loss_difference"] = largest_difference(runs[0].run, one.run)
            about = {"name": one.name, "path": str(one.run.path), "strategy": one.run.strategy}
            rows.append({**about, **figures, "problems": list(one.run.problems)})
        data = {
            "sentence": made.sentence,
            "page": str(page),
            "speed_not_comparable": reason or None,
            "runs": rows,
            "settings_that_differ": differing,
            "simulation": None if what_if is None else ranking_data(what_if),
        }
        console.print(json.dumps(without_nan(data), indent=2), highlight=False, soft_wrap=True)
        return
    wraps = console.is_terminal
    problems = [f"{one.name}: {problem}" for one in runs for problem in one.run.problems]
    for line in (made.sentence, *problems):
        console.print(line, highlight=False, soft_wrap=not wraps)
    if differing:
        table_rows = tuple((key, *values) for key, values in differing.items())
        names = tuple(one.name for one in runs)
        table = Table(("setting", *names), table_rows, frozenset(names))
        console.print(terminal_table(table, "settings that differ"))
    below = ["load: tokens of the busiest device over those of an average one; 1 is even"]
    below += [reason] if reason else []
    below += [f"simulated, not measured: {what_if.title}"] if what_if is not None else []
    figures_table = comparison_table(runs, with_losses=not loads_only, what_if=what_if)
    console.print(terminal_table(figures_table, caption="\n".join(below)))
    words = f"wrote {page}; open it in a browser (it works without a network)"
    console.print(words, highlight=False, soft_wrap=not wraps)
