"""``megatron-fssdp report`` and ``compare``: write the HTML page of one run or of several runs."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from megatron_fssdp.cli.analysis.what_if import cost_on_a_cluster, ranking_on
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES
from megatron_fssdp.config.written_files import refuse_special_file
from megatron_fssdp.reporting.comparison_table import comparison_table, settings_table
from megatron_fssdp.reporting.device_load_plot import check_picture, draw_device_loads
from megatron_fssdp.reporting.page.headline import headline_of
from megatron_fssdp.reporting.page.report_page import report_page
from megatron_fssdp.reporting.page.reported_run import ReportedRun, read_reported_runs
from megatron_fssdp.reporting.records.run_settings import loss_obstacle
from megatron_fssdp.reporting.simulation_report import SimulationReport

REPORT_FILE = "report.html"
COMPARISON_FILE = "comparison.html"


def _ranked() -> tuple[str, ...]:
    return tuple(name for name, entry in STRATEGIES.items() if entry.is_ranked)


@dataclass(frozen=True)
class ReportRequest:
    """Options of ``megatron-fssdp report`` and ``compare``.

    Attributes:
        runs: Output folders of recorded runs.
        out: HTML file to write, or None for a file in the first run's folder.
        cluster: YAML file or name of a cluster on which strategies are ranked, or None for no ranking.
        strategies: Names of the strategies to rank. Default: all that are registered as ranked.
        loads_only: Whether runs are compared without their losses.
    """

    runs: Sequence[Path]
    out: Path | None = None
    cluster: str | None = None
    strategies: Sequence[str] = field(default_factory=_ranked)
    loads_only: bool = False

    def with_strategies(self, names: Sequence[str]) -> "ReportRequest":
        """Return the same request with other strategies to rank, if ``names`` is not empty."""
        return replace(self, strategies=names) if names else self


def write_report_page(request: ReportRequest, console: Console) -> Path:
    """Write the page of one run, and print its figures.

    Returns:
        Path of the page.

    Raises:
        ConfigurationError: The run cannot be read, run and cluster do not fit together, or the page cannot be
            written.
    """
    path = request.out or request.runs[0] / REPORT_FILE
    refuse_special_file(path, "--out")
    runs = read_reported_runs(request.runs)
    what_if = _write(request, runs, path, console)
    _say(headline_of(runs, what_if).sentence, console)
    console.print(comparison_table(*(run.records for run in runs), what_if=what_if))
    _say_where(path, console)
    return path


def compare_runs(request: ReportRequest, png: Path | None, console: Console) -> Path:
    """Compare runs: print a table, write the page, and optionally draw the device loads.

    Args:
        request: Options of the command.
        png: File for the plot of the device loads, or None.
        console: Console that prints the table.

    Returns:
        Path of the page.

    Raises:
        ConfigurationError: There is only one run, a run cannot be read, the losses of the runs cannot be
            compared, run and cluster do not fit together, or a file cannot be written.
    """
    if len(request.runs) < 2:
        raise ConfigurationError(
            "compare: got one run, wanted two or more; `megatron-fssdp report RUN_DIR` shows a single one"
        )
    path = request.out or request.runs[0] / COMPARISON_FILE
    refuse_special_file(path, "--out")
    if png is not None:
        check_picture(png)
    runs = read_reported_runs(request.runs)
    records = [run.records for run in runs]
    obstacle = loss_obstacle(records)
    if obstacle and not request.loads_only:
        raise ConfigurationError(
            f"compare: the losses of {' and '.join(run.name for run in runs)} say nothing about each other, "
            f"because the runs have {obstacle}; add --loads-only to compare everything else"
        )
    what_if = _write(request, runs, path, console)
    _say(headline_of(runs, what_if, with_losses=not request.loads_only).sentence, console)
    if (table := settings_table(records)) is not None:
        console.print(table)
    console.print(comparison_table(*records, with_losses=not request.loads_only, what_if=what_if))
    _say_where(path, console)
    if png is not None:  # a picture that fails does not cost the page and the table
        draw_device_loads(records, png)
    return path


def _write(
    request: ReportRequest, runs: Sequence[ReportedRun], path: Path, console: Console
) -> SimulationReport | None:
    """Write the page, and return the results of the simulation that it shows."""
    with console.status(f"simulating {', '.join(request.strategies)}" if request.cluster else "reading"):
        if request.cluster is None:
            what_if = cost_on_a_cluster(runs)
        else:
            what_if = ranking_on(request.cluster, runs, request.strategies)
    report_page(runs, what_if, with_losses=not request.loads_only).write(path)
    return what_if


def _say_where(path: Path, console: Console) -> None:
    _say(f"wrote {path}; open it in a browser (it works without a network)", console)


def _say(sentence: str, console: Console) -> None:
    console.print(sentence, highlight=False, soft_wrap=not console.is_terminal)
