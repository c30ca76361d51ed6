"""The page ``docs/papers.md``: what was reproduced of each paper, and the skew of its loads."""

from collections.abc import Mapping

from benchmarks.papers.in_short import IN_SHORT
from benchmarks.papers.paper_page import file_name
from benchmarks.papers.paper_rows import (
    PAPERS,
    WITHIN,
    Row,
    count,
    markdown_table,
    spread_of_paper,
    words,
)
from benchmarks.papers.setting import NEAR, OURS, is_near
from benchmarks.papers.skews import SKEWS


def entry_page(rows_by_paper: Mapping[str, list[Row]]) -> str:
    """Return the page as Markdown.

    Args:
        rows_by_paper: Rows by key of ``PAPERS``.
    """
    counts = {key: count(rows) for key, rows in rows_by_paper.items()}
    near, total = (sum(numbers) for numbers in zip(*counts.values(), strict=True))
    blocks = [
        "# Figures and tables of the papers",
        f"**{near} of {total} numbers of the four papers come within {100 * NEAR:.0f} % in the simulator.** "
        "They are calculated, not measured, and nothing is fitted to what it predicts. This page has the "
        "main statements of each paper. Every paper also has a page with a row for each of its numbers, and "
        "with the reason where a number is missed or cannot be simulated.",
        markdown_table(
            ("paper", WITHIN, "loads"),
            [
                (
                    f"[{PAPERS[key]}]({file_name(key)})",
                    f"{here} of {of_all}",
                    f"log-normal, sigma {spread_of_paper(key)}" if key in SKEWS else "even",
                )
                for key, (here, of_all) in counts.items()
            ],
        ),
        "## Main statements",
        "'direction' means that the same side is faster as in the paper, but by another factor. A reason "
        "that starts with 'open' means that the cause is not known.",
        markdown_table(
            ("paper", "main statement", "paper", "simulated", "reproduced?", "if not, why"),
            [line for key, rows in rows_by_paper.items() for line in _in_short(key, rows)],
        ),
        "## How to read and to repeat the numbers",
        "`python benchmarks/reproduce_papers.py --pages docs` writes this page, the pages of the papers "
        "and their pictures. Without `--pages` it prints the rows, and with `--paper hecate` those of one "
        "paper.",
        "A ratio is the simulated value divided by the paper's. Where the paper states a range, the "
        "geometric mean of all simulated values is divided by that of the range's two ends. Rows named "
        f"{OURS} are about this package or about an assumption. They are not counted. Nor are rows that are "
        "marked as inputs, because the simulation starts from them.",
        "## Skew of the loads",
        "No paper publishes its loads as numbers. Three papers have a sentence from which the spread of "
        "log-normal popularities follows. All models of a paper have the same spread. Parm's layers have a "
        "capacity factor, so its loads are even.",
        markdown_table(
            ("paper", "where", "sentence", "sigma", "how it follows"),
            [
                (PAPERS[skew.paper], skew.where, f'"{skew.sentence}"', str(skew.sigma), skew.meaning)
                for skew in SKEWS.values()
            ],
        ),
    ]
    return "\n\n".join(blocks) + "\n"


def _in_short(key: str, rows: list[Row]) -> list[tuple[str, ...]]:
    """Lines of the main statements: each statement, whether it is reproduced, and why not."""
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
