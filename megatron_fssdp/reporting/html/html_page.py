"""Writes the sections of a page into one self-contained HTML file."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from megatron_fssdp.config.written_files import written_file
from megatron_fssdp.reporting.html.section import Section
from megatron_fssdp.reporting.records.run_records import without_nan

_PACKAGE = "megatron_fssdp.reporting.html"
_SCRIPTS = ("theme.js", "placement_viewer.js", "figures.js")


@dataclass(frozen=True)
class Tile:
    """One large number at the top of a page.

    Attributes:
        label: Name of the number.
        value: The number with its unit.
        hint: Another number to compare it with, or an explanation.
    """

    label: str
    value: str
    hint: str = ""


@dataclass(frozen=True)
class Headline:
    """What stands at the top of a page.

    Attributes:
        sentence: The result in one sentence.
        tiles: The most important numbers.
    """

    sentence: str
    tiles: tuple[Tile, ...]


@dataclass(frozen=True)
class Subject:
    """A run or a strategy that a page is about.

    Attributes:
        name: Name in all figures of the page.
        colour: Colour of its lines and bars, ``#RRGGBB``.
        line: A few words about it.
    """

    name: str
    colour: str
    line: str = ""


@dataclass(frozen=True, eq=False)
class HtmlPage:
    """All that a page shows.

    Attributes:
        kind: What the page is, such as ``report``.
        title: Title of the page.
        subjects: Runs or strategies with their colours.
        headline: The top of the page.
        sections: Sections, from top to bottom.
        placements: Data of the placement viewer, for each run that has some.
    """

    kind: str
    title: str
    subjects: Sequence[Subject]
    headline: Headline
    sections: Sequence[Section]
    placements: Sequence[dict[str, Any]] = ()

    @property
    def html(self) -> str:
        """The page as HTML text that needs no other file and no network."""
        environment = Environment(
            loader=PackageLoader(_PACKAGE, "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True
        )
        figures = [figure.drawn for section in self.sections for figure in section.figures]
        return environment.get_template("page.html.j2").render(
            page=self,
            style=Markup(_text("page.css")),
            plotly=Markup(get_plotlyjs()),
            scripts=[Markup(_text(name)) for name in _SCRIPTS],
            figures=_script_json(figures),
            placements=_script_json(list(self.placements)),
        )

    def write(self, path: Path, asked_by: str = "--out") -> None:
        """Write the page completely or not at all.

        Args:
            path: File to write. Its folder is created if it does not exist.
            asked_by: The option that names the file.

        Raises:
            ConfigurationError: The file cannot be written.
        """
        with written_file(path, asked_by) as partial:
            partial.write_text(self.html, encoding="utf-8")


def _text(name: str) -> str:
    return files(_PACKAGE).joinpath(name).read_text(encoding="utf-8")


def _script_json(value: Any) -> Markup:
    """Return JSON text that is safe inside an HTML script element."""
    text = json.dumps(without_nan(value), allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c"))
