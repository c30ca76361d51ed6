"""Claims of the papers, read from ``claims.csv``, and what the simulator answers to each of them.

A line of the file is one claim. Its columns are:

* ``paper``: a key of :data:`PAPERS`; ``where``: figure, table or section; ``what``: the claim in words.
* ``kind``: ``row`` is a number of the paper that counts. ``input`` is a number of the paper that the
  simulation takes or that decided about an assumption, so that its ratio proves nothing. ``ours`` is about
  this package or about another assumption. ``larger`` is a claim without a number, that one thing is larger
  than another one. ``none`` cannot be simulated; ``note`` says why.
* ``low``, ``high``: smallest and largest stated value, in the unit that ``what`` names, else a ratio.
* ``quantity``: function in the module of the paper that computes the values from the spread of the loads.
  ``settings``: its other arguments (model, cluster, system …) as a YAML mapping without braces.
* ``padded``: ``yes`` if the row is computed a second time with the baseline whose buffers are padded.
* ``beside``: words and quantities with the same settings that stand beside the ratio.
* ``note``: why a claim is missed. ``headline``: words of the claim on the page.
"""

import csv
import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml

PAPERS = {"parm": "Parm", "fastermoe": "FasterMoE", "pro-prophet": "Pro-Prophet", "hecate": "Hecate"}
"""Names by key, in the order of the page."""

SKEWS = {"fastermoe": 1.75, "pro-prophet": 1.25, "hecate": 1.2}
"""Spread of each paper's log-normal popularities, the same for all of its models. Parm's loads are even.

No paper publishes its loads as numbers. The spreads follow from one sentence of each:

* FasterMoE, §2.4: "4 out of 16 experts are processing about 20% of all tokens, 3.2× the average." 20 % is 3.2
  times 1/16, so each of the four has about 20 %. With 1.75, the four most popular have 19.6 % each.
* Pro-Prophet, §II-A: "In most MoE layers, the three heaviest experts hold over 50% of inputs, while the three
  least less than 5%." "Most" is taken as three of four draws.
* Hecate, §1: "imbalanced expert loads can significantly slow down the training performance by up to 5.18×". A
  device then has at least 5.18 times the mean load. With 1.2, the largest of 64 experts on 32 devices is 5.0
  times the mean.
"""

NEAR = 0.15
"""Largest relative distance from the paper at which a row counts as reproduced."""


@dataclass(frozen=True)
class Claim:
    """One line of ``claims.csv``, see the module's text."""

    paper: str
    kind: str
    where: str
    what: str
    low: float
    high: float
    quantity: str
    settings: dict[str, Any]
    padded: bool
    beside: dict[str, str]
    note: str
    headline: str

    def values(self, sigma: float, quantity: str = "", **others: object) -> list[Any]:
        """Simulate the claim.

        Args:
            sigma: Spread of the loads, 0 for even loads.
            quantity: Another quantity, for what stands beside the ratio.
            others: Settings that are added.

        Returns:
            Numbers; for a claim of the kind ``larger``, a pair for each simulated case.
        """
        module = importlib.import_module(f"benchmarks.papers.{self.paper.replace('-', '_')}")
        values = getattr(module, quantity or self.quantity)(sigma, **self.settings, **others)
        return list(values) if isinstance(values, list | tuple) else [float(values)]


@dataclass(frozen=True)
class Answer:
    """A claim with its simulated values, those with padded buffers, and what stands beside them."""

    claim: Claim
    values: list[Any]
    padded: list[float]
    beside: str

    def ratio(self, *, padded: bool = False) -> float:
        """Geometric mean of the simulated values divided by that of the paper's limits."""
        values = self.padded if padded else self.values
        return geometric_mean(values) / geometric_mean([self.claim.low, self.claim.high])

    def is_near(self, *, padded: bool = False) -> bool:
        """Whether the number counts as reproduced."""
        return abs(self.ratio(padded=padded) - 1) <= NEAR

    @property
    def same_side(self) -> bool:
        """Whether the same system is faster as in the paper, in all simulated cases."""
        ours = [value > 1 for value in self.values]
        return all(is_faster == (self.claim.low > 1) for is_faster in ours)

    @property
    def holds_in(self) -> int:
        """Number of cases in which a claim without a number holds."""
        return sum(large > small for large, small in self.values)


@cache
def claims() -> tuple[Claim, ...]:
    """All claims, in the order of the file."""
    text = Path(__file__).with_name("claims.csv").read_text(encoding="utf-8")
    parsed = []
    for line in csv.DictReader(text.splitlines()):
        low = float(line["low"] or "nan")
        read = {
            "low": low,
            "high": float(line["high"] or low),
            "settings": yaml.safe_load(f"{{{line['settings']}}}"),
            "padded": line["padded"] == "yes",
            "beside": yaml.safe_load(f"{{{line['beside']}}}"),
        }
        parsed.append(Claim(**{**line, **read}))
    return tuple(parsed)


def of_paper(paper: str) -> list[Claim]:
    """The claims of one paper."""
    return [claim for claim in claims() if claim.paper == paper]


def stated(paper: str, quantity: str, **settings: object) -> float:
    """The paper's own value of a quantity, for what follows from several published numbers."""
    (value,) = (
        claim.low for claim in of_paper(paper) if (claim.quantity, claim.settings) == (quantity, settings)
    )
    return value


def answered(claim: Claim, sigma: float) -> Answer:
    """Simulate a claim."""
    if claim.kind == "none":
        return Answer(claim, [], [], "")
    beside = (f"{label}: {words(claim.values(sigma, quantity))}" for label, quantity in claim.beside.items())
    padded = claim.values(sigma, padded=True) if claim.padded else []
    return Answer(claim, claim.values(sigma), padded, "; ".join(beside))


def geometric_mean(values: Iterable[float]) -> float:
    """Return the geometric mean."""
    return float(np.exp(np.mean(np.log(np.maximum(list(values), 1e-9)))))


def words(values: list[float]) -> str:
    """Return one number, or the smallest and the largest, as text."""
    low, high = (f"{value:.2f}" if value < 100 else f"{value:,.0f}" for value in (min(values), max(values)))
    return low if low == high else f"{low}–{high}"
