"""The pages ``docs/papers.md`` and ``docs/papers-….md``: short prose and generated tables.

The prose is in ``prose``. ``{table}`` and the like stand where a table is put.
"""

from collections.abc import Mapping
from pathlib import Path

from benchmarks.papers.claims import NEAR, PAPERS, SKEWS, Answer, count, words

PROSE = Path(__file__).with_name("prose")
WITHIN = f"rows within {100 * NEAR:.0f} %"


def table(headers: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return a table as Markdown."""
    lines = [headers, ("---",) * len(headers), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def file_name(paper: str) -> str:
    """Return the name of a paper's page."""
    return f"papers-{paper}.md"


def _filled(name: str, tables: Mapping[str, str]) -> str:
    text = (PROSE / f"{name}.md").read_text(encoding="utf-8")
    for key, value in tables.items():
        text = text.replace(f"{{{key}}}", value)
    return text


def entry_page(answers: Mapping[str, list[Answer]]) -> str:
    """Return ``papers.md``."""
    counts = {paper: count(found) for paper, found in answers.items()}
    near, total = (sum(numbers) for numbers in zip(*counts.values(), strict=True))
    papers = [
        (
            f"[{PAPERS[paper]}]({file_name(paper)})",
            f"{of[0]} of {of[1]}",
            f"log-normal, sigma {SKEWS[paper]}" if paper in SKEWS else "even",
        )
        for paper, of in counts.items()
    ]
    main = [_headline(one) for found in answers.values() for one in found if one.claim.headline]
    tables = {
        "near": str(near),
        "total": str(total),
        "papers": table(("paper", WITHIN, "loads"), papers),
        "main": table(("paper", "main statement", "paper", "simulated", "reproduced?", "if not, why"), main),
    }
    return _filled("papers", tables)


def _headline(answer: Answer) -> tuple[str, ...]:
    claim = answer.claim
    stated = [claim.low, claim.high]
    line = (PAPERS[claim.paper], claim.headline, words(stated))
    if not answer.values:
        return (*line, "–", "no", claim.note)
    if claim.kind == "input":
        return (*line, words(answer.values), "input", "an assumption was chosen by this number")
    same_side = (min(stated) > 1) == (min(answer.values) > 1) == (max(answer.values) > 1)
    verdict = "yes" if answer.is_near() else "direction" if same_side else "no"
    padded = f"; padded: {words(answer.padded)}" if answer.padded else ""
    return (*line, words(answer.values) + padded, verdict, "" if verdict == "yes" else claim.note)


def paper_page(paper: str, answers: list[Answer]) -> str:
    """Return the page of one paper."""
    near, total = count(answers)
    padded_near, padded_total = count(answers, padded=True)
    numbers = [one for one in answers if one.claim.kind != "larger" and one.claim.what]
    has_padded = bool(padded_total)
    headers = (
        "where",
        "statement",
        "paper",
        "simulated",
        "ratio",
        *(["padded"] if has_padded else []),
        "note",
    )
    larger = [one for one in answers if one.claim.kind == "larger"]
    tables = {
        "near": str(near),
        "total": str(total),
        "padded_near": str(padded_near),
        "padded_total": str(padded_total),
        "plain_near": str(sum(one.is_near() for one in answers if one.counts and one.padded)),
        "numbers": table(headers, [_number(one, has_padded) for one in numbers]),
        "larger": table(
            ("where", "statement without a number", "holds in", "first over second", "why not everywhere"),
            [_larger(one) for one in larger],
        ),
        "missing": table(
            ("not reproduced", "why"),
            [(one.claim.where, one.claim.note) for one in answers if not one.claim.what],
        ),
    }
    return _filled(paper, tables)


def _number(answer: Answer, has_padded: bool) -> tuple[str, ...]:
    claim = answer.claim
    line = (claim.where or "(ours)", claim.what, words([claim.low, claim.high]))
    if not answer.values:
        return (*line, "–", "–", *(["–"] if has_padded else []), f"not reproduced: {claim.note}")
    is_missed = answer.counts and not answer.is_near()
    note = "an input, not counted" if claim.kind == "input" else claim.note if is_missed else ""
    padded = f"{words(answer.padded)} ({_ratio(answer, padded=True)})" if answer.padded else ""
    note = "; ".join(filter(None, (answer.beside, note or ("open" if is_missed and not padded else ""))))
    return (*line, words(answer.values), _ratio(answer), *([padded] if has_padded else []), note)


def _ratio(answer: Answer, *, padded: bool = False) -> str:
    """The ratio, in bold type if the row counts and is missed."""
    ratio = f"{answer.ratio(padded=padded):.2f}"
    return f"**{ratio}**" if answer.counts and not answer.is_near(padded=padded) else ratio


def _larger(answer: Answer) -> tuple[str, ...]:
    ratios = [large / small for large, small in answer.values]
    note = answer.claim.note if answer.holds_in < len(ratios) else ""
    held = f"{answer.holds_in} of {len(ratios)}"
    where = answer.claim.where or "(ours)"
    return (where, answer.claim.what, held, f"{min(ratios):.2f}–{max(ratios):.2f}", note)
