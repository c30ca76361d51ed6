"""Prints figures and tables of the papers beside the values that the simulator computes for them.

    python benchmarks/reproduce_papers.py                  # all papers
    python benchmarks/reproduce_papers.py --paper hecate   # one paper
    python benchmarks/reproduce_papers.py --write          # also writes benchmarks/papers/results.csv

The claims are data in ``benchmarks/papers/claims.csv``. The ratios are not measurements, because the
simulations differ from the papers; the modules in ``benchmarks/papers`` say how. If a claim is only that
one thing is larger than another, "simulated" is the one over the other in all simulated cases. Rows named
"(ours)" are about this package or about another assumption. ``--sigma`` takes another spread.
"""

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import track

if not __package__:  # run as a file
    sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.papers import results
from benchmarks.papers.claims import NEAR, PAPERS, SKEWS, answered, of_paper
from megatron_fssdp.report.page import Table, terminal_table

SHOWN = ("where", "claim", "published", "simulated", "ratio", "padded", "padded ratio", "holds")
PROSE = frozenset({"claim", "holds", "why"})


def rows_of(paper: str, sigma: float) -> list[dict[str, str]]:
    """Simulate all claims of a paper and show the progress on stderr."""
    claims = track(of_paper(paper), PAPERS[paper], console=Console(stderr=True), transient=True)
    return [results.row_of(answered(claim, sigma)) for claim in claims]


def print_rows(console: Console, paper: str, rows: list[dict[str, str]], sigma: float) -> None:
    """Print one paper's table, and how many of its numbers are near."""
    columns = [name for name in SHOWN if any(row[name] for row in rows)]
    reasons = ("; ".join(filter(None, (row["beside"], row["why"]))) for row in rows)
    cells = [(*(row[name] for name in columns), why) for row, why in zip(rows, reasons, strict=True)]
    near, total = results.count(rows)
    table = Table((*columns, "why"), tuple(cells), PROSE)
    shown = terminal_table(
        table,
        f"{PAPERS[paper]}; loads with sigma {sigma}",
        f"{PAPERS[paper]}: {near} of {total} numbers within {NEAR:.0%}",
        SHOWN[2:],
    )
    shown.row_styles = ["", "dim"]
    console.print(shown)


def main() -> None:
    """Print the tables, and write the file if it is wanted."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--paper", choices=list(PAPERS), nargs="*", help="papers to print; default: all")
    parser.add_argument("--sigma", type=float, help="spread of the loads; default: each paper's own")
    parser.add_argument("--write", action="store_true", help="write the rows of all papers to results.csv")
    options = parser.parse_args()
    if options.write and (options.sigma is not None or options.paper):
        parser.error("--write needs all papers, each with its own spread: leave out --paper and --sigma")
    console, rows = Console(width=None if sys.stdout.isatty() else 160), []
    for paper in options.paper or PAPERS:
        sigma = SKEWS.get(paper, 0.0) if options.sigma is None else options.sigma
        paper_rows = rows_of(paper, sigma)
        print_rows(console, paper, paper_rows, sigma)
        rows += paper_rows
    if options.write:
        results.write(rows)
        print(f"wrote {results.FILE}; scripts/docs/tables.py puts it into docs/papers.md")


if __name__ == "__main__":
    main()
