"""Page section on replicas over time and the bytes that were moved for them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_fssdp.reporting.html.curves import curve
from megatron_fssdp.reporting.html.iteration_bins import IterationBins
from megatron_fssdp.reporting.html.section import Figure, Section, iteration_axis, packed, titled
from megatron_fssdp.reporting.page.device_load_section import NO_LAYERS
from megatron_fssdp.reporting.page.part_marks import with_part_marks
from megatron_fssdp.reporting.page.reported_run import ReportedRun, most_iterations

MOST_POINTS = 600


def replica_section(runs: Sequence[ReportedRun]) -> Section:
    """Make the section with the number of replicas and the moved bytes, by iteration and layer.

    Args:
        runs: Runs of the page.
    """
    title = "Replicas and bytes over time"
    recorded = [run for run in runs if run.records.layers]
    if not recorded:
        return Section("replicas", title, "", missing=NO_LAYERS)
    figures = [_replicas(recorded), _bytes(recorded)]
    figures += [_by_layer(run, i) for i, run in enumerate(recorded) if run.records.total("num_replicas") > 0]
    notes = [
        f"{run.name}: experts moved to new owners {_times(len(run.records.reshards))} (marked by triangles)."
        for run in recorded
        if run.records.reshards
    ]
    without = [run.name for run in recorded if not run.records.total("num_replicas")]
    if without:
        notes.append(f"No replicas in {', '.join(without)}.")
    lead = (
        "Number of replicas at the end of each iteration, and the bytes of their weights (spAG) and "
        "gradients (spRS) that were moved between devices."
    )
    return Section("replicas", title, lead, tuple(figures), notes=tuple(notes))


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number:,} times"


def _replicas(runs: Sequence[ReportedRun]) -> Figure:
    traces: list[dict[str, Any]] = []
    for run in runs:
        stepped = {"width": 2, "shape": "hv"}
        traces.append(_curve(run, run.name, "num_replicas", stepped, "iteration %{x:.0f}: %{y:.4g} replicas"))
        if run.records.reshards:
            traces.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": f"{run.name}, owners moved",
                    "x": [record.iteration for record in run.records.reshards],
                    "y": [0] * len(run.records.reshards),
                    "customdata": [record.resharded_experts for record in run.records.reshards],
                    "marker": {"symbol": "triangle-up", "size": 9, "color": run.colour},
                    "hovertemplate": "iteration %{x}: %{customdata} experts moved<extra>"
                    + run.name
                    + "</extra>",
                }
            )
    layout = {
        "title": {"text": "Replicas of all layers"},
        "xaxis": iteration_axis(most_iterations(runs)),
        "yaxis": titled("replicas", rangemode="tozero"),
    }
    return Figure("replicas", traces, with_part_marks(layout, runs), 280)


def _bytes(runs: Sequence[ReportedRun]) -> Figure:
    form = "iteration %{x:.0f}: %{y:.4s}B"
    traces = [
        _curve(run, f"{run.name}, {word}", field, {"width": 2, "dash": dash}, form)
        for run in runs
        for field, word, dash in (("spag_bytes", "spAG", "solid"), ("sprs_bytes", "spRS", "dot"))
    ]
    moves = any(run.records.total("spag_bytes") + run.records.total("sprs_bytes") for run in runs)
    y_axis = titled("bytes of an iteration", rangemode="tozero", tickformat="~s", ticksuffix="B")
    layout = {
        "title": {"text": "Bytes between devices: weights (spAG) and gradients (spRS)"},
        "xaxis": iteration_axis(most_iterations(runs)),
        "yaxis": y_axis if moves else y_axis | {"tickvals": [0]},
    }
    return Figure("moved-bytes", traces, layout, 280)


def _curve(run: ReportedRun, name: str, field: str, line: dict[str, Any], form: str) -> dict[str, Any]:
    """Return the trace of a field of the layers' metrics, summed over layers."""
    bins = IterationBins(run.records.iterations, MOST_POINTS)
    totals_I = np.array(
        [sum(getattr(layer, field) for layer in record.layers) for record in run.records.metrics]
    )
    return curve(name, packed(bins.middles), bins.mean(totals_I), run.colour, line, form)


def _by_layer(run: ReportedRun, number: int) -> Figure:
    bins = IterationBins(run.records.iterations, MOST_POINTS)
    replicas_IL = np.array(
        [[layer.num_replicas for layer in record.layers] for record in run.records.metrics]
    )
    names = [str(layer) for layer in run.records.layers]
    trace = {
        "type": "heatmap",
        "x": packed(bins.middles),
        "y": names,
        "z": packed(bins.mean(replicas_IL).T),
        "colorscale": "Cividis",
        "zmin": 0,
        "zmax": int(replicas_IL.max()),
        "colorbar": {"title": {"text": "replicas", "side": "right"}, "thickness": 12},
        "hovertemplate": "iteration %{x:.0f}, layer %{y}: %{z:.4g} replicas<extra></extra>",
    }
    layout = {
        "title": {"text": f"{run.name}: replicas of every layer"},
        "xaxis": iteration_axis(run.num_iterations),
        "yaxis": titled("layer", type="category", autorange="reversed"),
    }
    return Figure(f"replicas-layers-{number}", [trace], layout, 150 + min(420, 24 * len(names)))
