"""Prints figures and tables of the papers beside the values that the simulator computes for them.

    python benchmarks/reproduce_papers.py                  # all papers
    python benchmarks/reproduce_papers.py --paper hecate   # one paper
    python benchmarks/reproduce_papers.py --pages docs     # also writes docs/papers*.md and their pictures

The claims are data in ``benchmarks/papers/claims.csv``. The ratios are not measurements, because the
simulations differ from the papers; ``benchmarks/papers/prose`` says how. ``--sigma`` takes another spread.
"""

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

if not __package__:  # run as a file
    sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.papers.claims import NEAR, PAPERS, SKEWS, Answer, answered, count, of_paper, words
from benchmarks.papers.pages import entry_page, file_name, paper_page
from benchmarks.papers.pictures import draw_all


def answers_of(paper: str, sigma: float) -> list[Answer]:
    """Simulate all claims of a paper and show the progress on stderr."""
    claims = track(of_paper(paper), PAPERS[paper], console=Console(stderr=True), transient=True)
    return [answered(claim, sigma) for claim in claims]


def print_answers(console: Console, paper: str, answers: list[Answer], sigma: float) -> None:
    """Print one paper's table, and how many of its numbers are near."""
    table = Table(title=f"{PAPERS[paper]}; loads with sigma {sigma}", title_justify="left")
    for header in ("where", "statement", "paper", "simulated", "simulated / paper", "padded / paper"):
        table.add_column(header)
    for one in answers:
        claim = one.claim
        place = (claim.where or "(ours)", claim.what)
        if claim.kind == "larger":
            table.add_row(*place, "", f"holds in {one.holds_in} of {len(one.values)}", "", "")
        elif claim.kind != "none":
            padded = f"{one.ratio(padded=True):.2f}" if one.padded else ""
            mark = " (input)" if claim.kind == "input" else ""
            stated = words([claim.low, claim.high])
            table.add_row(*place, stated, words(one.values), f"{one.ratio():.2f}{mark}", padded)
    near, total = count(answers)
    console.print(table)
    console.print(f"{PAPERS[paper]}: {near} of {total} rows within {NEAR:.0%}")


def write_pages(folder: Path, answers: dict[str, list[Answer]]) -> None:
    """Write the pages into a folder, and the pictures into ``folder/pictures``."""
    (folder / "papers.md").write_text(entry_page(answers), encoding="utf-8")
    for paper, found in answers.items():
        (folder / file_name(paper)).write_text(paper_page(paper, found), encoding="utf-8")
    draw_all(folder / "pictures", answers)


def main() -> None:
    """Print the tables, and write the pages if they are wanted."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--paper", choices=list(PAPERS), nargs="*", help="papers to print; default: all")
    parser.add_argument("--sigma", type=float, help="spread of the loads; default: each paper's own")
    parser.add_argument("--pages", type=Path, metavar="FOLDER", help="write the pages of all papers there")
    options = parser.parse_args()
    if options.pages and (options.sigma is not None or options.paper):
        parser.error("--pages writes all papers, each with its own spread: leave out --paper and --sigma")
    console, answers = Console(width=140), {}
    for paper in options.paper or PAPERS:
        sigma = SKEWS.get(paper, 0.0) if options.sigma is None else options.sigma
        answers[paper] = answers_of(paper, sigma)
        print_answers(console, paper, answers[paper], sigma)
    if options.pages:
        write_pages(options.pages, answers)


if __name__ == "__main__":
    main()
