"""What ``megatron-fssdp report`` and ``compare`` do: they write the HTML page of runs."""

from collections.abc import Sequence
from pathlib import Path

from pydantic_core import to_json
from rich.console import Console

from megatron_fssdp.cli.analysis.what_if import what_if
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.written_files import refuse_special_file, refuse_unwritable
from megatron_fssdp.records.run_settings import differing_settings, loss_obstacle
from megatron_fssdp.report.simulations.simulation_report import ranking_data
from megatron_fssdp.report.tables import terminal_table
from megatron_fssdp.report.trainings.measures import comparison_table, largest_difference, measures_of
from megatron_fssdp.report.trainings.run_page import run_page, settings_table
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
    refuse_unwritable(page, "--out")
    settings = [one.run.settings for one in runs]
    obstacle = loss_obstacle(settings)
    if obstacle and not loads_only:
        raise ConfigurationError(
            f"compare: the losses of {' and '.join(one.name for one in runs)} say nothing about each other, "
            f"because the runs have {obstacle}; add --loads-only to compare everything else"
        )
    with console.status("reading" if cluster is None else "simulating"):
        simulated = what_if(runs, cluster, strategies)
        made = run_page(runs, simulated, with_losses=not loads_only)
        made.write(page)
    reason = not_comparable(runs)
    if as_json:
        rows = []
        for one in runs:
            figures = {measure.key: measure.value for measure in measures_of(one.run)}
            if not loads_only and one is not runs[0]:
                figures["largest_loss_difference"] = largest_difference(runs[0].run, one.run)
            about = {"name": one.name, "path": str(one.run.path), "strategy": one.run.strategy}
            rows.append({**about, **figures, "problems": one.run.problems})
        data = {
            "sentence": made.sentence,
            "page": str(page),
            "speed_not_comparable": reason or None,
            "runs": rows,
            "settings_that_differ": differing_settings(settings),
            "simulation": None if simulated is None else ranking_data(simulated),
        }
        print(to_json(data, indent=2, inf_nan_mode="null").decode())
        return
    wraps = console.is_terminal
    problems = [f"{one.name}: {problem}" for one in runs for problem in one.run.problems]
    for line in (made.sentence, *problems):
        console.print(line, highlight=False, soft_wrap=not wraps)
    if (differing := settings_table(runs)).rows:
        console.print(terminal_table(differing, "settings that differ"))
    below = ["load: tokens of the busiest device over those of an average one; 1 is even"]
    below += [reason] if reason else []
    below += [f"simulated, not measured: {simulated.title}"] if simulated is not None else []
    figures_table = comparison_table(runs, with_losses=not loads_only)
    console.print(terminal_table(figures_table, caption="\n".join(below)))
    words = f"wrote {page}; open it in a browser (it works without a network)"
    console.print(words, highlight=False, soft_wrap=not wraps)
