"""The pages of a simulation and of loads from elsewhere.

Shape letters: I iterations.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from megatron_fssdp.config.cluster_description import ClusterDescription
from megatron_fssdp.config.strategy.strategy_registry import BASELINE
from megatron_fssdp.planning.loads import EVEN_LOAD
from megatron_fssdp.records.loads import RecordedLoads
from megatron_fssdp.records.run_settings import flat_settings
from megatron_fssdp.report import figures
from megatron_fssdp.report.colours import distinct_colours
from megatron_fssdp.report.figures import DASHES, GREY, Line
from megatron_fssdp.report.load_changes import plain_load
from megatron_fssdp.report.load_sections import DeviceLoads, device_load_section, expert_load_section
from megatron_fssdp.report.page import Page, Section, Table
from megatron_fssdp.report.simulation_report import SimulationReport
from megatron_fssdp.report.units import format_memory, format_seconds
from megatron_fssdp.simulation.moe_job import MoeJob

PAGE_FILE = "simulation.html"

_LEAST_GAIN = 0.01  # the sentence at the top calls a strategy faster from this share on

_IDEAL = "force-balanced"
_IDEAL_LINE = {"line": {"color": GREY, "dash": "dash", "width": 1.5}, "name": _IDEAL, "showlegend": True}


def simulation_page(
    report: SimulationReport, loads: RecordedLoads, cluster: ClusterDescription, job: MoeJob
) -> Page:
    """Return the page of a simulation."""
    labels = [row.label for row in report.ranked]
    colour_of = dict(zip(labels, distinct_colours(labels), strict=True))
    sections = [
        _ranking_section(report),
        _course_section(report, job, colour_of),
        expert_load_section({report.title: loads}),
        _memory_section(report),
        _assumptions_section(cluster),
    ]
    subjects = [(label, colour, "") for label, colour in colour_of.items()]
    return Page("simulation", report.title, simulation_headline(report), subjects, sections)


def loads_page(name: str, loads: RecordedLoads, note: str) -> Page:
    """Return the page of loads that no run of this package recorded.

    They have as many devices as the expert-parallel groups of their model. ``note`` says how they were read
    and fitted to the model.
    """
    num_iterations, num_layers, num_devices, num_experts = loads.counts_ILDE.shape
    load_IL, colour = plain_load(loads.counts_ILDE), distinct_colours([BASELINE])[0]
    sizes = f"{num_iterations:,} iterations, {num_layers} MoE layers, {num_experts} experts"
    plain = f"busiest of {num_devices} devices {load_IL.mean():.2f} × mean load under plain EP"
    sentence = f"{name}: {sizes}; {plain}"
    if load_IL.mean() <= EVEN_LOAD:
        sentence += "; loads are almost even without balancing, so plain EP would do"
    devices = DeviceLoads(name, colour, loads.iterations, loads.layers.tolist(), load_IL, load_IL)
    notes = [f"{note[0].upper()}{note[1:]}."] if note else []
    sections = [device_load_section([devices], notes), expert_load_section({name: loads})]
    return Page("report", name, f"{sentence}.", [(name, colour, sizes)], sections)


def simulation_headline(report: SimulationReport) -> str:
    """Return the result of a simulation in one sentence."""
    best = report.ranked[0]
    memory = best.outcome.memory
    if memory.runs_out and memory.capacity_bytes is not None:
        return (
            f"Simulated: no strategy fits into the memory of a device. {best.label} needs "
            f"{format_memory(memory.total_bytes)}, and a device has {format_memory(memory.capacity_bytes)}."
        )
    seconds, plain = report.steady_s(best.outcome), format_seconds(report.plain_s)
    ratio = report.plain_s / seconds
    if best.outcome is report.plain or ratio <= 1 + _LEAST_GAIN:
        more = f"more than {100 * _LEAST_GAIN:.0f} % faster" if ratio > 1 else "faster"
        clauses = [f"no simulated strategy is {more} than {BASELINE}, which takes {plain}"]
    else:
        parts_s = report.steady_parts_s(best.outcome)
        weights, gradients = (format_seconds(parts_s[f"waiting for {name}"]) for name in ("spAG", "spRS"))
        before, after = (
            report.steady(outcome.load_max_over_mean_IL) for outcome in (report.plain, best.outcome)
        )
        clauses = [
            f"{best.label} is {ratio:.2f} × as fast as {BASELINE} ({plain} → {format_seconds(seconds)} an "
            "iteration)",
            f"busiest device {before:.2f} → {after:.2f} × mean load",
            f"it waits {weights} for weights and {gradients} for gradients",
        ]
    if waiting := [row.label for row in report.rows if not report.is_settled(row)]:
        clauses.append(f"simulate more iterations to rank {', '.join(waiting)}, still in the warm-up")
    clauses.append(f"ep with even loads ({_IDEAL}) would take {format_seconds(report.ideal.mean_s)}")
    return f"Simulated: {'; '.join(clauses)}."


def _ranking_section(report: SimulationReport) -> Section:
    """Show the parts of an iteration's time under every strategy, and the ranking."""
    parts_s = {row.label: report.steady_parts_s(row.outcome) for row in report.ranked}
    parts_s[_IDEAL] = {part: float(seconds_I.mean()) for part, seconds_I in report.ideal.parts_s.items()}
    figure = figures.time_bars("simulated time of an iteration", parts_s)
    figure.add_vline(x=report.ideal.mean_s, **_IDEAL_LINE)
    sentence = (
        "Mean time of an iteration after the warm-up, divided into parts, the fastest strategy first. "
        f"Last is the ideal: {_IDEAL}, which is ep with even loads. "
        "It is simulated, not measured: every strategy decides from the loads as in a training, and the "
        "cluster's description says how long that takes on its links and devices."
    )
    notes = [f"{note.rstrip('.')}." for note in report.notes]
    return Section("Ranking", sentence, [figure, report.table, *notes])


