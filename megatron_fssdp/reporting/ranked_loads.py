"""The loads of a layer's devices from the busiest to the least busy.

Shape letters: I iterations, L MoE layers, D devices.
"""

import numpy as np
from numpy.typing import NDArray


def ranked_load_D(tokens_ILD: NDArray[np.integer]) -> NDArray[np.float64]:
    """Return device loads relative to the mean, sorted from busiest to least busy: float64 ``[D]``.

    The devices of each iteration and layer are sorted first. Then the values are averaged over iterations and
    layers.

    Args:
        tokens_ILD: Tokens of each device, integers ``[I, L, D]``.
    """
    mean_IL = np.maximum(tokens_ILD.mean(axis=2, keepdims=True), 1e-12)
    ranked: NDArray[np.float64] = -np.sort(-(tokens_ILD / mean_IL), axis=2).mean(axis=(0, 1))
    return ranked
