"""``megatron-fssdp report`` and ``compare``: write the HTML page of one run or of several runs."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from megatron_fssdp.cli.simulate_command import described_cluster, ranked_strategies, settings_of
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.strategy_registry import STRATEGIES
from megatron_fssdp.config.written_files import refuse_special_file
from megatron_fssdp.reporting.comparison_table import comparison_table
from megatron_fssdp.reporting.job_records import loads_for_job
from megatron_fssdp.reporting.page.report_page import page_html, page_sections, write_page
from megatron_fssdp.reporting.page.reported_run import ReportedRun, read_reported_runs
from megatron_fssdp.reporting.recorded_run import run_config_of
from megatron_fssdp.reporting.simulation_report import SimulationReport
from megatron_fssdp.simulation.moe_job import job_of_run

REPORT_FILE = "report.html"
COMPARISON_FILE = "comparison.html"
WHAT_IF_ITERATIONS = 60
"""Number of recorded iterations, from the end, on which strategies are ranked.

Loads of an untrained router say little, and every strategy has to plan each iteration.
"""


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
    """

    runs: Sequence[Path]
    out: Path | None = None
    cluster: str | None = None
    strategies: Sequence[str] = field(default_factory=_ranked)

    def with_strategies(self, names: Sequence[str]) -> "ReportRequest":
        """Return the same request with other strategies to rank, if ``names`` is not empty."""
        return replace(self, strategies=names) if names else self


def write_report_page(request: ReportRequest, console: Console) -> Path:
    """Write the page of one run.

    Returns:
        Path of the page.

    Raises:
        ConfigurationError: The run cannot be read, run and cluster do not fit together, or the page cannot be
            written.
    """
    path = request.out or request.runs[0] / REPORT_FILE
    refuse_special_file(path, "--out")
    _write(request, read_reported_runs(request.runs), path, console)
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
        ConfigurationError: There is only one run, a run cannot be read, run and cluster do not fit together,
            or a file cannot be written.
    """
    if len(request.runs) < 2:
        raise ConfigurationError(
            "compare: got one run, wanted two or more; `megatron-fssdp report RUN_DIR` shows a single one"
        )
    path = request.out or request.runs[0] / COMPARISON_FILE
    refuse_special_file(path, "--out")
    runs = read_reported_runs(request.runs)
    console.print(comparison_table(*(run.records for run in runs)))
    if png is not None:
        from megatron_fssdp.reporting.device_load_plot import draw_device_loads

        draw_device_loads([run.records for run in runs], png)
    _write(request, runs, path, console)
    return path


def _write(request: ReportRequest, runs: Sequence[ReportedRun], path: Path, console: Console) -> None:
    with console.status(f"ranking {', '.join(request.strategies)}" if request.cluster else "reading"):
        what_if = _what_if(request, runs)
    write_page(path, page_html(runs, page_sections(runs, what_if)))
    console.print(
        f"wrote {path}; open it in a browser (it works without a network)", highlight=False, soft_wrap=True
    )


def _what_if(request: ReportRequest, runs: Sequence[ReportedRun]) -> SimulationReport | None:
    if request.cluster is None:
        return None
    run = next((run for run in runs if run.loads is not None), None)
    if run is None:
        raise ConfigurationError(
            "--cluster: strategies are ranked on recorded loads, but no run has recorded loads; run one "
            "again with --moe-strategy ep, or remove --cluster"
        )
    path = run.records.path
    config, cluster = run_config_of(path), described_cluster(request.cluster)
    job = job_of_run(config)
    settings = {name: settings_of(name, config) for name in request.strategies}
    record, note = loads_for_job(str(path), job)
    first = max(0, len(record.iterations) - WHAT_IF_ITERATIONS)
    record = replace(record, counts_ILDE=record.counts_ILDE[first:], iterations=record.iterations[first:])
    first_number, last_number = record.iterations[0], record.iterations[-1]
    title = f"Loads of {run.name}, iterations {first_number} to {last_number}, on {cluster.name}"
    return ranked_strategies(title, record, cluster, job, settings, note=note)
