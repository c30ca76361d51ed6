"""Checks of loads and counts that a caller hands to a planner."""

import numpy as np


def checked_load(load: np.ndarray, name: str, shape: tuple[int, ...], meaning: str) -> np.ndarray:
    """The loads as contiguous float64 of the same shape.

    Args:
        load: Loads of any shape.
        name: Name of the array, for messages.
        shape: Shape that is wanted.
        meaning: What the axes stand for, for messages.

    Raises:
        ValueError: The shape is wrong, or a load is negative or not finite.
    """
    checked = np.ascontiguousarray(load, dtype=np.float64)
    if checked.shape != shape:
        raise ValueError(f"{name} has shape {checked.shape}: wanted {shape}, {meaning}")
    # A minimum or maximum that is not a number fails both comparisons.
    if not (float(checked.min()) >= 0 and np.isfinite(float(checked.max()))):
        place = tuple(int(i) for i in np.argwhere(~((checked >= 0) & np.isfinite(checked)))[0])
        raise ValueError(
            f"{name}[{', '.join(map(str, place))}] is {checked[place]}: wanted a finite load of 0 or more"
        )
    return checked


def checked_counts(counts_DE: np.ndarray, num_devices: int, num_experts: int) -> np.ndarray:
    """The counts as int64 [D, E].

    Raises:
        ValueError: Wrong shape, no integers, or a negative count.
    """
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
    return counts.astype(np.int64)
