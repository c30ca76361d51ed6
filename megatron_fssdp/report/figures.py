"""Figures of all pages: arrays in, plotly figure out.

Shape letters: I iterations, B bins of iterations, L MoE layers, E experts; C heat maps, Y rows of a map.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import plotly.express as px
import plotly.graph_objects as go
from numpy.typing import NDArray

from megatron_fssdp.report.colours import TIME_PARTS

GREY = "#8A8F98"  # of reference lines, visible on light and dark backgrounds
DASHES = ("solid", "dash", "dot", "dashdot")  # of curves in turn, so that those which coincide stay visible

_MOST_POINTS = 600  # of a curve
_MOST_COLUMNS = 300  # of a heat map
_MOST_CELLS = 400_000  # of all heat maps of a page, which keeps it at a few megabytes
# Blue is idle, pale is even, orange to brown is overloaded. Colour-blind readers can distinguish both ends.
_IDLE, _UNDER, _EVEN, _OVER, _CROWDED = "#08306B", "#6BAED6", "#F2EFE6", "#F28E2B", "#7F2704"
_NUMBERS = [(0.0, "rgba(138,143,152,0.16)"), (0.001, "#FBD5A8"), (1.0, "#D94801")]


class Line(NamedTuple):
    """One curve over iterations, in a colour ``#RRGGBB``."""

    name: str
    colour: str
    iterations: NDArray[np.int64]
    values: NDArray[Any]
    dash: str = "solid"


