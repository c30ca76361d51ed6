"""Figures that say how loads are spread, and how they change."""

import numpy as np

JUMP = 0.2
"""Share of the load that has to be elsewhere before one speaks of a jump."""


def max_over_mean(load_D: np.ndarray) -> float:
    """The most loaded device's load over the mean; 1 without any load."""
    total = load_D.sum()
    return float(load_D.max() * len(load_D) / total) if total else 1.0


def load_similarity(load_E: np.ndarray, before_E: np.ndarray) -> float | None:
    """Share of the load that is where it was before: ``Σ_e min(p_e, q_e)``, from 0 to 1.

    What Pro-Prophet (§II, Fig. 4) calls the locality of adjacent iterations.

    Args:
        load_E: (token, k) pairs by expert.
        before_E: Those of an earlier iteration; batch sizes may differ.

    Returns:
        1 for the same distribution, 0 for other experts altogether; ``None`` without load.
    """
    total, total_before = float(load_E.sum()), float(before_E.sum())
    if not total or not total_before:
        return None
    return float(np.minimum(load_E / total, before_E / total_before).sum())


def has_jumped(load_E: np.ndarray, before_E: np.ndarray) -> bool:
    """Whether more of the load is elsewhere than drift and drawn tokens explain.

    Ours. In recorded trainings 5 to 9 % of a layer's load is on other experts than in the iteration before
    and at most 25 %, of which the draw of tokens explains a third.

    Args:
        load_E: (token, k) pairs by expert.
        before_E: Those of an earlier time; numbers of iterations may differ.
    """
    similarity = load_similarity(load_E, before_E)
    if similarity is None:
        return False
    total, total_before = float(load_E.sum()), float(before_E.sum())
    share_E = (load_E + before_E) / (total + total_before)
    # Mean distance of two draws from the same distribution, their counts taken as independent.
    chance = np.sqrt(share_E * (1 / total + 1 / total_before) * 2 / np.pi).sum() / 2
    return bool(1 - similarity > JUMP + 2 * chance)


def balance_ratio(before_D: np.ndarray, after_D: np.ndarray) -> float | None:
    """Standard deviation of the device loads before balancing over the one after it (Pro-Prophet §VI, RB).

    Args:
        before_D: Loads had every expert stayed with its owner.
        after_D: Loads under the placement that was used.

    Returns:
        More than 1 where it became more even; ``None`` where it became perfectly even.
    """
    before, after = float(np.std(before_D)), float(np.std(after_D))
    if after == 0.0:
        return 1.0 if before == 0.0 else None
    return before / after
