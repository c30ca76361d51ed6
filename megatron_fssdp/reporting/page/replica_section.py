"""Page section on replicas over time and the bytes that were moved for them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_fssdp.reporting.page.device_load_section import NO_LAYERS
from megatron_fssdp.reporting.page.iteration_bins import IterationBins
from megatron_fssdp.reporting.page.reported_run import ReportedRun, most_iterations
from megatron_fssdp.reporting.page.section import Figure, Section, above, iteration_axis, packed, titled

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
    figures = [_curves(recorded)]
    figures += [_by_layer(run, i) for i, run in enumerate(recorded) if run.records.total("num_replicas") > 0]
    notes = [
        f"{run.name}: experts moved to new owners before {len(run.records.reshards)} iterations (marked by "
        "triangles)."
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


def _curves(runs: Sequence[ReportedRun]) -> Figure:
    traces: list[dict[str, Any]] = []
    for run in runs:
        metrics = run.records.metrics
        bins = IterationBins(run.records.iterations, MOST_POINTS)
        x, mode = packed(bins.middles), "lines+markers" if len(bins.middles) < 3 else "lines"
        totals = {
            field: np.array([sum(getattr(layer, field) for layer in record.layers) for record in metrics])
            for field in ("num_replicas", "spag_bytes", "sprs_bytes")
        }
        line = {"color": run.colour, "width": 2}
        traces.append(
            {
                "type": "scatter",
                "mode": mode,
                "name": run.name,
                "legendgroup": run.name,
                "x": x,
                "y": packed(bins.mean(totals["num_replicas"])),
                "line": {**line, "shape": "hv"},
                "hovertemplate": "iteration %{x:.0f}: %{y:.4g} replicas<extra>" + run.name + "</extra>",
            }
        )
        for field, word, dash in (("spag_bytes", "spAG", "solid"), ("sprs_bytes", "spRS", "dot")):
            traces.append(
                {
                    "type": "scatter",
                    "mode": mode,
                    "name": f"{run.name}, {word}",
                    "x": x,
                    "y": packed(bins.mean(totals[field])),
                    "xaxis": "x2",
                    "yaxis": "y2",
                    "line": {**line, "dash": dash},
                    "hovertemplate": "iteration %{x:.0f}: %{y:.4s}B<extra>" + f"{run.name}, {word}</extra>",
                }
            )
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
    moves = any(run.records.total("spag_bytes") + run.records.total("sprs_bytes") for run in runs)
    layout = {
        "xaxis": iteration_axis(most_iterations(runs), domain=[0, 0.46]),
        "xaxis2": iteration_axis(most_iterations(runs), domain=[0.54, 1], anchor="y2", matches="x"),
        "yaxis": titled("replicas, all layers", rangemode="tozero"),
        "yaxis2": titled(
            "bytes per iteration",
            anchor="x2",
            rangemode="tozero",
            tickformat="~s",
            ticksuffix="B",
            **({} if moves else {"tickvals": [0]}),
        ),
        "margin": {"t": 84},
        "legend": {"y": 1.12},
        "annotations": [above("Replicas", 0, 1), above("Bytes between devices", 0.54, 1)],
    }
    return Figure("replicas", traces, layout, 340)


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
