"""Rows of the papers: every statement beside its simulated values, and how they are written."""

import importlib
from dataclasses import dataclass
from types import ModuleType

from benchmarks.papers.setting import NEAR, OURS, Relation, is_near
from benchmarks.papers.skews import SKEWS

PAPERS = {
    "parm": "Parm",
    "fastermoe": "FasterMoE",
    "pro-prophet": "Pro-Prophet",
    "hecate": "Hecate",
}
"""Names by key, in the order of the pages."""


@dataclass(frozen=True)
class Row:
    """A statement with its simulated values.

    Attributes:
        relation: Statement of the paper.
        values: Simulated values, or None if it cannot be simulated.
        beside: What stands beside the ratio, near or not.
    """

    relation: Relation
    values: list[float] | None
    beside: str = ""

    @property
    def ratio(self) -> float | None:
        """Simulated divided by stated value."""
        return None if self.values is None else self.relation.ratio(self.values)

    @property
    def note(self) -> str:
        """What a reader must know about the ratio."""
        if self.ratio is None:
            return f"not reproduced: {self.relation.why_not}"
        if self.relation.is_input:
            return "input of the simulation, not counted"
        is_missed = not is_near(self.ratio) and self.relation.where != OURS
        return "; ".join(
            filter(None, (self.beside, (self.relation.explained or "open") if is_missed else ""))
        )


WITHIN = f"rows within {100 * NEAR:.0f} %"
"""Header of columns that have the number of reproduced rows."""


def module_of(key: str) -> ModuleType:
    """Return the module with a paper's statements."""
    room = key.replace("-", "_")
    return importlib.import_module(f"benchmarks.papers.{room}.{room}_statements")


def spread_of_paper(key: str) -> float:
    """Return the spread of a paper's loads, which is 0 for even loads."""
    return SKEWS[key].sigma if key in SKEWS else 0.0


def words(values: list[float]) -> str:
    """Return one number, or the smallest and the largest, as text."""
    low, high = (f"{value:.2f}" if value < 100 else f"{value:,.0f}" for value in (min(values), max(values)))
    return low if low == high else f"{low}–{high}"


def count(rows: list[Row]) -> tuple[int, int]:
    """Return how many of a paper's rows are near, and how many rows count."""
    ratios = [row.ratio for row in rows if row.relation.counts and row.ratio is not None]
    return sum(is_near(ratio) for ratio in ratios), len(ratios)


def markdown_table(headers: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return a table as Markdown."""
    lines = [headers, ("---",) * len(headers), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
