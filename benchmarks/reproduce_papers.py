"""Prints figures and tables of the papers beside the values that the simulator computes for them.

Run it as ``python benchmarks/reproduce_papers.py``. ``--paper hecate`` prints only one paper. ``--pages
docs`` also writes the pages ``docs/papers.md`` and ``docs/papers-….md`` with their pictures. The ratios are
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

from benchmarks.papers.entry_page import entry_page
from benchmarks.papers.paper_page import file_name, paper_page
from benchmarks.papers.paper_rows import PAPERS, Row, count, module_of, spread_of_paper, words
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


def write_pages(folder: Path, rows_by_paper: dict[str, list[Row]]) -> None:
    """Write the entry page, a page for each paper, and the pictures into ``folder/pictures``."""
    (folder / "papers.md").write_text(entry_page(rows_by_paper), encoding="utf-8")
    for key, rows in rows_by_paper.items():
        (folder / file_name(key)).write_text(paper_page(key, rows), encoding="utf-8")
    pictures = folder / "pictures"
    pictures.mkdir(exist_ok=True)
    draw_all(pictures, rows_by_paper)


def main() -> None:
    """Print the tables, and write the pages if they are wanted."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--paper", choices=list(PAPERS), nargs="*", help="papers to print; default: all")
    parser.add_argument("--sigma", type=float, help="spread of the loads; default: each paper's own")
    parser.add_argument("--pages", type=Path, metavar="FOLDER", help="write the pages of all papers there")
    arguments = parser.parse_args()
    if arguments.pages and (arguments.sigma is not None or arguments.paper):
        parser.error("--pages writes all papers, each with its own spread: leave out --paper and --sigma")
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
    if arguments.pages:
        write_pages(arguments.pages, found)


if __name__ == "__main__":
    main()
