"""Writes a page: one HTML file that needs no network."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import plotly.graph_objects as go
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from megatron_fssdp.files.written_files import written_file
from megatron_fssdp.report.tables import Table

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
        data = f"[{','.join(figure.to_json(validate=False) for figure in figures)}]"
        return environment.get_template("page.html.j2").render(
            page=self, figures=Markup(data.replace("<", "\\u003c")), plotly=Markup(get_plotlyjs())
        )

    def write(self, path: Path) -> None:
        """Write the page completely, or raise a ConfigurationError."""
        with written_file(path, "--out") as partial:
            partial.write_text(self.html, encoding="utf-8")
