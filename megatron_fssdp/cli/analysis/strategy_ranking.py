"""Simulates strategies on the same loads and makes the report that ranks them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from megatron_fssdp.cli.analysis.simulated_loads import unknown_loads, with_recorded_choices
from megatron_fssdp.config.cluster_description import ClusterDescription, load_cluster
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.loading import apply_overrides, load_yaml, unknown_name, validate
from megatron_fssdp.config.run.run_config import RunConfig
from megatron_fssdp.config.strategy.strategy_registry import BASELINE, strategy_settings
from megatron_fssdp.config.strategy.strategy_settings import StrategySettings
from megatron_fssdp.records.loads import RecordedLoads
from megatron_fssdp.records.run_settings import SETTINGS_FILE
from megatron_fssdp.report.simulation_report import RankedStrategy, SimulationReport
from megatron_fssdp.report.units import format_memory
from megatron_fssdp.simulation.moe_job import MoeJob
from megatron_fssdp.simulation.simulator import balanced_counts, checked_strategy, simulate
from megatron_fssdp.simulation.workloads import WORKLOADS
from megatron_fssdp.strategies.ep import EpSettings
from megatron_fssdp.systems.system_list import SYSTEMS

_COLUMNS = (
    "ms of an iteration: mean after the longest warm-up, of the same iterations for all strategies. warm-up: "
    "first iterations in which a strategy measures, has no past loads, or waits for its first turn, with "
    "their mean time (all: it never gets further). × ep: how many times as fast as plain expert parallelism. "
    "% of force-balanced: the speed in percent of ep's with even loads, which UltraEP reports; above 100 if "
    "replicas also save traffic. host ms: in which a rank plans and posts messages. Not simulated: optimizer "
    "step, data, launches of kernels."
)


def recorded_settings(loads: str) -> list[Path]:
    """Return the ``config.yaml`` of the recorded run that ``--loads`` names, in the place of ``--model``."""
    path = Path(loads)
    if loads not in WORKLOADS and not path.exists():
        raise ConfigurationError(unknown_loads(loads))
    file = (path if path.is_dir() else path.parent) / SETTINGS_FILE
    # Records of a host may have the strategy alone.
    if loads in WORKLOADS or not file.is_file() or not {"model", "include"} & load_yaml(file).keys():
        raise ConfigurationError(
            f"--model: --loads {loads} has no {SETTINGS_FILE} that describes the model; name a run's YAML"
        )
    return [file]


def described_cluster(source: str, overrides: Sequence[str] = ()) -> ClusterDescription:
    """Read a cluster by its YAML file or name, with ``key=value`` changes of some of its values."""
    cluster = load_cluster(source)
    if not overrides:
        return cluster
    values = apply_overrides(cluster.model_dump(mode="json", exclude_none=True), overrides, "--cluster-set")
    return validate(ClusterDescription, values, "--cluster-set")


def settings_of(name: str, run: RunConfig, overrides: Sequence[str] = ()) -> StrategySettings:
    """Return a strategy's settings: the run's if it uses this strategy, and the overrides that it knows.

    Systems of others have settings, too.
    """
    values = dict(run.strategy.settings) if run.strategy.name == name else {}
    system, source = SYSTEMS.get(name), f"--strategies {name}"
    known = (system.settings if system else type(strategy_settings(name, {}, "--strategies"))).model_fields
    known_overrides = [override for override in overrides if override.partition("=")[0].strip() in known]
    values = apply_overrides(values, known_overrides)
    return validate(system.settings, values, source) if system else strategy_settings(name, values, source)


def refuse_unknown_keys(overrides: Sequence[str], chosen: Mapping[str, StrategySettings]) -> None:
    """Raise a ConfigurationError for a key of ``--moe-strategy-set`` that no chosen strategy has."""
    known = dict.fromkeys(key for settings in chosen.values() for key in type(settings).model_fields)
    for key in apply_overrides({}, overrides, "--moe-strategy-set"):
        if key not in known:
            text = unknown_name("key", key, known)
            raise ConfigurationError(f"--moe-strategy-set: {text}; give one of them, or change --strategies")


def ranked_strategies(
    title: str,
    record: RecordedLoads,
    cluster: ClusterDescription,
    job: MoeJob,
    settings: Mapping[str, StrategySettings],
    *,
    note: str = "",
    console: Console | None = None,
) -> SimulationReport:
    """Simulate strategies on the same loads of the job's experts.

    Args:
        title: Title of the report, which names loads, cluster and model in one line.
        record: The loads.
        cluster: Link and compute costs.
        job: Sizes and parallelism of the training job.
        settings: Settings of each strategy to simulate, by name.
        note: Sentence about how the loads were adapted to the job.
        console: Shows the progress.

    Raises:
        ConfigurationError: The job does not fit the cluster, or a strategy cannot train it.
    """
    counts_ILDE = record.counts_ILDE
    rows: list[RankedStrategy] = []
    console = console or Console(quiet=True)

    try:
        job, distinct = with_recorded_choices(job, record, cluster)
        for name, given in settings.items():  # a simulation takes long, so all of them are checked first
            checked_strategy(name, given, cluster, job)
        with console.status("simulating") as status:
            for number, (name, given) in enumerate(settings.items(), start=1):
                words = f"simulating {name} ({number} of {len(settings)} strategies)"
                status.update(words)
                if not console.is_terminal:
                    console.print(words)
                outcome = simulate(name, given, counts_ILDE, cluster, job)
                changed = given.model_dump(mode="json", exclude_defaults=True, exclude={"record_dir"})
                given_keys = ", ".join(f"{key} {value}" for key, value in changed.items())
                rows.append(RankedStrategy(name, outcome, given_keys))
        known = (row.outcome for row in rows if row.label == BASELINE)
        plain = next(known, None) or simulate(BASELINE, EpSettings(), counts_ILDE, cluster, job)
        ideal = simulate(BASELINE, EpSettings(), balanced_counts(counts_ILDE), cluster, job)
    except ValueError as error:
        raise ConfigurationError(f"simulate: {error}") from None
    meaning = "with settings that are not its defaults"
    notes = [f"{row.label} *: {meaning}, {row.changed}" for row in rows if row.changed]
    notes += [note] if note else []
    notes.append(_COLUMNS)
    if "parm" in settings:
        notes.append("parm equals ep here: schedules of tensor-parallel collectives are not simulated.")
    if systems := [name for name in settings if name in SYSTEMS]:
        notes.append(f"systems of others, which cannot be trained: {', '.join(systems)}")
    shares = {row.label: float(row.outcome.of_layers("deduplicated").mean()) for row in rows}
    if any(shares.values()):
        described = ", ".join(f"{label} {100 * share:.0f} %" for label, share in shares.items())
        notes.append(
            f"tokens sent once to a node, share of layers and iterations: {described}. Different nodes and "
            f"devices of a token: {distinct}."
        )
    for row in rows:
        memory = row.outcome.memory
        if memory.runs_out and memory.capacity_bytes is not None:
            notes.append(
                f"{row.label}: runs out of memory. It needs {format_memory(memory.total_bytes)}, and a "
                f"device has {format_memory(memory.capacity_bytes)}"
            )
    return SimulationReport(title, tuple(rows), plain, ideal, record.iterations, tuple(notes))
