"""Draws docs/pictures/fssdp_layer.svg: what computes and what travels in one layer under FSSDP.

usage: python scripts/docs/layer_picture.py [FILE.svg | FILE.png]
"""

import sys
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

DENSE, EXPERT, TOKENS, WEIGHTS, GRADIENTS, BETWEEN = (
    "#dfe7f2",
    "#f7dfb5",
    "#e8e8e8",
    "#cfe8cf",
    "#f3cfcf",
    "#e4d9f0",
)
INK, FAINT = "#1c1c1c", "#6a6a6a"
LANE_HEIGHT = 0.9


def write(axes: Axes, x: float, y: float, text: str, align: str, color: str, size: float) -> None:
    """Text line by line: each then keeps its alignment in whatever font a viewer has."""
    lines = text.split("\n")
    for i, line in enumerate(lines):
        height = y + 0.26 * ((len(lines) - 1) / 2 - i)
        axes.text(x, height, line, ha=align, va="center", color=color, fontsize=size)


def box(
    axes: Axes, start: float, end: float, lane: float, text: str, color: str, *, optional: bool = False
) -> None:
    """A stretch of work on a lane; dashed where a setting has to ask for it."""
    axes.add_patch(
        FancyBboxPatch(
            (start + 0.05, lane - LANE_HEIGHT / 2),
            end - start - 0.1,
            LANE_HEIGHT,
            boxstyle="round,pad=0,rounding_size=0.08",
            facecolor="white" if optional else color,
            edgecolor=INK,
            linewidth=1.0,
            linestyle="--" if optional else "-",
        )
    )
    write(axes, (start + end) / 2, lane, text, "center", INK, 9)


def arrow(axes: Axes, tail: tuple[float, float], head: tuple[float, float]) -> None:
    """The tail's end starts the head, or is awaited there."""
    axes.annotate(
        "",
        xy=head,
        xytext=tail,
        arrowprops={"arrowstyle": "-|>", "color": INK, "linewidth": 1.1, "shrinkA": 0, "shrinkB": 0},
    )


def note(axes: Axes, x: float, y: float, text: str, align: str = "center") -> None:
    """A remark beside the boxes."""
    write(axes, x, y, text, align, FAINT, 8.5)


def panel(axes: Axes, title: str, top: float, lanes: dict[float, str]) -> None:
    """Heading and lane names of one part of the picture."""
    axes.text(-2.35, top, title, ha="left", va="center", color=INK, fontsize=11, fontweight="bold")
    for y, name in lanes.items():
        axes.text(-0.2, y, name, ha="right", va="center", color=INK, fontsize=9.5)


def forward(axes: Axes) -> None:
    """Forward pass: the gather runs under the attention."""
    panel(axes, "Forward pass of transformer layer l", 14.0, {12.4: "compute", 10.6: "transfers"})
    box(axes, 0.0, 4.6, 12.4, "norm, attention, norm, gate", DENSE)
    box(axes, 4.6, 6.9, 12.4, "remap: experts\nbecome slots", TOKENS)
    box(axes, 6.9, 9.4, 12.4, "dispatch\n(Megatron's)", TOKENS)
    box(axes, 9.4, 12.8, 12.4, "experts: owned\nand replica slots", EXPERT)
    box(axes, 12.8, 15.2, 12.4, "combine\n(Megatron's)", TOKENS)
    box(axes, 0.0, 4.6, 10.6, "spAG: weights of layer l's replicas", WEIGHTS)
    note(axes, 0.0, 13.2, "plan from the mean load of the last 5 iterations; spAG starts", "left")
    arrow(axes, (0.15, 11.95), (0.15, 11.05))
    note(axes, 9.4, 13.2, "replicas are awaited just before the experts", "left")
    arrow(axes, (4.5, 11.05), (9.5, 11.95))
    note(axes, 15.2, 10.7, "rematerialize: replicas\nare released here", "right")
    arrow(axes, (15.05, 11.95), (15.05, 11.15))


def backward(axes: Axes) -> None:
    """Backward pass: the reduction, and the gather for the layer below, run under the attention."""
    panel(axes, "Backward pass of layer l, then of layer l-1", 9.2, {7.6: "compute", 5.8: "transfers"})
    box(axes, 0.0, 1.9, 7.6, "combine\nall-to-all", TOKENS)
    box(axes, 1.9, 4.5, 7.6, "experts: owned\nand replicas", EXPERT)
    box(axes, 4.5, 6.4, 7.6, "dispatch\nall-to-all", TOKENS)
    box(axes, 6.4, 11.6, 7.6, "gate, norm, attention, norm", DENSE)
    box(axes, 11.6, 13.4, 7.6, "combine\nof l-1", TOKENS)
    box(axes, 13.4, 15.2, 7.6, "experts\nof l-1", EXPERT)
    box(axes, 6.4, 8.9, 5.8, "spRS: gradients of\nlayer l's replicas", GRADIENTS)
    box(axes, 8.9, 11.5, 5.8, "rematerialize: spAG\nof layer l-1 again", WEIGHTS, optional=True)
    note(axes, 6.4, 8.4, "layer l's gradients are complete; spRS starts", "left")
    arrow(axes, (6.55, 7.15), (6.55, 6.25))
    arrow(axes, (8.8, 6.25), (11.5, 7.15))
    arrow(axes, (11.4, 6.25), (13.4, 7.15))
    note(axes, 6.2, 5.8, "spRS is awaited where layer l ends:\nits sums go to the owners' main_grad", "right")


def between(axes: Axes) -> None:
    """Iterations: what happens while no micro-batch is under way."""
    panel(axes, "Iterations", 4.4, {3.0: "run"})
    box(axes, 0.0, 2.9, 3.0, "iterations 1 to 3,\nmeasured", DENSE)
    box(axes, 2.9, 5.2, 3.0, "t, m and costs\nare known", BETWEEN)
    box(axes, 5.2, 9.0, 3.0, "iteration: one plan a layer,\nthen the optimizer's step", DENSE)
    box(axes, 9.0, 11.7, 3.0, "every 100 iterations:\nowners move", BETWEEN)
    box(axes, 11.7, 15.2, 3.0, "iteration: new plans\nfrom newer loads", DENSE)
    note(
        axes,
        0.0,
        1.9,
        "Not to scale. Dashed: off by default. With several micro-batches an iteration, spAG runs with the\n"
        "first and spRS with the last of them; with rematerialize both run with every micro-batch.",
        "left",
    )


def draw() -> Figure:
    """The whole picture."""
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "fssdp", "font.family": "sans-serif"})
    figure = Figure(figsize=(11.5, 8.2), facecolor="white")
    axes = figure.add_axes((0.01, 0.01, 0.98, 0.98))
    axes.set_xlim(-2.5, 15.4)
    axes.set_ylim(1.3, 14.5)
    axes.set_axis_off()
    forward(axes)
    backward(axes)
    between(axes)
    return figure


if __name__ == "__main__":
    target = (
        Path(sys.argv[1])
        if len(sys.argv) > 1
        else Path(__file__).parents[2] / "docs" / "pictures" / "fssdp_layer.svg"
    )
    metadata = {"Date": None} if target.suffix == ".svg" else None
    draw().savefig(target, metadata=metadata, dpi=110)
