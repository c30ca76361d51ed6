"""``megatron-fssdp simulate``: predicts which strategy is fastest on a cluster.

The loads of the experts come from a recorded run or are generated.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from megatron_fssdp.cli.analysis.simulation_inputs import described_cluster, settings_of
from megatron_fssdp.cli.analysis.simulation_progress import SimulationProgress
from megatron_fssdp.cli.analysis.strategy_ranking import ranked_strategies
from megatron_fssdp.config.cluster_files import cluster_yaml
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.run.composition import load_run
from megatron_fssdp.config.written_files import written_whole
from megatron_fssdp.report.simulations.ranking import ranking_tables
from megatron_fssdp.report.simulations.simulated_loads import loads_for_job
from megatron_fssdp.report.simulations.simulation_page import PAGE_FILE, simulation_headline, simulation_page
from megatron_fssdp.report.simulations.simulation_report import SimulationReport, write_report
from megatron_fssdp.report.simulations.simulation_trace import write_simulation_trace
from megatron_fssdp.simulation.moe_job import job_of_run

_TRACE_FILE = "trace_{}.json"


@dataclass(frozen=True)
class SimulateRequest:
    """Options of ``megatron-fssdp simulate``, whose help explains them. Overrides are ``key=value`` texts."""

    loads: str
    cluster: str
    models: Sequence[Path]
    strategies: tuple[str, ...]
    out: Path
    iterations: int | None = None
    overrides: Sequence[str] = ()
    cluster_overrides: Sequence[str] = ()
    strategy_overrides: Sequence[str] = ()
    with_break_even: bool = True
    with_plots: bool = True
    seed: int = 0


def run_simulation(request: SimulateRequest, console: Console) -> SimulationReport:
    """Simulate the strategies, print the ranking, and write the files.

    Raises:
        ConfigurationError: A file or name does not exist, or loads, run and cluster do not fit together.
    """
    if not request.strategies:
        raise ConfigurationError(
            "--strategies: got no name; give names separated by commas, such as ep,fssdp"
        )
    run = load_run(request.models, request.overrides)
    job, cluster = job_of_run(run), described_cluster(request.cluster, request.cluster_overrides)
    settings = {name: settings_of(name, run, request.strategy_overrides) for name in request.strategies}
    record, note = loads_for_job(request.loads, job, slice(request.iterations), request.seed)
    models = " + ".join(path.name for path in request.models)
    title = f"{request.loads} on {cluster.name}: {len(record.iterations)} iterations, {models}"
    searches = request.with_break_even
    with written_whole(request.out, "--out") as partial:  # checked first, because the search takes minutes
        with SimulationProgress(
            console, len(record.iterations), len(settings), searches=searches
        ) as progress:
            report = ranked_strategies(
                *(title, record, cluster, job, settings),
                note=note,
                with_break_even=searches,
                progress=progress,
            )
        wraps = console.is_terminal  # a log keeps each sentence on one line, so that a search finds it
        console.print(simulation_headline(report)[0], highlight=False, soft_wrap=not wraps)
        console.print("", *ranking_tables(report), sep="\n")
        for line in (*report.stars, *report.notes):
            console.print(f"• {line}", highlight=False, soft_wrap=not wraps)
        write_report(report, partial)
        text = cluster_yaml(cluster, "Written by megatron-fssdp simulate.")
        (partial / "cluster.yaml").write_text(text, encoding="utf-8")
        for row in report.rows:
            # In the middle of the run, strategies have a history and have finished measuring.
            middle = len(record.iterations) // 2
            write_simulation_trace(partial / _TRACE_FILE.format(row.label), row.outcome, middle)
        written = {path.name for path in partial.iterdir()}
    for trace in request.out.glob(_TRACE_FILE.format("*")):
        if trace.name not in written:  # of an earlier simulation of other strategies
            trace.unlink()
    page = ""
    if request.with_plots:  # a page that fails does not cost the numbers
        simulation_page(report, record, cluster, job).write(request.out / PAGE_FILE)
        page = f"{request.out / PAGE_FILE} (open it in a browser), "
    console.print(
        f"wrote {page}tables and traces (for https://ui.perfetto.dev) to {request.out}",
        highlight=False,
        soft_wrap=True,
    )
    return report
