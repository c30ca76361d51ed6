"""Figures of all pages: arrays in, plotly figure out.

Shape letters: I iterations, B bins of iterations, L MoE layers, D devices, E experts.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray
from plotly.subplots import make_subplots

from megatron_fssdp.report.colours import TIME_PARTS

GREY = "#8A8F98"
"""Colour of reference lines, visible on light and dark backgrounds."""

MOST_POINTS = 600
"""Most points of a curve."""

_MOST_COLUMNS, _MOST_CELLS = 300, 400_000
"""Most columns of a heat map, and cells of all heat maps of a page, which keeps it at a few megabytes."""

DASHES = ("solid", "dash", "dot", "dashdot")
"""Styles of curves, in turn, so that curves which coincide stay visible."""

# Even loads are dark, overloaded devices are bright: visible on light and dark backgrounds, and not a
# distinction of red and green.
LOAD_SCALE = "Cividis"

# Blue is idle, pale is even, orange to brown is overloaded. Colour-blind readers can distinguish both ends.
_IDLE, _UNDER, _EVEN, _OVER, _CROWDED = "#08306B", "#6BAED6", "#F2EFE6", "#F28E2B", "#7F2704"


class Line(NamedTuple):
    """One curve over iterations, in a colour ``#RRGGBB``; ``fills``: the space down to the curve before."""

    name: str
    colour: str
    iterations: NDArray[np.int64]
    values: NDArray[Any]
    dash: str = "solid"
    fills: bool = False


def mean(values: NDArray[Any]) -> NDArray[np.float64]:
    """Return the mean along the first axis, without NaN; NaN where there is nothing else."""
    known = np.isfinite(values)
    total = np.where(known, values, 0.0).sum(axis=0) / np.maximum(known.sum(axis=0), 1)
    return np.where(known.any(axis=0), total, np.nan)


