"""Iterations put together where there are more than a picture has room for.

Shape letters: I iterations, B bins.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class IterationBins:
    """Neighbouring iterations, in groups of equal size but for the last.

    Attributes:
        iterations: Their numbers (I), ascending.
        most: Bins that there is room for.
    """

    iterations: NDArray[np.int64]
    most: int

    @property
    def width(self) -> int:
        """Iterations in a bin."""
        return max(1, -(-len(self.iterations) // max(1, self.most)))

    @property
    def _starts(self) -> NDArray[np.int64]:
        return np.arange(0, len(self.iterations), self.width)

    @property
    def middles(self) -> NDArray[np.float64]:
        """Mean iteration number of each bin (B)."""
        return self.mean(self.iterations)

    def mean(self, values: NDArray[np.generic]) -> NDArray[np.float64]:
        """Mean over each bin, along the first axis; of what is known, where something is NaN.

        Args:
            values: (I, …).

        Returns:
            (B, …).
        """
        if self.width == 1:
            return np.asarray(values, dtype=np.float64)
        numbers = np.asarray(values, dtype=np.float64)
        known = ~np.isnan(numbers)
        totals = np.add.reduceat(np.where(known, numbers, 0.0), self._starts, axis=0)
        counts = np.add.reduceat(known.astype(np.int64), self._starts, axis=0)
        return np.where(counts > 0, totals / np.maximum(counts, 1), np.nan)

    def peak(self, values: NDArray[np.generic]) -> NDArray[np.float64]:
        """Largest value in each bin, along the first axis."""
        return np.maximum.reduceat(np.asarray(values, dtype=np.float64), self._starts, axis=0)

    def first[Scalar: np.generic](self, values: NDArray[Scalar]) -> NDArray[Scalar]:
        """What each bin begins with, along the first axis: of values that have no mean."""
        return values[self._starts]

    def describe(self) -> str:
        """A sentence where bins hold several iterations; empty otherwise."""
        return f"Each point is the mean of {self.width} iterations." if self.width > 1 else ""
