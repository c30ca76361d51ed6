"""Figures of all pages: arrays in, plotly figure out.

Shape letters: I iterations, B bins of iterations, L MoE layers, E experts.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray
from plotly.subplots import make_subplots

from megatron_fssdp.records.loads import RecordedLoads
from megatron_fssdp.report.colours import TIME_PARTS

GREY = "#8A8F98"  # of reference lines, visible on light and dark backgrounds
DASHES = ("solid", "dash", "dot", "dashdot")  # of curves in turn, so that those which coincide stay visible

_MOST_POINTS = 600  # of a curve
_MOST_COLUMNS = 300  # of a heat map
_MOST_CELLS = 400_000  # of all heat maps of a page, which keeps it at a few megabytes
# Blue is idle, pale is even, orange to brown is overloaded. Colour-blind readers can distinguish both ends.
_IDLE, _UNDER, _EVEN, _OVER, _CROWDED = "#08306B", "#6BAED6", "#F2EFE6", "#F28E2B", "#7F2704"


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


def bin_words(lines: Sequence[Line]) -> list[str]:
    """Return a sentence on the size of bins, if they hold several iterations."""
    width = -(-max(len(line.iterations) for line in lines) // _MOST_POINTS)
    return [f"Each point is the mean of {width} iterations."] if width > 1 else []


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
    figure = new_figure(title, "iteration", y_title, height, hovermode="x")
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
        values = [found.get(part, 0.0) for found in parts_s.values()]
        if any(values):
            form = f"%{{y}}: %{{x:.4s}}s<extra>{name}</extra>"
            bar = {"x": values, "y": list(parts_s), "marker_color": colour, "hovertemplate": form}
            figure.add_bar(orientation="h", name=name, **bar)
    return figure


def device_loads(title: str, lines: Sequence[Line]) -> go.Figure:
    """Return curves of max/mean device loads, with a line at 1, where all devices have the same load."""
    figure = curves(title, "max / mean device load", lines, ".2f", 340)
    return figure.add_hline(y=1, line={"color": GREY, "width": 1})


def layer_loads(
    title: str, iterations_I: NDArray[np.int64], layers: Sequence[int], loads: Mapping[str, NDArray[Any]]
) -> go.Figure:
    """Return heat maps side by side, by their headings: max/mean device loads, float64 ``[I, L]``."""
    names = [str(layer) for layer in layers]
    figure = _heat_maps(title, iterations_I, loads, "layer", "max / mean", _MOST_POINTS, names)
    return figure.update_layout(height=175 + min(420, 24 * len(layers)))


def expert_loads(title: str, loads: RecordedLoads, num_figures: int = 1) -> go.Figure:
    """Return one heat map for each layer; ``num_figures`` of these share the page's room for cells."""
    load_ILE = relative_load_ILE(loads.of_whole_iterations().counts_ILDE)
    room = _MOST_CELLS // (load_ILE[0].size * num_figures)
    maps = {f"layer {layer}": load_ILE[:, i] for i, layer in enumerate(loads.layers)}
    most = max(24, min(_MOST_COLUMNS, room))
    return _heat_maps(title, loads.iterations, maps, "expert", "× even share", most)


def _heat_maps(
    title: str,
    iterations_I: NDArray[np.int64],
    maps: Mapping[str, NDArray[Any]],
    y_title: str,
    unit: str,
    most: int,
    names: list[str] | None = None,  # of the rows, if they are no numbers
) -> go.Figure:
    """Return heat maps over iterations, by their headings, with one scale on which 1 is even."""
    num_columns = min(len(maps), 2 if len(maps) <= 4 else 3)
    num_rows = -(-len(maps) // num_columns)
    found = {heading: binned(iterations_I, values, most) for heading, values in maps.items()}
    num_cells = next(iter(found.values()))[1].shape[1]
    row_height = 210 if num_cells <= 32 else 240
    figure = make_subplots(
        num_rows,
        num_columns,
        subplot_titles=list(maps),
        shared_xaxes="all",
        shared_yaxes="all",
        horizontal_spacing=0.055,
        vertical_spacing=min(52 / (num_rows * row_height), 0.8 / max(num_rows - 1, 1)),
    )
    for i, (heading, (x, load_BY)) in enumerate(found.items()):
        place = {"row": i // num_columns + 1, "col": i % num_columns + 1}
        form = f"iteration %{{x:.0f}}, {y_title} %{{y}}: %{{z:.2f}} {unit}<extra>{heading}</extra>"
        figure.add_heatmap(x=x, y=names, z=load_BY.T, coloraxis="coloraxis", hovertemplate=form, **place)
        if i % num_columns == 0:
            figure.update_yaxes(title_text=y_title, **place)
        if i + num_columns >= len(maps):
            few = ticks(len(iterations_I), 12 // num_columns)
            figure.update_xaxes(title_text="iteration", showticklabels=True, **few, **place)
    if names is None:
        figure.update_yaxes(ticks(num_cells, 8))
    else:
        figure.update_yaxes(type="category", autorange="reversed")
    # The scale ignores the highest 0.1 %, so that a short peak does not make everything else pale.
    highest = max(2.0, float(np.quantile([values for _, values in found.values()], 0.999)))
    even = 1 / highest
    over = even + 0.4 * (1 - even)
    scale = [[0.0, _IDLE], [0.55 * even, _UNDER], [even, _EVEN], [over, _OVER], [1.0, _CROWDED]]
    figure.update_layout(
        template="none",
        title_text=title,
        height=110 + num_rows * row_height,
        coloraxis={"colorscale": scale, "cmin": 0, "cmax": highest, "colorbar_title_text": unit},
    )
    # The headings stand at the left edges, in the page's own font.
    for axis, heading in zip(figure.select_xaxes(), figure.layout.annotations, strict=False):
        heading.update(x=axis.domain[0], xanchor="left", font=None)
    return figure


def relative_load_ILE(counts_ILDE: NDArray[Any]) -> NDArray[np.float64]:
    """Return the tokens of each expert over the mean of its layer; 0 in a layer without tokens."""
    tokens_ILE = counts_ILDE.sum(axis=2, dtype=np.int64)
    return tokens_ILE / np.maximum(tokens_ILE.mean(axis=2, keepdims=True), 1e-12)
