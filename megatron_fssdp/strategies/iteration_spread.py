"""Quartiles of iteration times, and a test whether some iterations are clearly slower than others."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEAST_SEEN = 4
"""Smallest number of iterations for which quartiles are meaningful."""


@dataclass(frozen=True)
class IterationSpread:
    """Quartiles of the seconds of some iterations.

    Attributes:
        num_seen: Number of iterations.
        low_s: Lower quartile, in seconds.
        median_s: Median, in seconds.
        high_s: Upper quartile, in seconds.
    """

    num_seen: int
    low_s: float
    median_s: float
    high_s: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "IterationSpread | None":
        """The spread of the given seconds; ``None`` if there are no seconds."""
        if not seconds:
            return None
        low, median, high = np.quantile(seconds, [0.25, 0.5, 0.75]).tolist()
        return cls(len(seconds), low, median, high)

    def is_slower_than(self, other: "IterationSpread") -> bool:
        """Whether three quarters of these iterations take longer than three quarters of the other ones.

        The answer is False if one side has fewer than :data:`LEAST_SEEN` iterations.
        """
        return min(self.num_seen, other.num_seen) >= LEAST_SEEN and self.low_s > other.high_s
