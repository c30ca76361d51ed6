"""The page of a simulation, with the same parts and colours as the page of a run.

Shape letters: I iterations, L MoE layers, D devices.
"""

from collections.abc import Mapping

import numpy as np
import plotly.graph_objects as go

from megatron_fssdp.config.cluster_description import ClusterDescription, LinkDescription
from megatron_fssdp.config.strategy.strategy_registry import BASELINE
from megatron_fssdp.records.loads import RecordedLoads
from megatron_fssdp.report.colours import distinct_colours
from megatron_fssdp.report.figures import (
    DASHES,
    GREY,
    Line,
    bin_words,
    curves,
    even_line,
    expert_loads,
    sorted_devices,
    stacked_bars,
)
from megatron_fssdp.report.page import Page, Section, Subject, Tile
from megatron_fssdp.report.simulations.ranking import EVEN_EP, ranking_figure, ranking_table
from megatron_fssdp.report.simulations.simulation_report import SimulationReport
from megatron_fssdp.report.tables import Table
from megatron_fssdp.report.units import (
    MEMORY,
    format_bytes,
    format_flops,
    format_memory,
    format_seconds,
    unit_of,
)
from megatron_fssdp.simulation.break_even import LEAST_GAIN
from megatron_fssdp.simulation.moe_job import MoeJob

PAGE_FILE = "simulation.html"

_MEMORY_KINDS = {
    "experts of the device": ("#4E79A7", lambda memory: memory.experts.expert_parallelism_bytes),
    "replicas and their transfers": ("#F28E2B", lambda memory: memory.experts.above_expert_parallelism_bytes),
    "dense parameters": ("#A9B4C2", lambda memory: memory.dense_bytes),
    "activations (estimated)": ("#76B7B2", lambda memory: memory.activation_bytes),
}
"""Colour and bytes of each kind of memory."""


def simulation_page(
    report: SimulationReport, loads: RecordedLoads, cluster: ClusterDescription, job: MoeJob
) -> Page:
    """Return the page of a simulation of loads on a cluster, with the sizes of a job."""
    labels = [row.label for row in report.rows]
    colour_of = dict(zip(labels, distinct_colours(labels), strict=True))
    sentence, tiles = simulation_headline(report)
    ranking = (
        "Mean time of an iteration after the warm-up, divided into parts, the fastest strategy first. It is "
        "simulated, not measured: every strategy decides from the loads as in a training."
    )
    expert_load = (
        "Tokens that the router sends to each expert, divided by an even share: pale is even, orange more, "
        "blue is less. All strategies get these."
    )
    tokens_ILE = loads.counts_ILDE.sum(axis=2, dtype=np.int64)
    heat_maps = expert_loads(
        "Load of every expert, × even share", loads.iterations, loads.layers.tolist(), tokens_ILE, 1
    )
    sections = [
        Section("Ranking", ranking, [ranking_figure(report), ranking_table(report), *report.stars]),
        _time_section(report, colour_of),
        _load_section(report, colour_of),
        Section("Expert load over iterations", expert_load, [heat_maps]),
        _replica_section(report, job, colour_of),
        _memory_section(report),
        _assumptions_section(report, cluster, job),
    ]
    subjects = [Subject(row.label, colour_of[row.label]) for row in report.ranked]
    return Page("simulation", report.title, sentence, tiles, subjects, sections)


