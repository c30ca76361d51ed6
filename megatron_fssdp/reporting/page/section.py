"""What a page is made of: sections with figures, tables and words.

Figures are plotly.js' own plain values, so that a page needs its script and nothing of Python.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

GREY = "#8A8F98"
"""Of what is compared with; seen on light and dark ground."""


FEW = 12
"""As many ticks fit everywhere."""


@dataclass(frozen=True, eq=False)
class Figure:
    """One picture.

    Attributes:
        name: Of its element; once on a page.
        traces: As plotly.js takes them.
        layout: As plotly.js takes it, without colours of the page, which its script adds.
        height: Pixels.
    """

    name: str
    traces: Sequence[dict[str, Any]]
    layout: dict[str, Any]
    height: int = 340


@dataclass(frozen=True)
class Table:
    """Words and numbers in rows.

    Attributes:
        header: Names of the columns.
        rows: Cells as text; the first of each row names it.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, eq=False)
class Section:
    """A part of the page.

    Attributes:
        anchor: Its name in links.
        title: What is seen.
        lead: How to read it.
        figures: Its pictures, from the top.
        table: Below them.
        notes: Small print below that.
        missing: Why there is nothing to be seen, and how to get it; empty where there is something.
        has_placement: Whether the page's placement viewer goes here.
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
    """An array as plotly.js' base64: a quarter of what decimal text takes.

    Args:
        values: One- or two-dimensional.
        dtype: What is sent.
    """
    array = np.ascontiguousarray(values, dtype=dtype)
    data = {
        "dtype": array.dtype.str.lstrip("<>|="),
        "bdata": base64.b64encode(array.astype(array.dtype.newbyteorder("<"))).decode("ascii"),
    }
    return data if array.ndim == 1 else {**data, "shape": ", ".join(map(str, array.shape))}


def titled(text: str, **more: Any) -> dict[str, Any]:
    """An axis with a title."""
    return {"title": {"text": text}, **more}


def iteration_axis(num_iterations: int, **more: Any) -> dict[str, Any]:
    """The axis of iterations; of a few, every one has a tick, and no other place has."""
    return titled("iteration", **every_tick(num_iterations, FEW), **more)


def every_tick(count: int, most: int) -> dict[str, Any]:
    """A tick at every whole number, if there are no more than ``most``."""
    return {"dtick": 1} if count <= most else {}


def above(text: str, x: float, y: float) -> dict[str, Any]:
    """A heading over one of several plots in a figure, at its upper left corner in the figure's units."""
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
