"""Answers as rows that ``results.csv`` keeps, ``reproduce_papers.py`` prints and ``docs/papers.md`` shows.

The columns are those of :func:`row_of`.
"""

import csv
from collections.abc import Iterable
from pathlib import Path

from benchmarks.papers.claims import Answer, words

FILE = Path(__file__).with_name("results.csv")


def row_of(answer: Answer) -> dict[str, str]:
    """Return an answer as a row.

    ``holds`` is ``yes`` or ``no`` for numbers that count, and ``direction`` for a missed headline if the same
    side is faster. Of a claim without a number it is the number of cases. Cells that do not apply are empty.
    """
    claim = answer.claim
    row = {
        "paper": claim.paper,
        "kind": claim.kind,
        "where": claim.where or "(ours)",
        "claim": claim.what,
        "published": words([claim.low, claim.high]) if claim.low > 0 else "",
        "simulated": "",
        "ratio": "",
        "padded": "",
        "padded ratio": "",
        "padded holds": "",
        "holds": "",
        "beside": answer.beside,
        "why": "",
        "headline": claim.headline,
    }
    if claim.kind == "none":
        return row | {"holds": "not simulated", "why": claim.note}
    if claim.kind == "larger":
        ratios = [large / small for large, small in answer.values]
        row["simulated"] = f"{min(ratios):.2f}–{max(ratios):.2f}"
        row["holds"] = f"{answer.holds_in} of {len(ratios)}"
        return row | {"why": claim.note if answer.holds_in < len(ratios) else ""}
    row |= {"simulated": words(answer.values), "ratio": f"{answer.ratio():.2f}"}
    if answer.padded:
        row |= {"padded": words(answer.padded), "padded ratio": f"{answer.ratio(padded=True):.2f}"}
        row["padded holds"] = "yes" if answer.is_near(padded=True) else "no"
    if claim.kind == "input":
        return row | {"holds": "input"}
    if claim.kind == "row":
        is_missed = not answer.is_near()
        row["holds"] = ("direction" if claim.headline and answer.same_side else "no") if is_missed else "yes"
        row["why"] = (claim.note or ("" if answer.padded else "open")) if is_missed else ""
    return row


def write(rows: Iterable[dict[str, str]]) -> None:
    """Write the file."""
    rows = list(rows)
    with FILE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read() -> list[dict[str, str]]:
    """Return all rows of the file."""
    with FILE.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def count(rows: Iterable[dict[str, str]], column: str = "holds") -> tuple[int, int]:
    """Return how many numbers of the papers are near, and how many count and have a cell in the column."""
    cells = [row[column] for row in rows if row["kind"] == "row" and row[column]]
    return cells.count("yes"), len(cells)
