"""Which of several strategies each layer takes, by their modelled seconds.

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
    """The first candidate that is close to the fewest seconds, where it saves enough; else the present one.

    Close is within ``least_gain``: so little the model cannot tell apart, and what moves less comes first.

    Args:
        seconds_LC: Modelled seconds of an iteration, [L, C]; infinite where a candidate cannot serve the
            layer.
        present_L: Index of the candidate that each layer has, [L].
        least_gain: Part of a candidate's seconds that another one has to save to be preferred.
        barred_LC: Candidates that a layer must not change to, bool [L, C].

    Returns:
        Indices, int64 [L].
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
