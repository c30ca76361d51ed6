"""Read-only numpy arrays, so that a frozen plan's contents are frozen too."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike


def frozen_array(values: ArrayLike, dtype: Any) -> np.ndarray:
    """Copies ``values`` into a C-ordered array of ``dtype`` that nobody can write to."""
    array = np.array(values, dtype=dtype, order="C", copy=True)
    array.setflags(write=False)
    return array
