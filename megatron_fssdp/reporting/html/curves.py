"""Curves over iterations, and the line of even loads, as all pages draw them."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_fssdp.reporting.html.section import GREY, packed


def curve(
    name: str, x: dict[str, Any], values: NDArray[np.float64], colour: str, line: dict[str, Any], form: str
) -> dict[str, Any]:
    """Return a trace with one value for each iteration, or for each group of iterations.

    Args:
        name: Name in the legend.
        x: Packed numbers of the iterations.
        values: Values of the curve.
        colour: Colour of the curve, ``#RRGGBB``.
        line: Further settings of the line in plotly.js' format.
        form: How plotly writes a value when the reader points at it, such as ``%{y:.2f}``.
    """
    return {
        "type": "scatter",
        # A line through one or two points is easily missed.
        "mode": "lines+markers" if len(values) < 3 else "lines",
        "name": name,
        "x": x,
        "y": packed(values),
        "line": {"color": colour, **line},
        "hovertemplate": f"{form}<extra>{name}</extra>",
    }


def even_load_line() -> dict[str, Any]:
    """Return the shape of a horizontal line at 1, where all devices have the same load."""
    ends = {"xref": "paper", "x0": 0, "x1": 1, "y0": 1, "y1": 1}
    return {"type": "line", **ends, "line": {"color": GREY, "width": 1}}
