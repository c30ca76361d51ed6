"""Simulates strategies on the same loads and makes the report that ranks them."""

from collections.abc import Mapping

from rich.console import Console

from megatron_fssdp.config.cluster_description import ClusterDescription
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.strategy.shipped_settings import EpSettings
from megatron_fssdp.config.strategy.strategy_registry import BASELINE, STRATEGIES
from megatron_fssdp.config.strategy.strategy_settings import StrategySettings
from megatron_fssdp.records.loads import RecordedLoads
from megatron_fssdp.report.simulations.simulated_loads import with_recorded_choices
from megatron_fssdp.report.simulations.simulation_report import RankedStrategy, SimulationReport
from megatron_fssdp.report.units import format_memory
from megatron_fssdp.simulation.break_even import break_evens
from megatron_fssdp.simulation.moe_job import MoeJob
from megatron_fssdp.simulation.simulator import ceiling_s, checked_strategy, simulate
from megatron_fssdp.strategies.layer_plan import LayerPlan

SAMPLE_ITERATIONS = 6
"""Number of iterations that the break-even search simulates. It plans them again for each value it tries."""

HISTORY_ITERATIONS = 16
"""Number of iterations before the sample, which strategies can use as their history."""

_COLUMNS = (
    "ms of an iteration: mean after the longest warm-up, of the same iterations for all strategies. warm-up: "
    "first iterations in which a strategy measures, has no past loads, or waits for its first turn, with "
    "their mean time (all: it never gets further). × ep: how many times as fast as plain expert parallelism. "
    "% of even ep: the speed in percent of ep's with even loads; above 100 if replicas also save traffic. "
    "host ms: in which a rank plans and posts messages. Not simulated: optimizer step, data, launches of "
    "kernels."
)
_BREAK_EVEN = (
    "pays from, pays up to: the strategy is more than 1 % faster than ep if a rank has at least this many "
    "tokens, and if a node's network has at most this bandwidth (searched from 1/64 to 64 times its own)."
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
    console: Console | None = None,
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
        console: Console that shows the progress, or None.

    Raises:
        ConfigurationError: The job does not fit the cluster, or a strategy cannot train it.
    """
    counts_ILDE = record.counts_ILDE
    first = max(0, len(counts_ILDE) - SAMPLE_ITERATIONS)
    past = counts_ILDE[max(0, first - HISTORY_ITERATIONS) : first]
    rows: list[RankedStrategy] = []
    console, step = console or Console(quiet=True), ""

    def begin(words: str) -> None:
        nonlocal step
        step = words
        if not console.is_terminal:
            console.print(words, highlight=False)

    def on_plan(iteration: int, layer: int, plan: LayerPlan) -> None:
        status.update(f"{step}: iteration {iteration + 1}")

    try:
        job, distinct = with_recorded_choices(job, record, cluster)
        for name, given in settings.items():  # a simulation takes long, so all of them are checked first
            checked_strategy(name, given, cluster, job)
        with console.status("simulating") as status:
            for number, (name, given) in enumerate(settings.items(), start=1):
                begin(f"simulating {name} ({number} of {len(settings)} strategies)")
                numbers = record.layers.tolist()
                outcome = simulate(
                    name, given, counts_ILDE, cluster, job, layer_numbers=numbers, on_plan=on_plan
                )
                tokens = bandwidth = None
                if with_break_even and name != BASELINE and STRATEGIES[name].strategy is not None:
                    begin(f"searching where {name} pays")
                    sample, history = counts_ILDE[first:], past if len(past) else None
                    loads = (name, given, sample, cluster, job)
                    tokens, bandwidth = break_evens(*loads, past_ILDE=history, on_plan=on_plan)
                changed = given.model_dump(mode="json", exclude_defaults=True, exclude={"record_dir"})
                words = ", ".join(f"{key} {value}" for key, value in changed.items())
                rows.append(RankedStrategy(name, outcome, tokens, bandwidth, words))
        known = (row.outcome for row in rows if row.label == BASELINE)
        plain = next(known, None) or simulate(BASELINE, EpSettings(), counts_ILDE, cluster, job)
        balanced_s = ceiling_s(counts_ILDE, cluster, job)
    except ValueError as error:
        raise ConfigurationError(f"simulate: {error}") from None
    notes = [
        f"{row.label} *: with settings that are not its defaults, {row.changed}"
        for row in rows
        if row.changed
    ]
    notes += [note] if note else []
    notes += [_COLUMNS, _BREAK_EVEN] if with_break_even else [_COLUMNS]
    if "parm" in settings:
        notes.append("parm equals ep here: only jobs without tensor parallelism are simulated.")
    shares = {row.label: float(row.outcome.of_layers("deduplicated").mean()) for row in rows}
    if any(shares.values()):
        described = ", ".join(f"{label} {100 * share:.0f} %" for label, share in shares.items())
        notes.append(
            f"deduplicated exchange, share of layers and iterations: {described}. Different nodes and "
            f"devices of a token: {distinct}."
        )
    for row in rows:
        memory = row.outcome.memory
        if memory.runs_out and memory.capacity_bytes is not None:
            notes.append(
                f"{row.label}: runs out of memory. It needs {format_memory(memory.total_bytes)}, and a "
                f"device has {format_memory(memory.capacity_bytes)}"
            )
    return SimulationReport(title, tuple(rows), plain, balanced_s, record.iterations, tuple(notes))
