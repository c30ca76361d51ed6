"""Selects one of several strategies for each layer by their modelled seconds.

Shape letters: L MoE layers, C candidate strategies.
"""

import numpy as np


def select_by_seconds(
    seconds_LC: np.ndarray,
    present_L: np.ndarray,
    *,
    least_gain: float,
    barred_LC: np.ndarray | None = None,
) -> np.ndarray:
    """Select for each layer the first candidate that is close to the fewest seconds, if it saves enough.

    A layer keeps its present candidate if the saving is too small. Candidates are close if they differ by
    less than the fraction ``least_gain``. The model cannot distinguish close candidates, so the first one is
    selected: candidates that move less are first in the order.

    Args:
        seconds_LC: Modelled seconds of an iteration, float ``[L, C]``; infinite if a candidate cannot serve
            the layer.
        present_L: Index of the present candidate of each layer, int64 ``[L]``.
        least_gain: Fraction of a candidate's seconds that another candidate must save to replace it.
        barred_LC: Whether a layer must not change to a candidate, bool ``[L, C]``; ``None`` bars nothing.

    Returns:
        Index of the selected candidate of each layer, int64 ``[L]``.

    Raises:
        ValueError: The shapes do not fit, or some seconds are not numbers.
    """
    num_layers, num_candidates = seconds_LC.shape
    if present_L.shape != (num_layers,) or np.isnan(seconds_LC).any():
        raise ValueError(
            f"got seconds {seconds_LC.tolist()} and present candidates of shape {present_L.shape}, wanted a "
            f"number for each of {num_candidates} candidates and one present candidate in each layer"
        )
    layers = np.arange(num_layers)
    allowed_LC = seconds_LC if barred_LC is None else np.where(barred_LC, np.inf, seconds_LC)
    close_LC = allowed_LC <= (1 + least_gain) * allowed_LC.min(axis=1, keepdims=True)
    best_L = close_LC.argmax(axis=1)
    saves_L = allowed_LC[layers, best_L] < (1 - least_gain) * seconds_LC[layers, present_L]
    return np.where(saves_L, best_L, present_L).astype(np.int64)