def simulation_headline(report: SimulationReport) -> tuple[str, list[Tile]]:
    """Return the result of a simulation in one sentence, and its most important numbers."""
    best = report.ranked[0]
    memory = best.outcome.memory
    room = "" if memory.capacity_bytes is None else f"a device has {format_memory(memory.capacity_bytes)}"
    needed = format_memory(memory.total_bytes)
    if memory.runs_out:
        why = f"{best.label} needs {needed}, and {room}"
        return f"Simulated: no strategy fits into the memory of a device. {why}.", []
    seconds, load = report.steady_s(best.outcome), report.steady_load(best.outcome)
    plain, plain_load = format_seconds(report.plain_s), report.steady_load(report.plain)
    ratio = report.plain_s / seconds
    if best.outcome is report.plain or ratio <= 1:
        clauses = [f"no simulated strategy is faster than {BASELINE}, which takes {plain}"]
    elif ratio <= 1 + LEAST_GAIN:
        more = f"more than {100 * LEAST_GAIN:.0f} % faster"
        clauses = [f"no simulated strategy is {more} than {BASELINE}, which takes {plain}"]
    else:
        parts_s = report.steady_parts_s(best.outcome)
        weights, gradients = (format_seconds(parts_s[f"waiting for {one}"]) for one in ("spAG", "spRS"))
        clauses = [
            f"{best.label} is {ratio:.2f} × as fast as {BASELINE} ({plain} → {format_seconds(seconds)} an "
            "iteration)",
            f"busiest device {plain_load:.2f} → {load:.2f} × mean load",
            f"it waits {weights} for weights and {gradients} for gradients",
        ]
    if waiting := [row.label for row in report.rows if not report.is_settled(row)]:
        clauses.append(f"simulate more iterations to rank {', '.join(waiting)}, still in the warm-up")
    clauses.append(f"{EVEN_EP} would take {format_seconds(report.even_ep_s)}")
    share = f"{100 * report.even_ep_s / seconds:.0f} %"
    tiles = [
        Tile(f"fastest: {best.label}", f"{ratio:.2f} × {BASELINE}", "simulated, not measured"),
        Tile("time of an iteration", format_seconds(seconds), f"{BASELINE} {plain}"),
        Tile(
            f"of the speed of {EVEN_EP}", share, f"{BASELINE} {100 * report.even_ep_s / report.plain_s:.0f} %"
        ),
        Tile("busiest device / mean load", f"{load:.2f} ×", f"{BASELINE} {plain_load:.2f} ×; 1 is even"),
        Tile("peak memory of a device", needed, f"estimated; {room}" if room else "estimated"),
    ]
    return f"Simulated: {'; '.join(clauses)}.", tiles


def _time_section(report: SimulationReport, colour_of: Mapping[str, str]) -> Section:
    seconds = {row.label: row.outcome.iteration_s for row in report.ranked}
    figure = _course(report, colour_of, seconds, "", "simulated seconds", ".4s", 340)
    figure.add_hline(
        y=report.even_ep_s,
        line={"color": GREY, "dash": "dash", "width": 1.5},
        name=EVEN_EP,
        showlegend=True,
    )
    words = bin_words(len(report.iterations))
    sentence = "Simulated seconds of each iteration."
    if report.warm_up:
        sentence += (
            f" The grey area is the longest warm-up ({report.warm_up} iteration"
            f"{'s' if report.warm_up > 1 else ''}), which the ranking leaves out: until then, a strategy "
            "measures, has no past loads, or waits for its first turn."
        )
    return Section("Time of each iteration", sentence, [figure, *([words] if words else [])])


def _load_section(report: SimulationReport, colour_of: Mapping[str, str]) -> Section:
    loads = {row.label: row.outcome.load_max_over_mean_IL.mean(axis=1) for row in report.ranked}
    title = "Busiest device, max / mean"
    figure = _course(report, colour_of, loads, title, "max / mean device load", ".2f", 340)
    even_line(figure)
    tokens = {
        row.label: (colour_of[row.label], row.outcome.tokens_ILD[report.warm_up :]) for row in report.ranked
    }
    devices = sorted_devices("All devices, sorted by load in each iteration after the warm-up", tokens)
    sentence = (
        "Tokens of the busiest device, divided by the mean of all devices, averaged over layers. 1 is even. "
        "A layer takes as long as its busiest device."
    )
    return Section("Device load", sentence, [figure, devices])


def _replica_section(report: SimulationReport, job: MoeJob, colour_of: Mapping[str, str]) -> Section:
    title = "Replicas and bytes over time"
    moved = {
        row.label: job.expert_bytes * row.outcome.of_layers("gathered").sum(axis=1) for row in report.ranked
    }
    if not any(values.any() for values in moved.values()):
        return Section(title, "No simulated strategy has replicas whose weights travel.")
    figure = _course(report, colour_of, moved, "", "bytes of an iteration", ".4s", 300)
    figure.update_yaxes(tickformat="~s", ticksuffix="B")
    sentence = (
        "Weights that travel to replicas (spAG). A replica is a copy of an expert on another device than its "
        "owner's, and computes a part of the expert's tokens."
    )
    return Section(title, sentence, [figure])


