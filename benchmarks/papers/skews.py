"""Skew of each paper's loads, from a sentence of its text.

Loads are drawn with log-normal popularities that drift from iteration to iteration. Their spread, sigma,
follows from the sentence, and not from the results of a simulation. The same spread is used for all models of
a paper, because no paper has a number for each model.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

NUM_DRAWS = 4000
"""Draws of popularities. The means below change by less than 0.5 % with another seed."""

MOST_SIGMA = 4.0


@dataclass(frozen=True)
class Skew:
    """One paper's skew.

    Attributes:
        paper: Key of the paper in ``reproduce_papers``.
        where: Section of the paper.
        sentence: The paper's words.
        sigma: Spread that is used, rounded.
        meaning: How the spread follows from the sentence.
    """

    paper: str
    where: str
    sentence: str
    sigma: float
    meaning: str


def spread_of(statistic: Callable[[np.ndarray], float], num_experts: int, value: float) -> float:
    """Return the spread at which the mean of a statistic over drawn popularities has a value.

    Args:
        statistic: Function of shares of tokens, descending, float64 ``[draws, num_experts]``. It grows with
            the spread.
        num_experts: Number of experts of a layer.
        value: Wanted mean.
    """
    normal = np.random.default_rng(0).normal(size=(NUM_DRAWS, num_experts))
    low, high = 0.0, MOST_SIGMA
    for _ in range(20):
        middle = (low + high) / 2
        share = np.exp(middle * normal)
        share = -np.sort(-share / share.sum(axis=1, keepdims=True), axis=1)
        low, high = (middle, high) if statistic(share) < value else (low, middle)
    return low


def share_of_top(number: int) -> Callable[[np.ndarray], float]:
    """Return the statistic that is the mean share of tokens of the most popular experts."""
    return lambda share: float(share[:, :number].sum(axis=1).mean())


SKEWS = {
    skew.paper: skew
    for skew in (
        Skew(
            "fastermoe",
            "§2.4",
            "4 out of 16 experts are processing about 20% of all tokens, 3.2× the average.",
            1.75,
            "20 % is 3.2 times 1/16, so each of the four has about 20 %. The four most popular of 16 "
            "experts have 19.6 % each on average with sigma 1.75, and 20.0 % with 1.85. Table 3 agrees: "
            "FastMoE's iteration is 2.12 times that of GShard, whose loads are limited, and 2.10 times in "
            "the simulation.",
        ),
        Skew(
            "pro-prophet",
            "§II-A",
            "In most MoE layers, the three heaviest experts hold over 50% of inputs, while the three "
            "least less than 5%.",
            1.25,
            "Most is taken as three of four: with sigma 1.25, three of four draws of 16 popularities have "
            "over 50 % at the three most popular experts. One of two would be sigma 1.0.",
        ),
        Skew(
            "hecate",
            "§1",
            "compared to a balanced load distribution, imbalanced expert loads can significantly slow "
            "down the training performance by up to 5.18×",
            1.2,
            "No distribution is in the text. A slowdown of 5.18 needs a device with at least 5.18 times "
            "the mean load. With 64 experts on 32 devices the largest load is 5.0 times the mean on "
            "average with sigma 1.2.",
        ),
    )
}
