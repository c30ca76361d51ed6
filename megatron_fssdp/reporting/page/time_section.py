"""Page section on the time of an iteration and its parts.

Shape letters: I iterations.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_fssdp.reporting.colours import TIME_PARTS
from megatron_fssdp.reporting.page.iteration_bins import IterationBins
from megatron_fssdp.reporting.page.part_marks import with_part_marks
from megatron_fssdp.reporting.page.reported_run import ReportedRun, most_iterations
from megatron_fssdp.reporting.page.section import Figure, Section, iteration_axis, packed, titled
from megatron_fssdp.reporting.records.recorded_run import RecordedRun
from megatron_fssdp.reporting.records.run_parts import not_comparable

MOST_POINTS = 600

MEASURED_PARTS = ("passes", "waiting for spAG", "waiting for spRS", "re-sharding", "rest")
"""Keys of the parts that a run measures, in ``TIME_PARTS``."""


def time_parts(run: RecordedRun) -> dict[str, NDArray[np.float64]]:
    """Divide the seconds of each iteration into parts, which add up to the whole iteration.

    Args:
        run: Records of the run.

    Returns:
        Seconds of each part, float64 ``[I]``, by the keys in :data:`MEASURED_PARTS`. If the seconds of the
        passes were not recorded, they are included in the last part.
    """
    whole_I = np.array([record.iteration_s for record in run.metrics])
    passes_I = np.array([record.passes_s for record in run.metrics])
    gather_I, reduce_I = (
        np.array([sum(getattr(layer, field) for layer in record.layers) for record in run.metrics])
        for field in ("spag_exposed_s", "sprs_exposed_s")
    )
    reshard_I = np.array([record.reshard_s for record in run.metrics])
    # Pipeline stages wait at the same time, so the sum of their waits can exceed the time of the passes.
    waits_I = np.maximum(gather_I + reduce_I, 1e-12)
    share_I = np.minimum(1.0, np.where(passes_I > 0, passes_I, whole_I - reshard_I) / waits_I)
    gather_I, reduce_I = gather_I * share_I, reduce_I * share_I
    inner_I = np.where(passes_I > 0, passes_I - gather_I - reduce_I, 0.0)
    rest_I = whole_I - reshard_I - inner_I - gather_I - reduce_I
    return dict(
        zip(MEASURED_PARTS, (inner_I, gather_I, reduce_I, reshard_I, np.maximum(rest_I, 0.0)), strict=True)
    )


def time_section(runs: Sequence[ReportedRun]) -> Section:
    """Make the section: the mean parts of every run's iterations, and the time of each iteration.

    Args:
        runs: Runs of the page.
    """
    figures = [_means(runs)]
    if len(runs) == 1:
        figures.append(_stacked(runs[0]))
    else:
        figures.append(_iterations(runs))
    notes = [
        "Waits are measured on the first device of each expert-parallel group, averaged over the groups, and "
        "summed over layers. Passes include the dispatch of tokens and the reduction of gradients."
    ]
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
        "Seconds of an iteration on the first rank. Transfers of weights and gradients count only while "
        "compute waits for them. Transfers that are hidden under compute cost no time."
    )
    return Section("time", "Iteration time", lead, tuple(figures), notes=tuple(notes))


def _means(runs: Sequence[ReportedRun]) -> Figure:
    # The first iteration also allocates and compiles, so the mean leaves it out. The curves below show it.
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
    return Figure("time-means", traces, layout, 170 + 40 * len(runs))


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