def binned(
    iterations_I: NDArray[np.int64], values: NDArray[Any], most: int = _MOST_POINTS
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Average consecutive iterations of values ``[I, …]`` into at most so many bins.

    Return the mean iteration of each bin, float32 ``[B]``, and the mean of its values, float32 ``[B, …]``,
    without NaN where there is something else.
    """
    starts = np.arange(0, len(iterations_I), -(-len(iterations_I) // most))
    known = np.isfinite(values)
    count = np.add.reduceat(known, starts, axis=0, dtype=np.int64)
    total = np.add.reduceat(np.where(known, values, 0.0), starts, axis=0)
    middles = np.add.reduceat(iterations_I, starts) / np.diff([*starts, len(iterations_I)])
    means = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    return middles.astype(np.float32), means.astype(np.float32)


def new_figure(title: str, x_title: str, y_title: str, height: int, **layout: Any) -> go.Figure:
    """Return an empty figure of some height in pixels. The page shows its title and adds its colours."""
    titles = {"title_text": title, "xaxis_title_text": x_title, "yaxis_title_text": y_title}
    return go.Figure(layout={"template": "none", "height": height, **titles, **layout})


def ticks(count: int, most: int = 12) -> dict[str, Any]:
    """Return axis settings: a tick at every number, if there are at most ``most``."""
    return {"dtick": 1} if count <= most else {}


def curves(
    title: str, y_title: str, lines: Sequence[Line], form: str, height: int = 320, *, stacked: bool = False
) -> go.Figure:
    """Return curves over iterations, or areas on top of each other; ``form`` is of values at the pointer."""
    width = -(-max(len(line.iterations) for line in lines) // _MOST_POINTS)
    x_title = "iteration" if width == 1 else f"iteration; each point is the mean of {width}"
    figure = new_figure(title, x_title, y_title, height, hovermode="x")
    figure.update_xaxes(ticks(max(len(line.iterations) for line in lines)))
    for line in lines:
        x, y = binned(line.iterations, line.values)
        figure.add_scatter(
            x=x,
            y=y,
            name=line.name,
            mode="lines+markers" if len(x) < 3 else "lines",  # a line through one point is not seen
            line={"color": line.colour, "width": 0.5 if stacked else 2.2, "dash": line.dash},
            stackgroup="all" if stacked else None,
            showlegend=not stacked,  # the bars above have the legend
            hovertemplate=f"%{{y:{form}}}<extra>{line.name}</extra>",
        )
    return figure


def time_bars(title: str, parts_s: Mapping[str, Mapping[str, float]]) -> go.Figure:
    """Return stacked bars of an iteration's parts: seconds by the keys of ``TIME_PARTS``, by bars' names."""
    figure = new_figure("", title, "", 240 + 36 * len(parts_s), barmode="stack", bargap=0.35, margin_t=92)
    figure.update_xaxes(rangemode="tozero", tickformat="~s", ticksuffix="s")
    figure.update_yaxes(autorange="reversed", type="category")
    for part, (name, colour) in TIME_PARTS.items():
        values = [seconds.get(part, 0.0) for seconds in parts_s.values()]
        if any(values):
            form = f"%{{y}}: %{{x:.4s}}s<extra>{name}</extra>"
            bar = {"x": values, "y": list(parts_s), "marker_color": colour, "hovertemplate": form}
            figure.add_bar(orientation="h", name=name, **bar)
    return figure


def device_loads(title: str, lines: Sequence[Line]) -> go.Figure:
    """Return curves of max/mean device loads, with a line at 1, where all devices have the same load."""
    figure = curves(title, "max / mean device load", lines, ".2f", 340)
    return figure.add_hline(y=1, line={"color": GREY, "width": 1})


def expert_maps(
    title: str,
    unit: str,
    iterations_I: NDArray[np.int64],
    layers_L: NDArray[np.int64],
    values_ILE: NDArray[Any],
    num_figures: int = 1,
) -> go.Figure:
    """Return a heat map of experts for each layer (:func:`heat_maps`)."""
    maps = {f"layer {layer}": values_ILE[:, i] for i, layer in enumerate(layers_L)}
    return heat_maps(title, "expert", unit, iterations_I, maps, num_figures=num_figures)


def heat_maps(
    title: str,
    y_title: str,
    unit: str,
    iterations_I: NDArray[np.int64],
    maps: Mapping[str, NDArray[Any]],
    names: Sequence[str] | None = None,
    num_figures: int = 1,
) -> go.Figure:
    """Return heat maps of values ``[I, Y]`` over iterations, by their headings, with one scale.

    Integers are numbers of things; of other values, 1 is even. ``names`` are of the rows, if these are not
    numbered from 0. ``num_figures`` of these share the page's room for cells.
    """
    values_ICY = np.stack(list(maps.values()), axis=1)
    room = _MOST_CELLS // (values_ICY[0].size * num_figures)
    x, mean_BCY = binned(iterations_I, values_ICY, max(24, min(_MOST_COLUMNS, room)))
    num_columns, num_cells = min(len(maps), 2 if len(maps) <= 4 else 3), values_ICY.shape[2]
    num_rows, row_height = -(-len(maps) // num_columns), 210 if num_cells <= 32 else 240
    # The scale ignores the highest 0.1 %, so that a short peak does not make everything else pale.
    highest = max(2.0, float(np.quantile(mean_BCY, 0.999)))
    even = 1 / highest
    over = even + 0.4 * (1 - even)
    scale = [(0.0, _IDLE), (0.55 * even, _UNDER), (even, _EVEN), (over, _OVER), (1.0, _CROWDED)]
    figure = px.imshow(
        mean_BCY.transpose(1, 2, 0),
        x=x,
        y=names,
        labels={"x": "iteration", "y": y_title, "color": unit},
        facet_col=0,
        facet_col_wrap=num_columns,
        facet_col_spacing=0.055,
        facet_row_spacing=min(52 / (num_rows * row_height), 0.8 / max(num_rows - 1, 1)),
        zmin=0,
        zmax=highest,
        color_continuous_scale=_NUMBERS if values_ICY.dtype.kind == "i" else scale,
        origin="lower" if names is None else "upper",
        aspect="auto",
        title=title,
        template="none",
        height=110 + num_rows * row_height if names is None else 175 + min(420, 24 * num_cells),
    )
    headings = list(maps)
    for note in figure.layout.annotations:  # they have the numbers of the maps
        note.update(text=headings[int(note.text.rpartition("=")[2])], font=None)
    form = f"iteration %{{x:.0f}}, {y_title} %{{y}}: %{{z:.3g}} {unit}<extra></extra>"
    figure.update_traces(hovertemplate=form)
    figure.update_xaxes(ticks(len(iterations_I), 12 // num_columns))
    return figure.update_yaxes(ticks(num_cells, 8) if names is None else {"type": "category"})
