"""Page section on device loads: before (plain expert parallelism) and after (the placement that was used).

Shape letters: I iterations, L MoE layers, D devices.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_fssdp.reporting.html.curves import curve, even_load_line
from megatron_fssdp.reporting.html.iteration_bins import IterationBins
from megatron_fssdp.reporting.html.section import (
    GREY,
    Figure,
    Section,
    above,
    every_tick,
    iteration_axis,
    packed,
    titled,
)
from megatron_fssdp.reporting.page.part_marks import with_part_marks
from megatron_fssdp.reporting.page.reported_run import ReportedRun, most_iterations
from megatron_fssdp.reporting.ranked_loads import ranked_load_D

MOST_POINTS = 600
NO_LAYERS = (
    "No loads of MoE layers were recorded, because Megatron's own layer (strategy none) does not report "
    "them. To see the loads of plain expert parallelism, run again with --moe-strategy ep."
)

# Even loads are dark, overloaded devices are bright. The scale works on light and dark backgrounds and does
# not need a distinction of red and green.
_SCALE = "Cividis"

_RATIO = "%{y:.2f}"


def device_load_section(runs: Sequence[ReportedRun]) -> Section:
    """Make the section: max/mean device load by iteration and by layer, and the sorted loads of all devices.

    Args:
        runs: Runs of the page.
    """
    title = "Device load, before and after"
    recorded = [run for run in runs if run.records.layers]
    if not recorded:
        return Section("device-load", title, "", missing=NO_LAYERS)
    figures = [_curves(recorded)]
    figures += [_strips(run, i) for i, run in enumerate(recorded) if len(runs) == 1 or not _is_plain(run)]
    ranked = [run for run in recorded if run.placements is not None]
    if ranked:
        figures.append(_ranked(ranked))
    lead = (
        "Tokens of the busiest device, divided by the mean of all devices. 1 is even. A layer takes as long "
        "as its busiest device. Before: the load under plain expert parallelism, with every expert only on "
        "its owner. After: the load under the placement that was used."
    )
    notes = [IterationBins(recorded[0].records.iterations, MOST_POINTS).describe()]
    notes += [f"{run.name}: {NO_LAYERS}" for run in runs if run not in recorded]
    return Section("device-load", title, lead, tuple(figures), notes=tuple(note for note in notes if note))


def load_before_IL(run: ReportedRun) -> NDArray[np.float64]:
    """Return the max/mean device load under plain expert parallelism, float64 ``[I, L]``."""
    return np.array(
        [[layer.ep_load_max_over_mean for layer in record.layers] for record in run.records.metrics]
    )


def _is_plain(run: ReportedRun) -> bool:
    """Whether the loads before and after are the same, so that the run itself is the line to compare with."""
    return bool(np.array_equal(load_before_IL(run), run.records.load_IL))


def _curves(runs: Sequence[ReportedRun]) -> Figure:
    traces: list[dict[str, Any]] = []
    for i, run in enumerate(runs):
        bins = IterationBins(run.records.iterations, MOST_POINTS)
        x = packed(bins.middles)
        before_IL, after_IL = load_before_IL(run), run.records.load_IL
        if i == 0 and not any(_is_plain(one) for one in runs):
            mean = bins.mean(before_IL.mean(axis=1))
            dashed = {"dash": "dash", "width": 2}
            traces.append(curve("before (plain EP), mean of layers", x, mean, GREY, dashed, _RATIO))
        mean, worst = bins.mean(after_IL.mean(axis=1)), bins.mean(after_IL.max(axis=1))
        # A band fills the space between the mean and the worst layer.
        dotted = {"width": 1, "dash": "dot"}
        band = curve(f"{run.name}, worst layer", x, worst, run.colour, dotted, _RATIO)
        line = curve(f"{run.name}, mean of layers", x, mean, run.colour, {"width": 2.5}, _RATIO)
        traces += [line, {**band, "fill": "tonexty", "fillcolor": run.colour + "22"}]
    layout = {
        "title": {"text": "Busiest device, max / mean"},
        "xaxis": iteration_axis(most_iterations(runs)),
        "yaxis": titled("max / mean device load"),
        "hovermode": "x",
        "shapes": [even_load_line()],
    }
    return Figure("device-load", traces, with_part_marks(layout, runs), 360)


def _strips(run: ReportedRun, number: int) -> Figure:
    bins = IterationBins(run.records.iterations, MOST_POINTS)
    before_IL, after_IL = load_before_IL(run), run.records.load_IL
    # The colour scale ignores the highest 0.5 %, so that a peak at the start does not make the rest dark.
    highest = max(1.05, float(np.quantile([before_IL, after_IL], 0.995)))
    names = [str(layer) for layer in run.records.layers]
    traces = [
        {
            "type": "heatmap",
            "x": packed(bins.middles),
            "y": names,
            "z": packed(bins.mean(load_IL).T),
            "coloraxis": "coloraxis",
            "xaxis": f"x{axis}",
            "yaxis": f"y{axis}",
            "hovertemplate": "iteration %{x:.0f}, layer %{y}: %{z:.2f}<extra>" + word + "</extra>",
        }
        for axis, word, load_IL in (("", "before", before_IL), ("2", "after", after_IL))
    ]
    reversed_layers = {"type": "category", "autorange": "reversed"}
    layout = {
        "title": {"text": f"{run.name}: every layer"},
        "xaxis": iteration_axis(run.num_iterations, domain=[0, 0.475]),
        "xaxis2": iteration_axis(run.num_iterations, domain=[0.525, 1], anchor="y2", matches="x"),
        "yaxis": titled("layer", **reversed_layers),
        "yaxis2": {**reversed_layers, "anchor": "x2", "matches": "y", "showticklabels": False},
        "coloraxis": {
            "colorscale": _SCALE,
            "cmin": 1.0,
            "cmax": highest,
            "colorbar": {"title": {"text": "max / mean", "side": "right"}, "thickness": 12},
        },
        "annotations": [above("before (plain EP)", 0, 1), above("after", 0.525, 1)],
    }
    return Figure(f"device-load-layers-{number}", traces, layout, 170 + min(420, 24 * len(names)))


def _ranked(runs: Sequence[ReportedRun]) -> Figure:
    traces: list[dict[str, Any]] = []
    any_plain = any(_is_plain(run) for run in runs)
    for i, run in enumerate(runs):
        assert run.placements is not None
        before = ("before (plain EP)", run.placements.ep_tokens_ILD, GREY)
        after = (run.name, run.placements.tokens_ILD, run.colour)
        for name, tokens_ILD, colour in (before, after) if i == 0 and not any_plain else (after,):
            ranked_D = ranked_load_D(tokens_ILD)
            traces.append(
                {
                    "type": "bar",
                    "name": name,
                    "x": list(range(1, len(ranked_D) + 1)),
                    "y": packed(ranked_D),
                    "marker": {"color": colour},
                    "hovertemplate": "%{y:.2f} × mean<extra>" + name + "</extra>",
                }
            )
    layout = {
        "title": {"text": "All devices, sorted by load in each iteration"},
        "barmode": "group",
        "bargap": 0.25,
        "xaxis": titled("device, from the busiest to the least busy", **every_tick(len(traces[0]["x"]), 16)),
        "yaxis": titled("mean of load / mean load", rangemode="tozero"),
        "shapes": [even_load_line()],
    }
    return Figure("device-load-ranked", traces, layout, 300)
