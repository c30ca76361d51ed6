"""Arrays of plans, which are read-only, and a check of the counts that planners are given."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike


def frozen_array(values: ArrayLike, dtype: Any) -> np.ndarray:
    """A read-only, C-ordered array; one that is such an array, with memory of its own, is not copied."""
    if isinstance(values, np.ndarray) and values.base is None:
        flags = values.flags
        if values.dtype == dtype and flags.c_contiguous and not flags.writeable:
            return values
    array = np.array(values, dtype=dtype, order="C", copy=True)
    array.setflags(write=False)
    return array


def checked_counts(counts_DE: np.ndarray, num_devices: int, num_experts: int) -> np.ndarray:
    """The (token, k) pairs ``[D, E]`` as read-only int64; a ValueError if they are below 0 or no integers."""
    counts = np.asarray(counts_DE)
    if counts.shape != (num_devices, num_experts) or counts.dtype.kind not in "iu":
        raise ValueError(
            f"counts_DE has shape {counts.shape} and dtype {counts.dtype}: wanted integers "
            f"({num_devices}, {num_experts}), by source device and expert"
        )
    if counts.min() < 0:
        source, expert = (int(i) for i in np.argwhere(counts < 0)[0])
        raise ValueError(
            f"counts_DE[{source}, {expert}] is {counts[source, expert]}: wanted 0 or more tokens"
        )
    return frozen_array(counts, np.int64)


def views(*arrays: np.ndarray) -> Iterator[memoryview]:
    """The arrays for the kernels."""
    return (memoryview(array) for array in arrays)


def zero_ints(size: int) -> memoryview:
    """Zeros for the kernels, int64."""
    return memoryview(np.zeros(size, np.int64))


def zero_reals(size: int) -> memoryview:
    """Zeros for the kernels, float64."""
    return memoryview(np.zeros(size))


def doubling(most: int) -> list[int]:
    """The numbers 1, 2, 4, ... that are below ``most``, then ``most``. The list is empty for 0."""
    return [*(1 << i for i in range(max(most - 1, 0).bit_length())), most] if most else []
