"""Arrays that a kernel works on, in a form that both Cython and plain Python index fast."""

import numpy as np


def zero_ints(size: int) -> memoryview:
    """Zeros, int64 ``[size]``."""
    return memoryview(np.zeros(size, np.int64))


def zero_reals(size: int) -> memoryview:
    """Zeros, float64 ``[size]``."""
    return memoryview(np.zeros(size, np.float64))
