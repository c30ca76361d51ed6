"""Read-only numpy arrays for frozen dataclasses: the contents of a plan cannot change either."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike


def frozen_array(values: ArrayLike, dtype: Any) -> np.ndarray:
    """Copy ``values`` into a read-only, C-ordered array of data type ``dtype``."""
    array = np.array(values, dtype=dtype, order="C", copy=True)
    array.setflags(write=False)
    return array
