"""Writes a page: one HTML file that needs no network. Its tables are also shown in the terminal."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import plotly.graph_objects as go
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs
from rich import box
from rich.table import Table as TerminalTable

from megatron_fssdp.files.written_files import written_file


@dataclass(frozen=True)
class Table:
    """A table of text."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]  # the first cell is the row's name
    prose: frozenset[str] = frozenset()  # columns after the first that hold words instead of numbers

    def columns(self, *wanted: int) -> "Table":
        """Return a table of some of the columns, by their positions."""
        rows = tuple(tuple(row[i] for i in wanted) for row in self.rows)
        return Table(tuple(self.header[i] for i in wanted), rows, self.prose)


type Part = go.Figure | Table | str
"""What a section shows: a figure, a table or a small note."""


@dataclass(frozen=True, eq=False)
class Section:
    """One section of a page."""

    title: str  # the words before a colon or comma stand in the page's navigation
    sentence: str  # how to read the section, or why there is nothing to show
    parts: Sequence[Part] = ()  # from top to bottom

    @property
    def short_title(self) -> str:
        """Title in the page's navigation."""
        return re.split("[:,]", self.title)[0]

    @property
    def anchor(self) -> str:
        """Name of the section in links."""
        return re.sub(r"\W+", "-", self.short_title.lower())

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to show."""
        return all(isinstance(part, str) for part in self.parts)


@dataclass(frozen=True, eq=False)
class Page:
    """A page with its result and sections."""

    kind: str  # what the page is, such as "report"
    title: str
    sentence: str  # the result
    subjects: Sequence[tuple[str, str, str]]  # name, colour in all figures, and words on a run or strategy
    sections: Sequence[Section]  # from top to bottom

    @property
    def html(self) -> str:
        """The page as HTML."""
        loader = PackageLoader("megatron_fssdp.report", ".")
        environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
        figures = [part for section in self.sections for part in section.parts if isinstance(part, go.Figure)]
        figures_json = f"[{','.join(figure.to_json(validate=False) for figure in figures)}]"
        return environment.get_template("page.html.j2").render(
            page=self, figures=Markup(figures_json.replace("<", "\\u003c")), plotly=Markup(get_plotlyjs())
        )

    def write(self, path: Path) -> None:
        """Write the page completely, or raise a ConfigurationError."""
        with written_file(path, "--out") as partial:
            partial.write_text(self.html, encoding="utf-8")


def terminal_table(
    table: Table, title: str = "", caption: str = "", whole: Collection[str] = ()
) -> TerminalTable:
    """Return a table for the terminal. Only columns that ``whole`` names never wrap."""
    shown = TerminalTable(title=title or None, caption=caption or None, box=box.SIMPLE_HEAD, pad_edge=False)
    shown.title_style, shown.title_justify, shown.caption_justify = "bold", "left", "left"
    for position, heading in enumerate(table.header):
        is_left, is_whole = position == 0 or heading in table.prose, heading in whole
        justify: Literal["left", "right"] = "left" if is_left else "right"
        longest = max(map(len, heading.split()), default=0)  # A word of the heading is never divided.
        shown.add_column(heading, justify=justify, overflow="fold", no_wrap=is_whole, min_width=longest)
    for row in table.rows:
        shown.add_row(*row)
    return shown