def _course_section(report: SimulationReport, job: MoeJob, colour_of: Mapping[str, str]) -> Section:
    """Show the time, the load and the moved bytes of each iteration."""
    outcomes = {row.label: row.outcome for row in report.ranked}

    def lines(values: Mapping[str, NDArray[np.float64]]) -> list[Line]:
        return [
            Line(name, colour_of[name], report.iterations, values_I, DASHES[i % len(DASHES)])
            for i, (name, values_I) in enumerate(values.items())
        ]

    seconds = lines({name: outcome.iteration_s for name, outcome in outcomes.items()})
    loads = lines({name: outcome.load_max_over_mean_IL.mean(axis=1) for name, outcome in outcomes.items()})
    gathered = {name: outcome.of_layers("gathered").sum(axis=1) for name, outcome in outcomes.items()}
    moved = {name: job.expert_bytes * num_replicas_I for name, num_replicas_I in gathered.items()}
    times = figures.curves("Time", "simulated seconds", seconds, ".4s")
    times.add_hline(y=report.ideal.mean_s, **_IDEAL_LINE)
    parts = [times, figures.device_loads("Busiest device, mean of layers", loads)]
    if any(values.any() for values in moved.values()):
        title = "Weights that travel to replicas (spAG)"
        figure = figures.curves(title, "bytes of an iteration", lines(moved), ".4s")
        parts.append(figure.update_yaxes(tickformat="~s", ticksuffix="B"))
    sentence = "Load 1 is even: a layer takes as long as its busiest device."
    for figure in parts:
        figure.update_yaxes(rangemode="tozero")
        if report.warm_up:
            first, last = int(report.iterations[0]), int(report.iterations[report.warm_up - 1])
            figure.add_vrect(x0=first - 0.5, x1=last + 0.5, fillcolor=GREY, opacity=0.15, line_width=0)
    if report.warm_up:
        sentence += (
            f" The grey area is the longest warm-up (iterations: {report.warm_up}), which the ranking leaves "
            "out: until then, a strategy measures, has no past loads, or waits for its first turn."
        )
    return Section("Each iteration", sentence, parts)


def _memory_section(report: SimulationReport) -> Section:
    header = ("", "experts of the device", "replicas, transfers", "dense", "activations (estimated)", "sum")
    rows = []
    for row in report.ranked:
        memory, experts = row.outcome.memory, row.outcome.memory.experts
        kinds = (experts.expert_parallelism_bytes, experts.above_expert_parallelism_bytes)
        sizes = (*kinds, memory.dense_bytes, memory.activation_bytes, memory.total_bytes)
        rows.append((row.label, *map(format_memory, sizes)))
    sentence = (
        "Peak memory of the device that needs most: parameters, gradients and optimizer states of its "
        "experts and of everything else, replicas, and activations with the rows of the most loaded device."
    )
    capacity = report.plain.memory.capacity_bytes
    if capacity is not None:
        sentence += f" A device has {format_memory(capacity)}."
    return Section("Memory", sentence, [Table(header, tuple(rows))])


def _assumptions_section(cluster: ClusterDescription) -> Section:
    values = flat_settings(cluster.model_dump(exclude={"name", "sources"}, exclude_none=True))
    rows = tuple((key, f"{value:,.6g}") for key, value in values.items())
    sources = [f"{key}: {source.rstrip('.')}." for key, source in cluster.sources.items()]
    sentence = (
        "The results are as good as these figures of the cluster. Their source is the paper, the data sheet "
        "or the assumption that the cluster's description names; “megatron-fssdp profile” measures a cluster "
        "instead. The sizes of the model are those of the run's settings."
    )
    return Section("What is assumed", sentence, [Table(("", "value"), rows), *sources])