def _course(
    report: SimulationReport,
    colour_of: Mapping[str, str],
    values: Mapping[str, np.ndarray],
    title: str,
    y_title: str,
    form: str,
    height: int,
) -> go.Figure:
    """Return one curve for each strategy, over a grey warm-up."""
    lines = [
        Line(name, colour_of[name], report.iterations, values_I, DASHES[i % len(DASHES)])
        for i, (name, values_I) in enumerate(values.items())
    ]
    figure = curves(title, y_title, lines, form, height)
    figure.update_yaxes(rangemode="tozero")
    if report.warm_up:
        first, last = int(report.iterations[0]), int(report.iterations[report.warm_up - 1])
        figure.add_vrect(x0=first - 0.5, x1=last + 0.5, fillcolor=GREY, opacity=0.15, line_width=0)
    return figure


def _memory_section(report: SimulationReport) -> Section:
    memories = {row.label: row.outcome.memory for row in report.ranked}
    most = max(memory.total_bytes for memory in memories.values())
    size, word = unit_of(most, MEMORY)
    bars = {
        kind: (colour, [bytes_of(memory) / size for memory in memories.values()])
        for kind, (colour, bytes_of) in _MEMORY_KINDS.items()
    }
    figure = stacked_bars(f"peak memory of a device, {word}", list(memories), bars)
    sentence = (
        "Memory of the device that needs most: parameters, gradients and optimizer states of its experts and "
        "of everything else, replicas, and activations with the rows of the most loaded device."
    )
    capacity = report.plain.memory.capacity_bytes
    if capacity is not None:
        sentence += f" A device has {format_memory(capacity)}."
        if capacity < 2 * most:  # a line far to the right of all bars would squeeze them
            line = {"color": GREY, "dash": "dash", "width": 1.5}
            figure.add_vline(x=capacity / size, line=line, name="memory of a device", showlegend=True)
    return Section("Memory", sentence, [figure])


def _assumptions_section(report: SimulationReport, cluster: ClusterDescription, job: MoeJob) -> Section:
    memory = "unknown" if cluster.memory_bytes is None else format_memory(cluster.memory_bytes)
    figures = {
        "num_nodes": ("nodes", f"{cluster.num_nodes}"),
        "devices_per_node": ("devices of a node", f"{cluster.devices_per_node}"),
        "intra_node": ("link of a device inside its node", _link(cluster.intra_node)),
        "inter_node": ("all network links of a node together", _link(cluster.inter_node)),
        "expert_flops_per_s": ("compute of experts", format_flops(cluster.expert_flops_per_s)),
        "non_expert_flops_per_s": ("compute of attention", format_flops(cluster.non_expert_flops_per_s)),
        "memory_bytes": ("memory of a device", memory),
    }
    rows = [(*words, cluster.sources.get(key, cluster.name)) for key, words in figures.items()]
    rows += [
        (f"{name}, {link_class}", _link(link), f"measured, {cluster.name}")
        for name, classes in cluster.collectives.items()
        for link_class, link in classes.items()
    ]
    batches = f"{job.num_micro_batches} micro-batch{'es' if job.num_micro_batches > 1 else ''}"
    sizes = {
        "devices of an expert-parallel group": f"{job.num_devices}",
        "MoE layers": f"{job.num_layers}",
        "experts of a layer": f"{job.num_experts}, {job.top_k} for each token",
        "weights of an expert": format_bytes(job.expert_bytes),
        "tokens of a device": f"{job.tokens_per_micro_batch:,.0f} in each of {batches}",
        "hidden state of a token": format_bytes(job.token_bytes),
    }
    rows += [(name, value, "the run's settings") for name, value in sizes.items()]
    table = Table(("", "value", "source"), tuple(rows), prose=frozenset(("value", "source")))
    sentence = (
        "The results are as good as these figures. The source of a cluster's figure is the paper, the data "
        "sheet or the assumption that its description names; “megatron-fssdp profile” measures a cluster "
        "instead."
    )
    notes = [f"{note[0].upper()}{note[1:].rstrip('.')}." for note in report.notes]
    return Section("What is assumed", sentence, [table, *notes])


def _link(link: LinkDescription) -> str:
    return f"{link.bandwidth_bytes_per_s / 1e9:,.3g} GB/s, {1e6 * link.alpha_s:,.3g} µs to start"
