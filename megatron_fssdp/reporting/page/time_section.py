"""What the seconds of an iteration went on.

Shape letters: I iterations.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_fssdp.reporting.page.iteration_bins import IterationBins
from megatron_fssdp.reporting.page.reported_run import ReportedRun, most_iterations
from megatron_fssdp.reporting.page.section import Figure, Section, iteration_axis, packed, titled
from megatron_fssdp.reporting.recorded_run import RecordedRun

MOST_POINTS = 600

PART_COLOURS = {
    "forward and backward passes": "#4E79A7",
    "waiting for weights (spAG)": "#D55E00",
    "waiting for gradients (spRS)": "#E69F00",
    "re-sharding": "#CC79A7",
    "optimizer and everything else": "#A9B4C2",
}


def time_parts(run: RecordedRun) -> dict[str, NDArray[np.float64]]:
    """Seconds of each iteration by what they went on; they add up to the iteration's.

    Args:
        run: Its records.

    Returns:
        A dict over :data:`PART_COLOURS` of (I). Without recorded seconds of passes these are with
        everything else.
    """
    whole_I = np.array([record.iteration_s for record in run.metrics])
    passes_I = np.array([record.passes_s for record in run.metrics])
    gather_I, reduce_I = (
        np.array([sum(getattr(layer, field) for layer in record.layers) for record in run.metrics])
        for field in ("spag_exposed_s", "sprs_exposed_s")
    )
    reshard_I = np.array([record.reshard_s for record in run.metrics])
    # Stages of a pipeline wait at the same time, their sums may be longer than the passes.
    waits_I = np.maximum(gather_I + reduce_I, 1e-12)
    share_I = np.minimum(1.0, np.where(passes_I > 0, passes_I, whole_I - reshard_I) / waits_I)
    gather_I, reduce_I = gather_I * share_I, reduce_I * share_I
    inner_I = np.where(passes_I > 0, passes_I - gather_I - reduce_I, 0.0)
    rest_I = whole_I - reshard_I - inner_I - gather_I - reduce_I
    return dict(
        zip(PART_COLOURS, (inner_I, gather_I, reduce_I, reshard_I, np.maximum(rest_I, 0.0)), strict=True)
    )


def time_section(runs: Sequence[ReportedRun]) -> Section:
    """Mean breakdown of every run, and each iteration of it.

    Args:
        runs: The page's runs.
    """
    figures = [_means(runs)]
    if len(runs) == 1:
        figures.append(_stacked(runs[0]))
    else:
        figures.append(_iterations(runs))
    notes = [
        "Waits are those of the first device of each expert-parallel group (the mean of several groups), "
        "summed over layers; passes include the dispatch of tokens and the reduction of gradients."
    ]
    if any(not any(record.passes_s for record in run.records.metrics) for run in runs):
        notes.append(
            "Seconds of the passes were not recorded in every run; they are with everything else there."
        )
    lead = (
        "Seconds of an iteration on the first rank. Transfers of weights and gradients count only where "
        "compute stood still for them; what is hidden under compute costs nothing."
    )
    return Section("time", "Iteration time", lead, tuple(figures), notes=tuple(notes))


def _means(runs: Sequence[ReportedRun]) -> Figure:
    # The first iteration allocates and compiles; it is in the curves below.
    parts = [
        {
            name: float(values[1:].mean() if len(values) > 1 else values.mean())
            for name, values in found.items()
        }
        for found in (time_parts(run.records) for run in runs)
    ]
    traces: list[dict[str, Any]] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "y": [run.name for run in runs],
            "x": [found[name] for found in parts],
            "marker": {"color": colour},
            "hovertemplate": "%{x:.4g} s<extra>" + name + "</extra>",
        }
        for name, colour in PART_COLOURS.items()
        if any(found[name] for found in parts)
    ]
    words = "seconds of an iteration, mean"
    if most_iterations(runs) > 1:
        words += " without the first"
    layout = {
        "barmode": "stack",
        "xaxis": titled(words, rangemode="tozero"),
        "yaxis": {"autorange": "reversed", "automargin": True},
        "bargap": 0.35,
    }
    return Figure("time-means", traces, layout, 170 + 40 * len(runs))


def _stacked(run: ReportedRun) -> Figure:
    bins = IterationBins(run.records.iterations, MOST_POINTS)
    traces: list[dict[str, Any]] = [
        {
            "type": "bar",
            "name": name,
            "showlegend": False,
            "x": packed(bins.middles),
            "y": packed(bins.mean(seconds_I)),
            "marker": {"color": PART_COLOURS[name], "line": {"width": 0}},
            "hovertemplate": "iteration %{x:.0f}: %{y:.4g} s<extra>" + name + "</extra>",
        }
        for name, seconds_I in time_parts(run.records).items()
        if seconds_I.any()
    ]
    layout = {
        "barmode": "stack",
        "bargap": 0,
        "xaxis": iteration_axis(run.num_iterations),
        "yaxis": titled("seconds", rangemode="tozero"),
    }
    return Figure("time", traces, layout, 280)


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
    return Figure("time", traces, layout, 280)
