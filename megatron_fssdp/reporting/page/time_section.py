"""Page section on the time of an iteration and its parts."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_fssdp.reporting.colours import TIME_PARTS
from megatron_fssdp.reporting.html.iteration_bins import IterationBins
from megatron_fssdp.reporting.html.section import Figure, Section, Table, iteration_axis, packed, titled
from megatron_fssdp.reporting.page.part_marks import with_part_marks
from megatron_fssdp.reporting.page.reported_run import ReportedRun, most_iterations
from megatron_fssdp.reporting.records.run_parts import not_comparable
from megatron_fssdp.reporting.records.time_parts import (
    MEASURED_PARTS,
    Pass,
    has_layer_parts,
    layer_parts,
    mean_parts_s,
    time_parts,
)
from megatron_fssdp.reporting.simulation_report import SimulationReport

MOST_POINTS = 600


def time_section(runs: Sequence[ReportedRun], what_if: SimulationReport | None = None) -> Section:
    """Make the section: the mean parts of every run's iterations, of its layers, and of each iteration.

    Args:
        runs: Runs of the page.
        what_if: Results of a simulation of the loads, or None. Its parts stand beside the measured ones.
    """
    figures = [_means(runs)]
    if len(runs) == 1:
        figures += [_layers(runs[0], which) for which in ("forward", "backward") if _has_parts(runs[0])]
        figures.append(_stacked(runs[0]))
    else:
        figures.append(_iterations(runs))
    notes = [
        "Waits are measured on the first device of each expert-parallel group, averaged over the groups, and "
        "summed over layers. The other parts are means over the ranks, except for the experts of a whole "
        "iteration, which are those of the slowest rank. The all-to-alls of an iteration do not include the "
        "wait for this rank, but the combine of a layer does."
    ]
    notes += [
        f"{run.name}: torch's profiler wrote {', '.join(run.traces)} in {run.records.path}; open such a "
        "trace in https://ui.perfetto.dev."
        for run in runs
        if run.traces
    ]
    if any(not _has_parts(run) for run in runs):
        notes.append(
            "At least one run did not measure the parts of its layers: its strategy is none, or it ran "
            "Megatron's combined 1F1B schedule. There, all passes are one part."
        )
    if any(not any(record.passes_s for record in run.records.metrics) for run in runs):
        notes.append(
            "At least one run did not record the seconds of its passes. There, the passes are part of "
            "“optimizer and everything else”."
        )
    if reason := not_comparable([run.records for run in runs]):
        notes.insert(
            0, f"{reason[0].upper()}{reason[1:]}. A rank with little work lends its core to a busy one."
        )
    lead = (
        "Transfers of weights and gradients count only while compute waits for them. Transfers that compute "
        "hides cost no time."
    )
    return Section("time", "Iteration time", lead, tuple(figures), _table(runs, what_if), notes=tuple(notes))


def _has_parts(run: ReportedRun) -> bool:
    return has_layer_parts(run.records)


def _table(runs: Sequence[ReportedRun], what_if: SimulationReport | None) -> Table:
    """Milliseconds of the parts of an iteration: measured in every run, and simulated for its strategy."""
    columns = {f"{run.name}, measured": mean_parts_s(run.records) for run in runs}
    if what_if is not None and what_if.of_own_model:
        names = [run.records.strategy for run in runs]
        for row in what_if.rows:
            if row.label in names:
                columns[f"{row.label}, simulated"] = what_if.steady_parts_s(row.outcome)
    rows = [
        (TIME_PARTS[part].name, *(_milliseconds(found.get(part)) for found in columns.values()))
        for part in TIME_PARTS
        if any(found.get(part) for found in columns.values())
    ]
    total = ("whole iteration", *(_milliseconds(sum(found.values())) for found in columns.values()))
    return Table(("milliseconds of an iteration", *columns), (*rows, total))


def _milliseconds(seconds: float | None) -> str:
    return f"{1e3 * seconds:.4g}" if seconds else "–"


def _means(runs: Sequence[ReportedRun]) -> Figure:
    parts = [mean_parts_s(run.records) for run in runs]
    traces: list[dict[str, Any]] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": TIME_PARTS[part].name,
            "y": [run.name for run in runs],
            "x": [found[part] for found in parts],
            "marker": {"color": TIME_PARTS[part].colour},
            "hovertemplate": "%{x:.4g} s<extra>" + TIME_PARTS[part].name + "</extra>",
        }
        for part in MEASURED_PARTS
        if any(found[part] for found in parts)
    ]
    words = "mean seconds of an iteration"
    if most_iterations(runs) > 1:
        words += ", without the first"
    layout = {
        "barmode": "stack",
        "xaxis": titled(words, rangemode="tozero"),
        "yaxis": {"autorange": "reversed", "automargin": True},
        "bargap": 0.35,
    }
    return Figure("time-means", traces, layout, 200 + 40 * len(runs))


def _layers(run: ReportedRun, which: Pass) -> Figure:
    """Mean milliseconds of the parts of every layer in an iteration."""
    traces: list[dict[str, Any]] = [
        {
            "type": "bar",
            "name": TIME_PARTS[part].name,
            "x": [str(layer) for layer in run.records.layers],
            "y": packed(1e3 * seconds_L),
            "marker": {"color": TIME_PARTS[part].colour},
            "hovertemplate": "layer %{x}: %{y:.4g} ms<extra>" + TIME_PARTS[part].name + "</extra>",
        }
        for part, seconds_L in layer_parts(run.records, which).items()
    ]
    layout = {
        "title": {"text": f"{which.capitalize()} passes of every MoE layer and its transformer layer"},
        "barmode": "stack",
        "bargap": 0.35,
        "xaxis": titled("layer", type="category"),
        "yaxis": titled("milliseconds of an iteration", rangemode="tozero"),
    }
    return Figure(f"time-{which}", traces, layout, 280)


def _stacked(run: ReportedRun) -> Figure:
    bins = IterationBins(run.records.iterations, MOST_POINTS)
    traces: list[dict[str, Any]] = [
        {
            "type": "bar",
            "name": TIME_PARTS[part].name,
            "showlegend": False,
            "x": packed(bins.middles),
            "y": packed(bins.mean(seconds_I)),
            "marker": {"color": TIME_PARTS[part].colour, "line": {"width": 0}},
            "hovertemplate": "iteration %{x:.0f}: %{y:.4g} s<extra>" + TIME_PARTS[part].name + "</extra>",
        }
        for part, seconds_I in time_parts(run.records).items()
        if seconds_I.any()
    ]
    layout = {
        "barmode": "stack",
        "bargap": 0,
        "xaxis": iteration_axis(run.num_iterations),
        "yaxis": titled("seconds", rangemode="tozero"),
    }
    return Figure("time", traces, with_part_marks(layout, [run]), 280)


def _iterations(runs: Sequence[ReportedRun]) -> Figure:
    traces = []
    for run in runs:
        bins = IterationBins(run.records.iterations, MOST_POINTS)
        seconds_I = np.array([record.iteration_s for record in run.records.metrics])
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers" if len(bins.middles) < 3 else "lines",
                "name": run.name,
                "x": packed(bins.middles),
                "y": packed(bins.mean(seconds_I)),
                "line": {"color": run.colour, "width": 1.5},
                "hovertemplate": "iteration %{x:.0f}: %{y:.4g} s<extra>" + run.name + "</extra>",
            }
        )
    layout = {
        "xaxis": iteration_axis(most_iterations(runs)),
        "yaxis": titled("seconds", rangemode="tozero"),
        "hovermode": "x",
    }
    return Figure("time", traces, with_part_marks(layout, runs), 280)
