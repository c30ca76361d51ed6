"""Prints figures and tables of the papers beside the values that the simulator computes for them.

Run it as ``python benchmarks/reproduce_papers.py``. ``--paper hecate`` prints only one paper. The ratios are
not measurements, because the simulations differ from the papers:

* No paper publishes its loads as numbers. Three publish a sentence about their skew.
  ``benchmarks/papers/skews.py`` has these sentences and the spread of log-normal popularities that follows
  from each. ``--sigma`` takes another spread. Parm's layers have a capacity factor, so their loads are even.
* Clusters are those of ``configs/clusters``, with the sources named there. ``benchmarks/papers`` states the
  source of everything else, or that it is an assumption.

Nothing is fitted to the figures that it predicts. Where they are missed, the tables show it. Rows named
"(ours)" are about this package and are not counted. Rows marked "input" enter the simulation and are not
counted.
"""

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

if not __package__:  # run as a file
    sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.papers.page import PAPERS, Row, count, module_of, page_of, spread_of_paper, words
from benchmarks.papers.pictures import draw_all
from benchmarks.papers.setting import NEAR


def rows_of(key: str, sigma: float) -> list[Row]:
    """Simulate all rows of a paper and show the progress on stderr.

    Args:
        key: Key of the paper.
        sigma: Spread of the loads, 0 for even loads.
    """
    relations = track(module_of(key).RELATIONS, PAPERS[key], console=Console(stderr=True), transient=True)
    return [
        Row(
            relation,
            None if relation.simulated is None else relation.simulated(sigma),
            relation.beside(sigma) if relation.beside else "",
        )
        for relation in relations
    ]


def print_rows(console: Console, name: str, rows: list[Row], sigma: float) -> None:
    """Print one paper's table, and how many of its rows are near."""
    table = Table(title=f"{name}; loads with sigma {sigma}", title_justify="left")
    for header in ("where", "relation", "paper", "simulated", "simulated / paper"):
        table.add_column(header)
    for row in rows:
        relation = row.relation
        stated = words([relation.low, relation.high])
        if row.values is None:
            table.add_row(relation.where, relation.what, stated, relation.why_not, "–")
            continue
        mark = " (input)" if relation.is_input else ""
        table.add_row(relation.where, relation.what, stated, words(row.values), f"{row.ratio:.2f}{mark}")
    near, total = count(rows)
    console.print(table)
    console.print(f"{name}: {near} of {total} rows within {NEAR:.0%}")


def main() -> None:
    """Print the tables, or write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--paper", choices=list(PAPERS), nargs="*", help="papers to print; default: all")
    parser.add_argument("--sigma", type=float, help="spread of the loads; default: each paper's own")
    parser.add_argument("--page", type=Path, help="write these papers as a page, with pictures beside it")
    arguments = parser.parse_args()
    if arguments.page and arguments.sigma is not None:
        parser.error("--page has each paper with its own spread: leave out --sigma")
    console = Console(width=130)
    found = {}
    for key in arguments.paper or PAPERS:
        sigma = spread_of_paper(key) if arguments.sigma is None else arguments.sigma
        found[key] = rows_of(key, sigma)
        print_rows(console, PAPERS[key], found[key], sigma)
    console.print(
        "Ratios compare the geometric mean of the simulated values with that of the smallest and largest "
        "stated value."
    )
    if arguments.page:
        arguments.page.write_text(page_of(found), encoding="utf-8")
        draw_all(arguments.page.parent / "pictures", found)


if __name__ == "__main__":
    main()
