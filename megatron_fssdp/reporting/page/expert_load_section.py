"""Page section with heat maps of the load of every expert over iterations, one for each layer.

Shape letters: I iterations, L MoE layers, D devices, E experts, B bins of iterations.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_fssdp.reporting.html.iteration_bins import IterationBins
from megatron_fssdp.reporting.html.section import FEW, Figure, Section, above, every_tick, packed, titled
from megatron_fssdp.reporting.page.device_load_section import NO_LAYERS
from megatron_fssdp.reporting.page.reported_run import ReportedRun
from megatron_fssdp.reporting.records.arrays.load_records import RecordedLoads

_EVERY_EXPERT = "Load of every expert, × even share"

MOST_COLUMNS = 300
MOST_CELLS = 400_000
"""Maximum number of cells of all heat maps together, so that a page has only a few megabytes."""

SAME = 0.01
"""Runs are shown once if the mean difference of their relative loads is less than this number.

Placement does not change what routers do, so runs with the same seed have the same loads.
"""

# Blue is idle, pale is even, orange to brown is overloaded. Colour-blind readers can distinguish both ends.
_IDLE, _UNDER, _EVEN, _OVER, _CROWDED = "#08306B", "#6BAED6", "#F2EFE6", "#F28E2B", "#7F2704"


def expert_load_section(runs: Sequence[ReportedRun]) -> Section:
    """Make the section with the load of every expert, relative to an even share.

    Args:
        runs: Runs of the page.
    """
    title = "Expert load over iterations"
    figures, notes, missing = [], [], []
    shown: list[ReportedRun] = []
    for i, run in enumerate(runs):
        if run.loads is None or not len(run.loads.iterations):
            absent = (
                NO_LAYERS
                if not run.records.layers
                else "loads.npy is not written yet. Wait, then run the report again."
            )
            missing.append(absent)
            notes.append(f"{run.name}: {absent}")
            continue
        twin = next((one for one in shown if _are_alike(one.loads, run.loads)), None)
        if twin is not None:
            notes.append(
                f"{run.name} is not shown: its loads differ from those of {twin.name} by less than "
                f"{SAME:.0%}."
            )
            continue
        shown.append(run)
        bins = bins_of(run.loads, len(runs))
        words = f"{run.name}: load of every expert" if len(runs) > 1 else _EVERY_EXPERT
        figures.append(expert_load_figure(f"expert-load-{i}", run.loads, bins, words))
        if sentence := bins.describe():
            notes.append(f"{run.name}: {sentence}")
    if not figures:
        return Section("expert-load", title, "", missing=missing[0])
    lead = (
        "Tokens that the router sent to each expert, divided by an even share. Pale is an even share, orange "
        "is more, blue is less. Replicas help experts that stay orange for many iterations. Planning from "
        "past iterations misses stripes that jump between experts."
    )
    return Section("expert-load", title, lead, tuple(figures), notes=tuple(notes))


def bins_of(loads: RecordedLoads, num_runs: int) -> IterationBins:
    """Group iterations into as many columns as fit on a page of ``num_runs`` runs."""
    _, num_layers, _, num_experts = loads.counts_ILDE.shape
    room = MOST_CELLS // (num_layers * num_experts * num_runs)
    return IterationBins(loads.iterations, max(24, min(MOST_COLUMNS, room)))


def relative_load_ILE(loads: RecordedLoads) -> NDArray[np.float64]:
    """Return the tokens of each expert divided by the mean of its layer, float64 ``[I, L, E]``.

    The values of a layer without tokens are 0.
    """
    tokens_ILE = loads.counts_ILDE.sum(axis=2, dtype=np.int64)
    mean_IL = tokens_ILE.mean(axis=2, keepdims=True)
    return np.where(mean_IL > 0, tokens_ILE / np.maximum(mean_IL, 1e-12), 0.0)


def _are_alike(one: RecordedLoads | None, other: RecordedLoads | None) -> bool:
    assert one is not None
    assert other is not None
    if (
        not np.array_equal(one.iterations, other.iterations)
        or one.counts_ILDE.shape != other.counts_ILDE.shape
    ):
        return False
    difference = np.abs(relative_load_ILE(one) - relative_load_ILE(other))
    return float(difference.mean()) < SAME


def expert_load_figure(
    name: str, loads: RecordedLoads, bins: IterationBins, title: str = _EVERY_EXPERT
) -> Figure:
    """Return the figure with one heat map of expert loads for each layer.

    Args:
        name: Name of the figure on its page.
        loads: Router counts.
        bins: Groups of the iterations, from :func:`bins_of`.
        title: Title of the figure.
    """
    load_BLE = bins.mean(relative_load_ILE(loads))
    num_layers, num_experts = load_BLE.shape[1:]
    num_columns = min(num_layers, 2 if num_layers <= 4 else 3)
    num_rows = -(-num_layers // num_columns)
    # The colour scale ignores the highest 0.1 %, so that a short peak does not make everything else pale.
    highest = max(2.0, float(np.quantile(load_BLE, 0.999)))
    gap_x, row_height = 0.055, 210 if num_experts <= 32 else 240
    height = 110 + num_rows * row_height
    gap_y = 52 / (num_rows * row_height)
    width_x = (1 - gap_x * (num_columns - 1)) / num_columns
    width_y = (1 - gap_y * (num_rows - 1)) / num_rows
    traces, annotations, layout = [], [], {}
    for layer in range(num_layers):
        row, column = divmod(layer, num_columns)
        left, top = column * (width_x + gap_x), 1 - row * (width_y + gap_y)
        axis = "" if layer == 0 else str(layer + 1)
        traces.append(
            {
                "type": "heatmap",
                "x": packed(bins.middles),
                "z": packed(load_BLE[:, layer].T),
                "coloraxis": "coloraxis",
                "xaxis": f"x{axis}",
                "yaxis": f"y{axis}",
                "hovertemplate": (
                    "iteration %{x:.0f}, expert %{y}: %{z:.2f} × even share"
                    f"<extra>layer {int(loads.layers[layer])}</extra>"
                ),
            }
        )
        is_last = layer + num_columns >= num_layers
        layout[f"xaxis{axis}"] = {
            **titled("iteration" if is_last else "", domain=[left, left + width_x], anchor=f"y{axis}"),
            **({"matches": "x"} if layer else {}),
            **every_tick(len(loads.iterations), FEW // num_columns),
            "showgrid": False,
        }
        layout[f"yaxis{axis}"] = {
            **titled("" if column else "expert", domain=[max(0.0, top - width_y), top], anchor=f"x{axis}"),
            **({"matches": "y"} if layer else {}),
            **every_tick(num_experts, 8),
            "showgrid": False,
            "showticklabels": column == 0,
        }
        annotations.append(above(f"layer {int(loads.layers[layer])}", left, top))
    return Figure(
        name,
        traces,
        {
            **layout,
            "title": {"text": title},
            "annotations": annotations,
            "coloraxis": {
                "colorscale": _scale(highest),
                "cmin": 0.0,
                "cmax": highest,
                "colorbar": {"title": {"text": "× even share", "side": "right"}, "thickness": 12},
            },
        },
        height,
    )


def _scale(highest: float) -> list[list[Any]]:
    even = 1 / highest
    return [
        [0.0, _IDLE],
        [0.55 * even, _UNDER],
        [even, _EVEN],
        [even + 0.4 * (1 - even), _OVER],
        [1.0, _CROWDED],
    ]
