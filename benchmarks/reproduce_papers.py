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

from benchmarks.papers import fastermoe, hecate, parm, pro_prophet
from benchmarks.papers.setting import NEAR, Relation, is_near
from benchmarks.papers.skews import SKEWS

PAPERS = {
    "fastermoe": ("FasterMoE", fastermoe.RELATIONS),
    "hecate": ("Hecate", hecate.RELATIONS),
    "parm": ("Parm", parm.RELATIONS),
    "pro-prophet": ("Pro-Prophet", pro_prophet.RELATIONS),
}


def spread_for(key: str) -> float:
    """Return the spread of a paper's loads, which is 0 for even loads."""
    return SKEWS[key].sigma if key in SKEWS else 0.0


def _words(values: list[float]) -> str:
    low, high = (f"{value:.2f}" if value < 100 else f"{value:,.0f}" for value in (min(values), max(values)))
    return low if low == high else f"{low}–{high}"


def print_relations(console: Console, name: str, relations: tuple[Relation, ...], sigma: float) -> None:
    """Print one paper's table, and how many of its rows are near.

    Args:
        console: Console to print to.
        name: Name of the paper.
        relations: Statements of the paper.
        sigma: Spread of the loads, 0 for even loads.
    """
    table = Table(title=f"{name}; loads with sigma {sigma}", title_justify="left")
    for header in ("where", "relation", "paper", "simulated", "simulated / paper"):
        table.add_column(header)
    ratios = []
    for relation in track(relations, name, console=Console(stderr=True), transient=True):
        paper = [relation.low, relation.high]
        if relation.simulated is None:
            table.add_row(relation.where, relation.what, _words(paper), relation.why_not, "–")
            continue
        values = relation.simulated(sigma)
        ratio = relation.ratio(values)
        if relation.counts:
            ratios.append(ratio)
        mark = " (input)" if relation.is_input else ""
        table.add_row(relation.where, relation.what, _words(paper), _words(values), f"{ratio:.2f}{mark}")
    console.print(table)
    near = sum(is_near(ratio) for ratio in ratios)
    console.print(f"{name}: {near} of {len(ratios)} rows within {NEAR:.0%}")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--paper", choices=list(PAPERS), nargs="*", help="papers to print; default: all")
    parser.add_argument("--sigma", type=float, help="spread of the loads; default: each paper's own")
    arguments = parser.parse_args()
    console = Console(width=130)
    for key in arguments.paper or PAPERS:
        sigma = spread_for(key) if arguments.sigma is None else arguments.sigma
        print_relations(console, *PAPERS[key], sigma)
    console.print(
        "Ratios compare the geometric mean of the simulated values with that of the smallest and largest "
        "stated value."
    )


if __name__ == "__main__":
    main()
