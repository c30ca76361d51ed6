"""``megatron-fssdp simulate``: predicts which strategy is fastest on a cluster.

The loads of the experts come from a recorded run or are generated.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from megatron_fssdp.cli.simulation_progress import SimulationProgress
from megatron_fssdp.config.cluster_description import ClusterDescription
from megatron_fssdp.config.cluster_files import cluster_yaml, load_cluster
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.loading import apply_overrides, validate
from megatron_fssdp.config.renamed_settings import refuse_renamed_settings
from megatron_fssdp.config.run.composition import load_run
from megatron_fssdp.config.run.run_config import RunConfig
from megatron_fssdp.config.strategy.strategy_registry import BASELINE, STRATEGIES
from megatron_fssdp.config.strategy.strategy_selection import strategy_settings
from megatron_fssdp.config.strategy.strategy_settings import EpSettings, StrategySettings
from megatron_fssdp.config.written_files import written_whole
from megatron_fssdp.reporting.records.job_records import loads_for_job, unknown_loads, with_recorded_choices
from megatron_fssdp.reporting.records.load_records import RecordedLoads
from megatron_fssdp.reporting.records.recorded_settings import SETTINGS_FILE
from megatron_fssdp.reporting.simulation_page.simulation_page import PAGE_FILE, simulation_page
from megatron_fssdp.reporting.simulation_plots import draw_simulation
from megatron_fssdp.reporting.simulation_report import (
    RankedStrategy,
    SimulationReport,
    ranking_table,
    write_report,
)
from megatron_fssdp.reporting.simulation_trace import write_simulation_trace
from megatron_fssdp.reporting.units import format_memory
from megatron_fssdp.simulation.break_even import break_even_bandwidth, break_even_tokens
from megatron_fssdp.simulation.moe_job import MoeJob, job_of_run
from megatron_fssdp.simulation.replay import OnPlan
from megatron_fssdp.simulation.simulator import StrategyOutcome, ceiling_s, simulate
from megatron_fssdp.simulation.workloads import WORKLOADS

TRACE_FILE = "trace_{}.json"
SAMPLE_ITERATIONS = 6
"""Number of iterations that the break-even search simulates. It plans them again for each value it tries."""

HISTORY_ITERATIONS = 16
"""Number of iterations before the sample, which strategies can use as their history."""


@dataclass(frozen=True)
class SimulateRequest:
    """Options of ``megatron-fssdp simulate``.

    Attributes:
        loads: Output folder of a run, its ``loads.npy``, or the name of a workload.
        cluster: YAML file or name of a cluster.
        models: YAML files of a training run. Later files win.
        strategies: Names of the strategies to simulate.
        out: Folder to write the results to.
        iterations: Number of iterations to generate, or maximum number to use of a record. None for the
            default.
        overrides: ``key=value`` settings that win over the run's files.
        cluster_overrides: ``key=value`` changes of the cluster.
        strategy_overrides: ``key=value`` settings for all strategies that have the key.
        with_break_even: Whether to search the batch size and bandwidth at which strategies start to pay.
        with_plots: Whether to write the HTML page and the pictures.
        seed: Seed of generated loads.
    """

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
    record, note = loads_for_job(request.loads, job, request.iterations, request.seed)
    models = " + ".join(path.name for path in request.models)
    title = f"{request.loads} on {cluster.name}: {len(record.iterations)} iterations, {models}"
    with written_whole(request.out, "--out") as partial:  # checked first, because the search takes minutes
        with SimulationProgress(
            console, len(record.iterations), len(settings), searches=request.with_break_even
        ) as progress:
            report = ranked_strategies(
                title,
                record,
                cluster,
                job,
                settings,
                note=note,
                with_break_even=request.with_break_even,
                progress=progress,
            )
        _show_and_write(report, request, record, cluster, partial, console)
        written = {path.name for path in partial.iterdir()}
    for trace in request.out.glob(TRACE_FILE.format("*")):
        if trace.name not in written:  # of an earlier simulation of other strategies
            trace.unlink()
    if request.with_plots:  # a page or a plot that fails does not cost the numbers
        simulation_page(report, record, cluster, job).write(request.out / PAGE_FILE)
        with written_whole(request.out, "--out") as partial:
            draw_simulation(report, partial)
    page = f"{request.out / PAGE_FILE} (open it in a browser), plots, " if request.with_plots else ""
    console.print(
        f"wrote {page}tables and traces (for https://ui.perfetto.dev) to {request.out}",
        highlight=False,
        soft_wrap=True,
    )
    return report


def _show_and_write(
    report: SimulationReport,
    request: SimulateRequest,
    record: RecordedLoads,
    cluster: ClusterDescription,
    folder: Path,
    console: Console,
) -> None:
    console.print(ranking_table(report))
    for line in report.notes:
        console.print(line, highlight=False, soft_wrap=True)
    write_report(report, folder)
    (folder / "cluster.yaml").write_text(cluster_yaml(cluster), encoding="utf-8")
    for row in report.rows:
        # In the middle of the run, strategies have a history and have finished measuring.
        write_simulation_trace(
            folder / TRACE_FILE.format(row.label), row.outcome, len(record.iterations) // 2
        )


def ranked_strategies(
    title: str,
    record: RecordedLoads,
    cluster: ClusterDescription,
    job: MoeJob,
    settings: Mapping[str, StrategySettings],
    *,
    note: str = "",
    with_break_even: bool = False,
    progress: SimulationProgress | None = None,
) -> SimulationReport:
    """Simulate strategies on the same loads.

    Args:
        title: Title of the report, which names loads, cluster and model in one line.
        record: Loads of the job's experts.
        cluster: Link and compute costs of the cluster.
        job: Sizes and parallelism of the training job.
        settings: Settings of each strategy to simulate, by name.
        note: Sentence about how the loads were adapted to the job, or an empty string.
        with_break_even: Whether to search the batch size and bandwidth at which strategies start to pay.
        progress: Display of the progress, or None.

    Returns:
        The simulated outcomes of all strategies.

    Raises:
        ConfigurationError: The job does not fit the cluster.
    """
    on_plan = None if progress is None else progress.planned
    outcomes: dict[str, StrategyOutcome] = {}
    rows: list[RankedStrategy] = []
    try:
        job, distinct = with_recorded_choices(job, record, cluster)
        for name, given in settings.items():
            if progress is not None:
                progress.begin(name)
            outcomes[name] = simulate(
                name,
                given,
                record.counts_ILDE,
                cluster,
                job,
                layer_numbers=record.layers.tolist(),
                on_plan=on_plan,
            )
        plain = outcomes.get("ep") or simulate("ep", EpSettings(), record.counts_ILDE, cluster, job)
        for name, outcome in outcomes.items():
            if progress is not None and with_break_even:
                progress.search(name)
            rows.append(_row(name, outcome, settings[name], record, cluster, job, with_break_even, on_plan))
        balanced_s = ceiling_s(record.counts_ILDE, cluster, job)
    except ValueError as error:
        raise ConfigurationError(f"simulate: {error}") from None
    return SimulationReport(
        title,
        tuple(rows),
        plain,
        balanced_s,
        record.iterations,
        _notes(note, rows, with_break_even, distinct),
    )


def _notes(
    note: str, rows: Sequence[RankedStrategy], with_break_even: bool, distinct: str
) -> tuple[str, ...]:
    pays = (
        "pays from, pays up to: the strategy is more than 1 % faster than ep if a rank has at least this "
        "many tokens, and if a node's network has at most this bandwidth (searched from 1/64 to 64 times the "
        "job's own value, on the last iterations). "
    )
    notes = [note] if note else []
    notes.append(
        "ceiling: the same job under ep with balanced routing. A strategy whose replicas save traffic can "
        "exceed it. " + (pays if with_break_even else "") + "Not simulated: optimizer step, data loading, "
        "launches of kernels."
    )
    notes.append(
        "host ms: milliseconds in which a rank's host plans and posts messages of transfers in an iteration, "
        "as measured on one core (docs/simulator.md). The device waits for a part of them."
    )
    notes.append(
        "seconds: mean of the iterations after the longest warm-up, the same ones for all strategies. "
        "warm-up: first iterations in which a strategy measures, has no past loads, or waits for its first "
        "turn, with their mean seconds (all: it never gets further, and is ranked after those that do)."
    )
    shares = {row.label: float(row.outcome.ledger.deduplicated_IL.mean()) for row in rows}
    if any(shares.values()):
        described = ", ".join(f"{label} {100 * share:.0f} %" for label, share in shares.items())
        notes.append(
            f"deduplicated exchange, share of layers and iterations: {described}. Different nodes and "
            f"devices of a token: {distinct}."
        )
    notes += [
        f"{row.label}: runs out of memory. It needs {format_memory(row.outcome.memory.total_bytes)}, and a "
        f"device has {format_memory(row.outcome.memory.capacity_bytes)}"
        for row in rows
        if row.outcome.memory.runs_out and row.outcome.memory.capacity_bytes is not None
    ]
    return tuple(notes)


def _row(
    name: str,
    outcome: StrategyOutcome,
    settings: StrategySettings,
    record: RecordedLoads,
    cluster: ClusterDescription,
    job: MoeJob,
    with_break_even: bool,
    on_plan: OnPlan | None,
) -> RankedStrategy:
    if not with_break_even or name == BASELINE or STRATEGIES[name].strategy is None:
        return RankedStrategy(name, outcome)
    counts_ILDE = record.counts_ILDE
    first = max(0, len(counts_ILDE) - SAMPLE_ITERATIONS)
    sample, past = counts_ILDE[first:], counts_ILDE[max(0, first - HISTORY_ITERATIONS) : first]
    arguments = (name, settings, sample, cluster, job, past if len(past) else None, on_plan)
    spans_nodes = outcome.ledger.topology.num_nodes > 1
    bandwidth = break_even_bandwidth(*arguments) if spans_nodes else None
    return RankedStrategy(name, outcome, break_even_tokens(*arguments), bandwidth)


def recorded_settings(loads: str) -> list[Path]:
    """Return the ``config.yaml`` of the recorded run that ``--loads`` names, in the place of ``--model``.

    Raises:
        ConfigurationError: The loads are no recorded run, or the run has no ``config.yaml``.
    """
    path = Path(loads)
    if loads not in WORKLOADS and not path.exists():
        raise ConfigurationError(unknown_loads(loads))
    file = (path if path.is_dir() else path.parent) / SETTINGS_FILE
    if loads in WORKLOADS or not file.is_file():
        raise ConfigurationError(
            f"--model: --loads {loads} has no {SETTINGS_FILE} that describes the model; name a run's YAML"
        )
    return [file]


def described_cluster(source: str, overrides: Sequence[str] = ()) -> ClusterDescription:
    """Read a cluster description and change some of its values.

    Args:
        source: YAML file or name of a cluster.
        overrides: ``key=value`` changes.

    Raises:
        ConfigurationError: The cluster does not exist, or a value is invalid.
    """
    cluster = load_cluster(source)
    if not overrides:
        return cluster
    data = apply_overrides(cluster.model_dump(mode="json", exclude_none=True), overrides, "--cluster-set")
    return validate(ClusterDescription, data, "--cluster-set")


def settings_of(name: str, run: RunConfig, overrides: Sequence[str] = ()) -> StrategySettings:
    """Return a strategy's settings for a simulation.

    The settings come from the run if it uses this strategy. Overrides win over them. Overrides whose key the
    strategy does not have are ignored.

    Raises:
        ConfigurationError: The strategy is unknown, or its settings are invalid.
    """
    data = dict(run.strategy.settings) if run.strategy.name == name else {}
    refuse_renamed_settings(apply_overrides({}, overrides, "--moe-strategy-set"), "--moe-strategy-set")
    known = set(type(strategy_settings(name, {}, "--strategies")).model_fields)
    known_overrides = [override for override in overrides if override.partition("=")[0].strip() in known]
    return strategy_settings(name, apply_overrides(data, known_overrides), f"--strategies {name}")
