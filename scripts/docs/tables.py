"""Write the generated parts of the pages into the pages themselves, so that GitHub shows what the site shows.

usage: python scripts/docs/tables.py            (rewrites docs/*.md; a test compares them)

A generated part stands between ``<!-- table: WHAT -->`` and ``<!-- end -->``. WHAT is one of ``GENERATORS``.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Another checkout may be installed, but the pages must be made from this one.
sys.path.insert(0, str(ROOT))

from pydantic import BaseModel  # noqa: E402
from pydantic.fields import FieldInfo  # noqa: E402

from benchmarks.papers import results as of_papers  # noqa: E402
from benchmarks.papers.claims import NEAR, PAPERS, SKEWS  # noqa: E402
from megatron_fssdp.config.run.megatron_options import description  # noqa: E402
from megatron_fssdp.config.run.run_config import RunConfig  # noqa: E402
from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES  # noqa: E402
from megatron_fssdp.megatron_adapter.support import capabilities, limits  # noqa: E402
from scripts.docs.settings_pages import kind_of_field, shown_default  # noqa: E402

DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results"
SHARED_KEYS = ("exchange", "nodes", "record_dir")
"""Settings that nearly all strategies have: one page describes them for all."""

_PART = re.compile(
    r"^<!-- table: (?P<words>.+) -->$(?:(?:(?!<!-- table)[\s\S])*?^<!-- end -->$)?", re.MULTILINE
)


def settings(words: str) -> str:
    """Keys of a strategy, or of ``shared`` or ``data``; with ``of KEY; KEY…`` only these."""
    which, _, chosen = words.partition(" of ")
    if which == "data":
        section = RunConfig.model_fields["data"].annotation
        assert isinstance(section, type)
        model: type[BaseModel] = section
        names = list(model.model_fields)
    elif which == "shared":
        model, names = STRATEGIES["fssdp"].settings, list(SHARED_KEYS)
    else:
        model = STRATEGIES[which].settings
        names = [name for name in model.model_fields if name not in SHARED_KEYS]
    names = chosen.split("; ") if chosen else names
    fields = model.model_fields
    rows = (
        (
            f"`{name}`",
            shown_default(fields[name]),
            f"{_choices(fields[name])}{fields[name].description or description(name)}",
        )
        for name in names
    )
    return table(("key", "default", "meaning"), rows)


def _choices(field: FieldInfo) -> str:
    """Values of a key that lists them, as a sentence; the reference page has the kinds of all keys."""
    kind = kind_of_field(field)
    return f"{kind[0].upper()}{kind[1:]}. " if "`" in kind else ""


def results(words: str) -> str:
    """A file of ``benchmarks/results`` as a table: ``NAME``, or ``NAME by COLUMN: COLUMN`` (a pivot).

    ``NAME of COLUMN; COLUMN…`` shows these columns, and only rows with a value behind the first of them.
    After ``NAME medians``, quartiles are left out.
    """
    parts = re.fullmatch(r"([\w-]+)( medians)?(?: of (.+)| by (.+))?", words)
    assert parts, words
    name, without_quartiles, chosen, pivot = parts.groups()
    path = max(RESULTS.glob(f"20??-??-??-{name}.json"))  # the newest
    run = json.loads(path.read_text(encoding="utf-8"))
    columns, rows = run["columns"], run["rows"]
    if without_quartiles:
        kept = [at for at, column in enumerate(columns) if not column.endswith((" q1", " q3"))]
        columns, rows = [columns[at] for at in kept], [[row[at] for at in kept] for row in rows]
    if pivot:
        return _pivot(columns, rows, *pivot.split(": "))
    shown = [column for column in columns if not column.endswith((" q1", " q3"))]
    if chosen:
        shown = chosen.split("; ")
        others = [columns.index(column) for column in shown[1:]]
        rows = [row for row in rows if any(row[at] is not None for at in others)]
    header = [column or " " for column in shown]
    return table(header, zip(*(_column(columns, rows, column) for column in shown), strict=True))


def _pivot(columns: list[str], rows: list[list[object]], by: str, value: str) -> str:
    """One row for each value of ``by``, and one column for each value of the column after it."""
    key, second, wanted = columns.index(by), 1 + columns.index(by), columns.index(value)
    names = list(dict.fromkeys(str(row[second]) for row in rows))
    shown = _shown([row[wanted] for row in rows])
    cells = {(row[key], row[second]): cell for row, cell in zip(rows, shown, strict=True)}
    lines = (
        [str(first), *(cells.get((first, name), "–") for name in names)]
        for first in dict.fromkeys(row[key] for row in rows)
    )
    return table([by, *names], lines)


def _column(columns: list[str], rows: list[list[object]], name: str) -> list[str]:
    """The cells of a column, with its quartiles if it has them."""
    parts = [part for part in (name, f"{name} q1", f"{name} q3") if part in columns]
    values = [[row[columns.index(part)] for part in parts] for row in rows]
    cells = iter(_shown([value for cell in values for value in cell]))
    triples = [[next(cells) for _ in parts] for _ in values]
    return [
        f"{cell[0]} [{cell[1]}, {cell[2]}]" if len(cell) == 3 and cell[1] != "–" else cell[0]
        for cell in triples
    ]


def _shown(values: Sequence[object]) -> list[str]:
    """Values of one column as texts with equally many decimals."""
    numbers = [value for value in values if isinstance(value, float)]
    decimals = max((len(f"{value:.3f}".rstrip("0").partition(".")[2]) for value in numbers), default=0)
    return [_text(value, decimals) for value in values]


def _text(value: object, decimals: int = 0) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        small = 0 < abs(value) < 1e-3
        return f"{value:.1e}".replace("e-0", "e-") if small else f"{value:.{decimals}f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def code(path: str) -> str:
    """A file as a block of code."""
    text = (ROOT / path).read_text(encoding="utf-8")
    return f"```{'toml' if path.endswith('.toml') else 'python'}\n{text.strip()}\n```"


def versions(_: str) -> str:
    """The tested ranges."""
    tested = capabilities.TESTED_VERSIONS
    return table(("package", "tested range"), ((f"`{a}`", f"`{b}`") for a, b in tested.items()))


def refused(_: str) -> str:
    """Features that every strategy refuses."""
    return table(("refused", "what to do"), ((limit.feature, limit.advice) for limit in limits.EVERY))


def combinations(_: str) -> str:
    """Features that some strategies and settings refuse. The line that refuses them has the advice."""
    return "\n".join(f"- {limit.feature}" for limit in limits.SOME)


def papers(which: str) -> str:
    """Main claims of a paper; with no word, how many numbers of each paper come out."""
    rows = of_papers.read()
    if which:
        main = [row for row in rows if row["paper"] == which and row["headline"]]
        reasons = ["", *(row["why"] for row in main)]
        shown = (
            (
                row["headline"],
                row["published"],
                "; padded: ".join(filter(None, (row["simulated"], row["padded"]))) or "–",
                row["holds"],
                "the same" if row["why"] and row["why"] == before else row["why"],
            )
            for row, before in zip(main, reasons, strict=False)
        )
        return table(("main claim", "paper", "simulated", "holds", "if not, why"), shown)
    counted = []
    for paper, name in (*PAPERS.items(), ("", "all")):
        own = [row for row in rows if paper in ("", row["paper"])]
        loads = f"log-normal, sigma {SKEWS[paper]}" if paper in SKEWS else "even" if paper else ""
        also = [row for row in own if row["padded"]]
        numbers = (of_papers.count(own), of_papers.count(also), of_papers.count(also, "padded holds"))
        counted.append((name, *(f"{near} of {total}" if total else "–" for near, total in numbers), loads))
    within = f"within {NEAR:.0%}".replace("%", " %")
    return table(("paper", f"numbers {within}", "those over EP", "… if EP is padded", "loads"), counted)


GENERATORS: dict[str, Callable[[str], str]] = {
    writer.__name__: writer for writer in (settings, results, papers, code, versions, refused, combinations)
}
"""What may stand after ``table:``, by its first word. The other words are the argument."""


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    head, *drawn = (
        f"| {' | '.join(cell.replace('|', '\\|') for cell in cells)} |" for cells in (header, *rows)
    )
    return "\n".join([head, "|---" * len(header) + "|", *drawn])


def written(page: str) -> str:
    """Return the text of a page with all its generated parts renewed."""

    def renew(part: re.Match[str]) -> str:
        kind, _, argument = part["words"].partition(" ")
        return f"<!-- table: {part['words']} -->\n\n{GENERATORS[kind](argument)}\n\n<!-- end -->"

    return _PART.sub(renew, page)


if __name__ == "__main__":
    for path in sorted(DOCS.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        if (renewed := written(text)) != text:
            path.write_text(renewed, encoding="utf-8")
            print(path.relative_to(ROOT))
