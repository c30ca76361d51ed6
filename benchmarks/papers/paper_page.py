"""The page of one paper, such as ``docs/papers-parm.md``: every row beside the simulated value."""

import re
from types import ModuleType

from benchmarks.papers.claims import Answer
from benchmarks.papers.paper_rows import (
    PAPERS,
    WITHIN,
    Row,
    count,
    markdown_table,
    module_of,
    spread_of_paper,
    words,
)
from benchmarks.papers.setting import NEAR, OURS, is_near


def file_name(key: str) -> str:
    """Return the name of a paper's page."""
    return f"papers-{key}.md"


def paper_page(key: str, rows: list[Row]) -> str:
    """Return the page as Markdown.

    Args:
        key: Key of the paper.
        rows: All rows of the paper.
    """
    module, name, (near, total) = module_of(key), PAPERS[key], count(rows)
    spread = spread_of_paper(key)
    answers = [Answer(claim, claim.pairs(spread)) for claim in getattr(module, "CLAIMS", ())]
    return (
        "\n\n".join(
            [
                f"# Figures and tables of {name}",
                f"**{near} of {total} numbers of {name} come within {100 * NEAR:.0f} % in the simulator.** "
                "They are calculated, not measured. [The page of all papers](papers.md) says how a ratio "
                "is calculated, which rows count and how to write this page.",
                f"![{name}: numbers of the paper and of the simulator](pictures/papers_{key}.svg)",
                "## What is assumed, and what follows",
                _assumptions(module),
                *_claims(answers),
                "## Figures and tables",
                _figures(module, rows),
                "## Numbers",
                markdown_table(
                    ("where", "statement", "paper", "simulated", "ratio", "why, if it is missed"),
                    [_cells(row) for row in rows],
                ),
                "## What has no row",
                markdown_table(("not reproduced", "why"), list(module.NOT_REPRODUCED.items())),
            ]
        )
        + "\n"
    )


def _claims(answers: list[Answer]) -> list[str]:
    """The table of statements without a number, or nothing if a paper has none here."""
    if not answers:
        return []
    headers = ("where", "statement without a number", "holds in", "first over second", "why not everywhere")
    return ["## Statements without a number", markdown_table(headers, [answer.cells for answer in answers])]


def _figures(module: ModuleType, rows: list[Row]) -> str:
    """One line for each figure and table with rows: how many are near, and what only they assume."""
    of_figure: dict[str, list[Row]] = {}
    for row in rows:
        if row.relation.where != OURS:
            of_figure.setdefault(row.relation.where.split(",")[0], []).append(row)
    assumed, lines = getattr(module, "ASSUMED", {}), []
    for figure, its_rows in of_figure.items():
        near, total = count(its_rows)
        lines.append((figure, f"{near} of {total}" if total else "none counts", assumed.get(figure, "")))
    return markdown_table(("figure or table", WITHIN, "assumed, apart from the above"), lines)


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
