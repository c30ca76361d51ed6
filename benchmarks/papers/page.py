"""The page ``docs/papers.md``: every row of the four papers beside the simulated value."""

import importlib
import re
from dataclasses import dataclass
from types import ModuleType

from benchmarks.papers.claims import Answer
from benchmarks.papers.in_short import IN_SHORT
from benchmarks.papers.setting import NEAR, OURS, Relation, is_near
from benchmarks.papers.skews import SKEWS

PAPERS = {
    "parm": "Parm",
    "fastermoe": "FasterMoE",
    "pro-prophet": "Pro-Prophet",
    "hecate": "Hecate",
}
"""Names by key, in the order of the page."""


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


def page_of(rows_by_paper: dict[str, list[Row]]) -> str:
    """Return the page as Markdown.

    Args:
        rows_by_paper: Rows of the papers of the page, by key of ``PAPERS``.
    """
    answers = {
        key: [
            Answer(claim, claim.pairs(spread_of_paper(key)))
            for claim in getattr(module_of(key), "CLAIMS", ())
        ]
        for key in rows_by_paper
    }
    counts = {key: count(rows) for key, rows in rows_by_paper.items()}
    near, total = (sum(numbers) for numbers in zip(*counts.values(), strict=True))
    names = ", ".join(PAPERS[key] for key in rows_by_paper)
    blocks = [
        "# Figures and tables of the papers",
        f"{near} of {total} numbers of {names} come within {NEAR:.0%} in the simulator, where nothing is "
        "fitted to what it predicts. This page has a row for each of them, and the reason where one is "
        "missed or cannot be simulated. A reason that starts with 'open' means that the cause is not "
        "known. The next table has the main statements of each paper; 'direction' means that the same side "
        "is faster, by another factor.",
        _table(
            ("paper", "main statement", "paper", "simulated", "reproduced?", "if not, why"),
            [line for key, rows in rows_by_paper.items() for line in _in_short(key, rows)],
        ),
        _table(
            ("paper", f"rows within {NEAR:.0%}", "loads"),
            [
                (
                    f"[{PAPERS[key]}](#{PAPERS[key].lower()})",
                    f"{here} of {of_all}",
                    f"log-normal, sigma {spread_of_paper(key)}" if key in SKEWS else "even",
                )
                for key, (here, of_all) in counts.items()
            ],
        ),
        f"`python benchmarks/reproduce_papers.py --page docs/papers.md --paper {' '.join(rows_by_paper)}` "
        "writes this page and its pictures. "
        "The numbers are calculated, not measured. A ratio is the simulated value divided by the paper's; "
        "for ranges it is that of the geometric means of the smallest and the largest value. Rows named "
        f'"{OURS}" are about this package or about an assumption and are not counted.',
        "## Skew of the loads",
        "No paper publishes its loads as numbers. Three have a sentence from which the spread of "
        "log-normal popularities follows. It is the same for all models of a paper. Parm's layers have a "
        "capacity factor, so its loads are even.",
        _table(
            ("paper", "where", "sentence", "sigma", "how it follows"),
            [
                (PAPERS[skew.paper], skew.where, f'"{skew.sentence}"', str(skew.sigma), skew.meaning)
                for skew in SKEWS.values()
            ],
        ),
    ]
    for key, rows in rows_by_paper.items():
        blocks += _section(key, rows, answers[key])
    return "\n\n".join(blocks) + "\n"


def _in_short(key: str, rows: list[Row]) -> list[tuple[str, ...]]:
    """Lines of the first table: a paper's main statements, whether each is reproduced, and why not."""
    by_place, lines = {(row.relation.where, row.relation.what): row for row in rows}, []
    for place, (statement, why) in IN_SHORT[key].items():
        row = by_place[place]
        if row.values is None or row.ratio is None:
            raise ValueError(f"{key}: {place!r} is not simulated; wanted a simulated row in IN_SHORT")
        stated = [row.relation.low, row.relation.high]
        same_side = (min(stated) > 1) == (min(row.values) > 1) == (max(row.values) > 1)
        verdict = "yes" if is_near(row.ratio) else "direction" if same_side else "no"
        reason = "" if verdict == "yes" else why
        lines.append((PAPERS[key], statement, words(stated), words(row.values), verdict, reason))
    return lines


def _claims(answers: list[Answer]) -> list[str]:
    """The table of statements without a number, or nothing if a paper has none here."""
    if not answers:
        return []
    headers = ("where", "statement without a number", "holds in", "first over second", "why not everywhere")
    return [_table(headers, [answer.cells for answer in answers])]


def _section(key: str, rows: list[Row], answers: list[Answer]) -> list[str]:
    module, (near, total) = module_of(key), count(rows)
    return [
        f"## {PAPERS[key]}",
        f"{near} of {total} rows are within {NEAR:.0%}.",
        f"![{PAPERS[key]}: numbers of the paper and of the simulator](pictures/papers_{key}.svg)",
        _assumptions(module),
        *_claims(answers),
        _figures(module, rows),
        _table(
            ("where", "statement", "paper", "simulated", "ratio", "why, if it is missed"),
            [_cells(row) for row in rows],
        ),
        _table(("not reproduced", "why"), list(module.NOT_REPRODUCED.items())),
    ]


def _figures(module: ModuleType, rows: list[Row]) -> str:
    """One line for each figure and table with rows: how many are near, and what only they assume."""
    of_figure: dict[str, list[Row]] = {}
    for row in rows:
        if row.relation.where != OURS:
            of_figure.setdefault(row.relation.where.split(",")[0], []).append(row)
    lines = []
    for figure, its_rows in of_figure.items():
        near, total = count(its_rows)
        assumed = getattr(module, "ASSUMED", {}).get(figure, "")
        lines.append((figure, f"{near} of {total}" if total else "none counts", assumed))
    return _table(("figure or table", f"rows within {NEAR:.0%}", "assumed, apart from the above"), lines)


def _cells(row: Row) -> tuple[str, ...]:
    relation = row.relation
    stated = words([relation.low, relation.high])
    if row.values is None or row.ratio is None:
        return relation.where, relation.what, stated, "–", "–", row.note
    ratio = f"{row.ratio:.2f}"
    mark = ratio if is_near(row.ratio) or not relation.counts else f"**{ratio}**"
    return relation.where, relation.what, stated, words(row.values), mark, row.note


def _assumptions(module: ModuleType) -> str:
    """Return a module's docstring without its first line, as Markdown."""
    _, _, text = (module.__doc__ or "").partition("\n\n")
    return re.sub(r":\w+:`([^`]*)`", r"`\1`", text.replace("``", "`")).strip()


def _table(headers: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [headers, ("---",) * len(headers), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
