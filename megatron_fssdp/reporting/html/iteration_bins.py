"""Groups iterations if there are more than a figure can show.

Shape letters: I iterations, B bins.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class IterationBins:
    """Bins of consecutive iterations. All bins have the same size, except that the last can be smaller.

    Attributes:
        iterations: Iteration numbers, ascending: int64 ``[I]``.
        most: Maximum number of bins.
    """

    iterations: NDArray[np.int64]
    most: int

    @property
    def width(self) -> int:
        """Number of iterations in a bin."""
        return max(1, -(-len(self.iterations) // max(1, self.most)))

    @property
    def _starts(self) -> NDArray[np.int64]:
        return np.arange(0, len(self.iterations), self.width)

    @property
    def middles(self) -> NDArray[np.float64]:
        """Mean iteration number of each bin, float64 ``[B]``."""
        return self.mean(self.iterations)

    def mean(self, values: NDArray[np.generic]) -> NDArray[np.float64]:
        """Compute the mean of each bin along the first axis, ignoring NaN.

        Args:
            values: Numbers ``[I, …]``.

        Returns:
            Means, float64 ``[B, …]``. NaN where a bin has only NaN.
        """
        if self.width == 1:
            return np.asarray(values, dtype=np.float64)
        numbers = np.asarray(values, dtype=np.float64)
        known = ~np.isnan(numbers)
        totals = np.add.reduceat(np.where(known, numbers, 0.0), self._starts, axis=0)
        counts = np.add.reduceat(known.astype(np.int64), self._starts, axis=0)
        return np.where(counts > 0, totals / np.maximum(counts, 1), np.nan)

    def peak(self, values: NDArray[np.generic]) -> NDArray[np.float64]:
        """Return the largest value of each bin along the first axis: ``[I, …]`` to float64 ``[B, …]``."""
        return np.maximum.reduceat(np.asarray(values, dtype=np.float64), self._starts, axis=0)

    def first[Scalar: np.generic](self, values: NDArray[Scalar]) -> NDArray[Scalar]:
        """Return the first value of each bin along the first axis, for values that have no mean."""
        return values[self._starts]

    def describe(self) -> str:
        """Return a sentence on the size of the bins. It is empty if each bin holds one iteration."""
        return f"Each point is the mean of {self.width} iterations." if self.width > 1 else ""
