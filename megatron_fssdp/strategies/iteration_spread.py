"""Seconds of iterations in three numbers, and whether others are really slower."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEAST_SEEN = 4
"""Iterations below which quartiles say nothing."""


@dataclass(frozen=True)
class IterationSpread:
    """Quartiles of the seconds of some iterations.

    Attributes:
        num_seen: How many there were.
        low_s: Lower quartile.
        median_s: Median.
        high_s: Upper quartile.
    """

    num_seen: int
    low_s: float
    median_s: float
    high_s: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "IterationSpread | None":
        """The spread of these seconds; ``None`` of none."""
        if not seconds:
            return None
        low, median, high = np.quantile(seconds, [0.25, 0.5, 0.75]).tolist()
        return cls(len(seconds), low, median, high)

    def is_slower_than(self, other: "IterationSpread") -> bool:
        """Whether three quarters of these take longer than three quarters of the others."""
        return min(self.num_seen, other.num_seen) >= LEAST_SEEN and self.low_s > other.high_s
