"""Divides the seconds of a run's iterations into parts, with the words that the simulator uses.

Shape letters: I iterations.
"""

import numpy as np
from numpy.typing import NDArray

from megatron_fssdp.records.recorded_run import RecordedRun

WEIGHTS, GRADIENTS = "waiting for spAG", "waiting for spRS"
"""Keys of the parts in which compute waits for replicas' weights and gradients, in ``TIME_PARTS``."""


def time_parts(run: RecordedRun) -> dict[str, NDArray[np.float64]]:
    """Divide the seconds of each iteration into parts, which add up to the whole iteration.

    As in the simulator, the experts' seconds are those of the slowest rank, and the all-to-alls do not
    include the wait for it.

    Returns:
        Seconds of each part, float64 ``[I]``, by the keys of ``TIME_PARTS``. Where the parts of layers were
        not recorded, they are in ``passes``. Where the seconds of the passes were not recorded either, they
        are in ``rest``.
    """
    whole_I, recorded_I = run.arrays["iteration_s_I"], run.arrays["passes_s_I"]
    reshard_I = np.minimum(whole_I, run.arrays["reshard_s_I"])
    passes_I = np.where(recorded_I > 0, recorded_I, whole_I - reshard_I)
    slowest_I, mean_I = _passes_I(run, "experts_slowest"), _passes_I(run, "experts")
    moved_I = _passes_I(run, "dispatch") + _passes_I(run, "combine")
    inside = {
        "other compute": _passes_I(run, "other"),
        "experts": slowest_I,
        "all-to-all": np.maximum(0.0, moved_I - (slowest_I - mean_I)),
        WEIGHTS: run.arrays["spag_exposed_s_IL"].sum(axis=1),
        GRADIENTS: run.arrays["sprs_exposed_s_IL"].sum(axis=1),
    }
    # Several pipeline stages work at the same time, so the sum over their layers can exceed the passes.
    total_I = np.sum(list(inside.values()), axis=0)
    share_I = np.minimum(1.0, passes_I / np.maximum(total_I, 1e-12))
    inside = {part: share_I * seconds_I for part, seconds_I in inside.items()}
    left_I = np.where(recorded_I > 0, np.maximum(passes_I - share_I * total_I, 0.0), 0.0)
    has_parts_I = np.isfinite(run.arrays["forward_other_s_IL"]).any(axis=1)
    found = {
        "passes": np.where(has_parts_I, 0.0, left_I),
        "outside": np.where(has_parts_I, left_I, 0.0),
        **inside,
        "re-sharding": reshard_I,
    }
    return {**found, "rest": np.maximum(whole_I - np.sum(list(found.values()), axis=0), 0.0)}


def mean_parts_s(run: RecordedRun) -> dict[str, float]:
    """Return the mean seconds of an iteration's parts, without the first, which also allocates."""
    first = min(1, len(run.metrics) - 1)
    return {part: float(seconds_I[first:].mean()) for part, seconds_I in time_parts(run).items()}


def has_layer_parts(run: RecordedRun) -> bool:
    """Whether a run has measured the parts of its layers' passes."""
    return bool(np.isfinite(run.arrays["forward_other_s_IL"]).any())


def _passes_I(run: RecordedRun, part: str) -> NDArray[np.float64]:
    """Return the seconds of a part of all layers' forward and backward passes."""
    both = [run.arrays[f"{which}_{part}_s_IL"] for which in ("forward", "backward")]
    return np.nansum(both, axis=(0, 2))
