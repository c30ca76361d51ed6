"""Building blocks of a page: sections with figures, tables and text.

Figures are plain values for plotly.js. Therefore a page needs only plotly's script, and no Python.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

GREY = "#8A8F98"
"""Colour of reference lines, visible on light and dark backgrounds."""

FEW = 12
"""Number of ticks that fit on every axis."""


@dataclass(frozen=True, eq=False)
class Figure:
    """One figure of a section.

    Attributes:
        name: Unique name of the figure's HTML element on the page.
        traces: Traces in plotly.js' format.
        layout: Layout in plotly.js' format. The page's script adds the colours of the page. The page
            shows the layout's title as text above the figure, where it can have several lines.
        height: Height in pixels.
    """

    name: str
    traces: Sequence[dict[str, Any]]
    layout: dict[str, Any]
    height: int = 340

    @property
    def title(self) -> str:
        """Title of the figure, or an empty string."""
        return str(self.layout.get("title", {}).get("text", ""))

    @property
    def drawn(self) -> dict[str, Any]:
        """The figure as the page's script draws it."""
        layout = {key: value for key, value in self.layout.items() if key != "title"}
        return {"name": self.name, "data": self.traces, "layout": layout}


@dataclass(frozen=True)
class Table:
    """A table of a section.

    Attributes:
        header: Names of the columns.
        rows: Cells of each row, as text. The first cell is the row's name.
        prose: Names of the columns that hold words. All columns but the first hold numbers otherwise.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    prose: frozenset[str] = frozenset()


@dataclass(frozen=True, eq=False)
class Section:
    """One section of the page.

    Attributes:
        anchor: Name of the section in links.
        title: Title of the section.
        lead: Text that explains how to read the section.
        figures: Figures, from top to bottom.
        table: Table below the figures, or None.
        notes: Small notes at the end of the section.
        missing: Reason why the section has nothing to show, and how to record it. Empty if it has something.
        has_placement: Whether the section contains the page's placement viewer.
    """

    anchor: str
    title: str
    lead: str
    figures: tuple[Figure, ...] = ()
    table: Table | None = None
    notes: tuple[str, ...] = ()
    missing: str = ""
    has_placement: bool = False


def packed(values: NDArray[Any], dtype: type[np.generic] = np.float32) -> dict[str, Any]:
    """Encode an array in plotly.js' base64 format, which takes a quarter of the bytes of decimal text.

    Args:
        values: Array with one or two dimensions.
        dtype: Data type of the encoded numbers.
    """
    array = np.ascontiguousarray(values, dtype=dtype)
    data = {
        "dtype": array.dtype.str.lstrip("<>|="),
        "bdata": base64.b64encode(array.astype(array.dtype.newbyteorder("<"))).decode("ascii"),
    }
    return data if array.ndim == 1 else {**data, "shape": ", ".join(map(str, array.shape))}


def titled(text: str, **more: Any) -> dict[str, Any]:
    """Return the layout of an axis with a title."""
    return {"title": {"text": text}, **more}


def iteration_axis(num_iterations: int, **more: Any) -> dict[str, Any]:
    """Return the layout of an axis of iterations. With few iterations, each one has a tick."""
    return titled("iteration", **every_tick(num_iterations, FEW), **more)


def every_tick(count: int, most: int) -> dict[str, Any]:
    """Return axis settings with a tick at every whole number, if there are at most ``most`` numbers."""
    return {"dtick": 1} if count <= most else {}


def above(text: str, x: float, y: float) -> dict[str, Any]:
    """Return a heading above one of several plots in a figure.

    Args:
        text: The heading.
        x: Position of the plot's upper left corner, as a fraction of the figure's width.
        y: Position of the plot's upper left corner, as a fraction of the figure's height.
    """
    return {
        "text": text,
        "x": x,
        "y": y,
        "xref": "paper",
        "yref": "paper",
        "xanchor": "left",
        "yanchor": "bottom",
        "showarrow": False,
        "font": {"size": 13},
    }
