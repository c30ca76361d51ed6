"""Prints figures and tables of the papers beside the values that the simulator computes for them.

Run it as ``python benchmarks/reproduce_papers.py``. ``--paper hecate`` prints only one paper. The ratios are
not measurements, because the simulations differ from the papers:

* No paper publishes its loads. The only number for their skew is Hecate's (§1): its loads slow EP down by up
  to 5.18 times on its V100 cluster. Here, popularities are log-normal and drift from iteration to iteration.
  The script searches for the spread that slows EP down equally, and says so if none does. It also prints
  tables for the three spreads of the testbed's workloads. No spread was chosen by its results. Parm's layers
  have a capacity factor and even loads, so its table is printed once.
* Clusters are those of ``configs/clusters``, with the assumptions named there. ``benchmarks/papers`` states
  the assumptions about everything else that a paper does not state.

Nothing is tuned to the papers' figures. Where they are missed, the tables show it.
"""

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

if not __package__:  # run as a file
    sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.papers import fastermoe, hecate, parm, pro_prophet
from benchmarks.papers.setting import Relation
from megatron_fssdp.simulation.workloads import LOG_NORMAL_SIGMAS

MOST_SIGMA = 4.0
"""Largest spread in the search for a spread that matches the paper."""

PAPERS = {
    "hecate": ("Hecate", hecate.RELATIONS),
    "fastermoe": ("FasterMoE", fastermoe.RELATIONS),
    "pro-prophet": ("Pro-Prophet", pro_prophet.RELATIONS),
}
WITH_EVEN_LOADS = {"parm": ("Parm", parm.RELATIONS)}


def fitted_sigma() -> float | None:
    """Return the spread that slows EP on Hecate's cluster A down as published, or None if there is none."""
    low, high = 0.0, MOST_SIGMA
    if hecate.slowdown(high) < hecate.PUBLISHED_SLOWDOWN:
        return None
    for _ in range(7):
        middle = (low + high) / 2
        is_less = hecate.slowdown(middle) < hecate.PUBLISHED_SLOWDOWN
        low, high = (middle, high) if is_less else (low, middle)
    return round((low + high) / 2, 2)


def _words(values: list[float]) -> str:
    low, high = (f"{value:.2f}" if value < 100 else f"{value:,.0f}" for value in (min(values), max(values)))
    return low if low == high else f"{low}–{high}"


def print_relations(
    console: Console, name: str, relations: tuple[Relation, ...], sigma: float | None
) -> None:
    """Print one paper's table.

    Args:
        console: Console to print to.
        name: Name of the paper.
        relations: Statements of the paper.
        sigma: Spread of the loads, or None for even loads.
    """
    loads = f"loads log-normal, sigma {sigma}, not the paper's" if sigma is not None else "even loads"
    table = Table(title=f"{name}; {loads}", title_justify="left")
    for header in ("where", "relation", "paper", "simulated", "simulated / paper"):
        table.add_column(header)
    for relation in relations:
        paper = [relation.low, relation.high]
        if relation.simulated is None:
            table.add_row(relation.where, relation.what, _words(paper), relation.why_not, "–")
            continue
        values = relation.simulated(sigma or 0.0)
        ratio = f"{relation.ratio(values):.2f}"
        table.add_row(relation.where, relation.what, _words(paper), _words(values), ratio)
    console.print(table)


def spreads(console: Console) -> list[float]:
    """Return the spreads of the testbed's workloads, and the one with the published slowdown if it exists."""
    sigmas, fitted = list(LOG_NORMAL_SIGMAS.values()), fitted_sigma()
    if fitted is not None:
        return [*sigmas, fitted]
    console.print(
        f"No spread up to sigma {MOST_SIGMA} slows EP down {hecate.PUBLISHED_SLOWDOWN} times, as Hecate's "
        "loads did at worst. So the loads of these tables do not have the published skew."
    )
    return sigmas


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--paper", choices=[*PAPERS, *WITH_EVEN_LOADS], nargs="*", help="papers to print; default: all"
    )
    parser.add_argument("--sigma", type=float, nargs="*", help="spreads to print tables for")
    arguments = parser.parse_args()
    console = Console(width=130)
    wanted = arguments.paper or [*PAPERS, *WITH_EVEN_LOADS]
    with_spreads = [key for key in wanted if key in PAPERS]
    for sigma in (arguments.sigma or spreads(console)) if with_spreads else ():
        console.print(
            f"sigma {sigma}: EP on Hecate's cluster A is {hecate.slowdown(sigma):.2f} times slower than with "
            f"even loads (the paper: up to {hecate.PUBLISHED_SLOWDOWN})"
        )
        for key in with_spreads:
            print_relations(console, *PAPERS[key], sigma)
    for key in wanted:
        if key in WITH_EVEN_LOADS:
            print_relations(console, *WITH_EVEN_LOADS[key], None)
    console.print(
        "Ratios compare the geometric mean of the simulated values with that of the smallest and largest "
        "stated value."
    )


if __name__ == "__main__":
    main()
