"""Read-only numpy arrays for frozen dataclasses: the contents of a plan cannot change either."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike


def frozen_array(values: ArrayLike, dtype: Any) -> np.ndarray:
    """Return ``values`` as a read-only, C-ordered array of data type ``dtype``.

    Values are copied, except those of an array that is such an array already and has memory of its own.
    """
    if isinstance(values, np.ndarray) and values.base is None:
        flags = values.flags
        if values.dtype == dtype and flags.c_contiguous and not flags.writeable:
            return values
    array = np.array(values, dtype=dtype, order="C", copy=True)
    array.setflags(write=False)
    return array