def binned(
    iterations_I: NDArray[np.int64],
    values: NDArray[Any],
    most: int = MOST_POINTS,
    of_bin: Callable[[NDArray[Any]], NDArray[Any]] = mean,
) -> tuple[NDArray[np.float32], NDArray[Any]]:
    """Group consecutive iterations if there are more than a figure can show.

    Args:
        iterations_I: Iteration numbers.
        values: Values ``[I, …]``.
        most: Most bins B.
        of_bin: Makes one value of several along the first axis.

    Returns:
        The mean iteration of each bin, float32 ``[B]``, and the values, ``[B, …]``.
    """
    width = -(-len(iterations_I) // most)
    if width == 1:
        return iterations_I.astype(np.float32), _small(values)
    starts = range(0, len(iterations_I), width)
    middles = np.array([iterations_I[start : start + width].mean() for start in starts], np.float32)
    return middles, _small(np.stack([of_bin(values[start : start + width]) for start in starts]))


def bin_words(num_iterations: int, most: int = MOST_POINTS) -> str:
    """Return a sentence on the size of bins. It is empty if each bin holds one iteration."""
    width = -(-num_iterations // most)
    return f"Each point is the mean of {width} iterations." if width > 1 else ""


def _small(values: NDArray[Any]) -> NDArray[Any]:
    return values.astype(np.float32) if values.dtype.kind == "f" else values


def new_figure(title: str, x_title: str, y_title: str, height: int, **layout: Any) -> go.Figure:
    """Return an empty figure of some height in pixels. The page shows its title and adds its colours."""
    titles = {"title_text": title, "xaxis_title_text": x_title, "yaxis_title_text": y_title}
    return go.Figure(layout={"template": "none", "height": height, **titles, **layout})


def ticks(count: int, most: int = 12) -> dict[str, Any]:
    """Return axis settings with a tick at every whole number, if there are at most ``most`` numbers."""
    return {"dtick": 1} if count <= most else {}


def curves(title: str, y_title: str, lines: Sequence[Line], form: str, height: int = 320) -> go.Figure:
    """Return curves over iterations; ``form`` is how a value is written at the pointer, such as ``.2f``."""
    figure = new_figure(title, "iteration", y_title, height, hovermode="x")
    figure.update_xaxes(ticks(max(len(line.iterations) for line in lines)))
    for line in lines:
        x, y = binned(line.iterations, line.values)
        figure.add_scatter(
            x=x,
            y=y,
            name=line.name,
            mode="lines+markers" if len(x) < 3 else "lines",  # a line through one point is not seen
            line={"color": line.colour, "width": 1 if line.fills else 2.2, "dash": line.dash},
            fill="tonexty" if line.fills else None,
            fillcolor=f"rgba{(*_rgb(line.colour), 0.13)}" if line.fills else None,
            showlegend=True,
            hovertemplate=f"%{{y:{form}}}<extra>{line.name}</extra>",
        )
    return figure


def _rgb(colour: str) -> tuple[int, int, int]:
    red, green, blue = bytes.fromhex(colour[1:])
    return red, green, blue


def time_bars(title: str, names: Sequence[str], parts_s: Sequence[Mapping[str, float]]) -> go.Figure:
    """Return stacked bars of an iteration's parts: seconds of each bar, by the keys of ``TIME_PARTS``."""
    bars = {
        name: (colour, [found.get(part, 0.0) for found in parts_s])
        for part, (name, colour) in TIME_PARTS.items()
    }
    return stacked_bars(title, names, bars, tickformat="~s", ticksuffix="s")


def stacked_bars(
    x_title: str, names: Sequence[str], bars: Mapping[str, tuple[str, Sequence[float]]], **x_axis: Any
) -> go.Figure:
    """Return horizontal bars: colour and values of each part, from top to bottom, without empty parts."""
    figure = new_figure("", x_title, "", 240 + 36 * len(names), barmode="stack", bargap=0.35, margin_t=92)
    figure.update_xaxes(rangemode="tozero", **x_axis)
    figure.update_yaxes(autorange="reversed", type="category")
    for part, (colour, values) in bars.items():
        if any(values):
            form = f"%{{y}}: %{{x:.4s}}{x_axis.get('ticksuffix', '')}<extra>{part}</extra>"
            bar = {"x": list(values), "y": list(names), "marker_color": colour, "hovertemplate": form}
            figure.add_bar(orientation="h", name=part, **bar)
    return figure


def sorted_devices(title: str, tokens: Mapping[str, tuple[str, NDArray[np.integer]]]) -> go.Figure:
    """Return bars of the devices' loads from the busiest to the least busy, over the mean load.

    The devices of each iteration and layer are sorted first. Then they are averaged over both.

    Args:
        title: Title of the figure.
        tokens: Colour and tokens of each device, integers ``[I, L, D]``, by name.
    """
    x_title = "device, from the busiest to the least busy"
    figure = new_figure(title, x_title, "mean of load / mean load", 300, barmode="group", bargap=0.25)
    figure.update_yaxes(rangemode="tozero")
    for name, (colour, tokens_ILD) in tokens.items():
        mean_IL1 = np.maximum(tokens_ILD.mean(axis=2, keepdims=True), 1e-12)
        load_D = -np.sort(-(tokens_ILD / mean_IL1), axis=2).mean(axis=(0, 1))
        form = f"%{{y:.2f}} × mean<extra>{name}</extra>"
        x = np.arange(1, len(load_D) + 1)
        figure.add_bar(name=name, x=x, y=load_D, marker_color=colour, showlegend=True, hovertemplate=form)
        figure.update_xaxes(ticks(len(load_D), 16))
    even_line(figure)
    return figure


def even_line(figure: go.Figure) -> None:
    """Add a horizontal line at 1, where all devices have the same load."""
    figure.add_hline(y=1, line={"color": GREY, "width": 1})


def layer_strips(
    title: str, iterations_I: NDArray[np.int64], layers: Sequence[int], loads: Mapping[str, NDArray[Any]]
) -> go.Figure:
    """Return heat maps ``[I, L]`` side by side, by their headings, with one scale of colours from 1 on."""
    figure = make_subplots(1, len(loads), shared_yaxes=True, subplot_titles=list(loads))
    # The scale ignores the highest 0.5 %, so that a peak at the start does not make the rest dark.
    highest = max(1.05, float(np.quantile(list(loads.values()), 0.995)))
    for column, (heading, load_IL) in enumerate(loads.items(), start=1):
        x, load_BL = binned(iterations_I, load_IL)
        form = f"iteration %{{x:.0f}}, layer %{{y}}: %{{z:.2f}}<extra>{heading}</extra>"
        names = [str(layer) for layer in layers]
        figure.add_heatmap(
            x=x, y=names, z=load_BL.T, coloraxis="coloraxis", hovertemplate=form, row=1, col=column
        )
    figure.update_xaxes(title_text="iteration", **ticks(len(iterations_I), 6))
    figure.update_yaxes(type="category", autorange="reversed")
    figure.update_yaxes(title_text="layer", row=1, col=1)
    scale = {"colorscale": LOAD_SCALE, "cmin": 1.0, "cmax": highest, "colorbar_title_text": "max / mean"}
    figure.update_layout(
        template="none",
        title_text=title,
        height=175 + min(420, 24 * len(layers)),
        coloraxis=scale,
    )
    return _plain_headings(figure)


def expert_loads(
    title: str,
    iterations_I: NDArray[np.int64],
    layers: Sequence[int],
    tokens_ILE: NDArray[Any],
    num_figures: int,
) -> go.Figure:
    """Return one heat map for each layer: the tokens of every expert over the mean of its layer."""
    num_layers, num_experts = tokens_ILE.shape[1:]
    room = _MOST_CELLS // (num_layers * num_experts * num_figures)
    x, load_BLE = binned(iterations_I, relative_load_ILE(tokens_ILE), max(24, min(_MOST_COLUMNS, room)))
    # The scale ignores the highest 0.1 %, so that a short peak does not make everything else pale.
    highest = max(2.0, float(np.quantile(load_BLE, 0.999)))
    num_columns = min(num_layers, 2 if num_layers <= 4 else 3)
    num_rows = -(-num_layers // num_columns)
    row_height = 210 if num_experts <= 32 else 240
    figure = make_subplots(
        num_rows,
        num_columns,
        subplot_titles=[f"layer {layer}" for layer in layers],
        shared_xaxes="all",
        shared_yaxes="all",
        horizontal_spacing=0.055,
        vertical_spacing=min(52 / (num_rows * row_height), 0.8 / max(num_rows - 1, 1)),
    )
    for i, layer in enumerate(layers):
        form = f"iteration %{{x:.0f}}, expert %{{y}}: %{{z:.2f}} × even share<extra>layer {layer}</extra>"
        place = {"row": i // num_columns + 1, "col": i % num_columns + 1}
        figure.add_heatmap(x=x, z=load_BLE[:, i].T, coloraxis="coloraxis", hovertemplate=form, **place)
        if i % num_columns == 0:
            figure.update_yaxes(title_text="expert", **ticks(num_experts, 8), **place)
        if i + num_columns >= num_layers:
            few = ticks(len(iterations_I), 12 // num_columns)
            figure.update_xaxes(title_text="iteration", showticklabels=True, **few, **place)
    even = 1 / highest
    over = even + 0.4 * (1 - even)
    scale = [[0.0, _IDLE], [0.55 * even, _UNDER], [even, _EVEN], [over, _OVER], [1.0, _CROWDED]]
    figure.update_layout(
        template="none",
        title_text=title,
        height=110 + num_rows * row_height,
        coloraxis={"colorscale": scale, "cmin": 0, "cmax": highest, "colorbar_title_text": "× even share"},
    )
    return _plain_headings(figure)


def relative_load_ILE(tokens_ILE: NDArray[Any]) -> NDArray[np.float64]:
    """Return the tokens of each expert over the mean of its layer; 0 in a layer without tokens."""
    mean_IL1 = tokens_ILE.mean(axis=2, keepdims=True)
    return np.where(mean_IL1 > 0, tokens_ILE / np.maximum(mean_IL1, 1e-12), 0.0)


def _plain_headings(figure: go.Figure) -> go.Figure:
    """Put the headings of plots at their left edges, in the page's own font."""
    for axis, heading in zip(figure.select_xaxes(), figure.layout.annotations, strict=False):
        heading.update(x=axis.domain[0], xanchor="left", font=None)
    return figure
