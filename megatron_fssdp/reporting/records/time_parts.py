"""Divides the seconds of a run's iterations into parts, with the words that the simulator uses.

Shape letters: I iterations, L MoE layers.
"""

from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megatron_fssdp.reporting.records.pass_metrics import PassMetrics
from megatron_fssdp.reporting.records.recorded_run import RecordedRun
from megatron_fssdp.reporting.records.run_records import IterationMetrics

OTHER, EXPERTS, ALL_TO_ALL = "other compute", "experts", "all-to-all"

MEASURED_PARTS = (
    "passes",
    "outside",
    OTHER,
    EXPERTS,
    ALL_TO_ALL,
    "waiting for spAG",
    "waiting for spRS",
    "re-sharding",
    "rest",
)
"""Keys of the parts that a run measures, in ``TIME_PARTS``."""

Pass = Literal["forward", "backward"]

PASS_PARTS = (OTHER, "dispatch", EXPERTS, "combine")
"""Keys of the parts of one layer's forward or backward passes, in ``TIME_PARTS``."""


def time_parts(run: RecordedRun) -> dict[str, NDArray[np.float64]]:
    """Divide the seconds of each iteration into parts, which add up to the whole iteration.

    As in the simulator, the experts' seconds are those of the slowest rank, and the all-to-alls do not
    include the wait for it.

    Args:
        run: Records of the run.

    Returns:
        Seconds of each part, float64 ``[I]``, by the keys in :data:`MEASURED_PARTS`. Where the parts of
        layers were not recorded, they are in ``passes``. Where the seconds of the passes were not recorded
        either, they are in ``rest``.
    """
    whole_I = np.array([record.iteration_s for record in run.metrics])
    reshard_I = np.minimum(whole_I, [record.reshard_s for record in run.metrics])
    recorded_I = np.array([record.passes_s for record in run.metrics])
    passes_I = np.where(recorded_I > 0, recorded_I, whole_I - reshard_I)
    inside = {
        OTHER: _sum_I(run, lambda one: one.other_s),
        EXPERTS: _sum_I(run, lambda one: one.experts_slowest_s),
        ALL_TO_ALL: _sum_I(run, lambda one: one.exchange_s),
        "waiting for spAG": _layers_I(run, "spag_exposed_s"),
        "waiting for spRS": _layers_I(run, "sprs_exposed_s"),
    }
    # Several pipeline stages work at the same time, so the sum over their layers can exceed the passes.
    total_I = np.sum(list(inside.values()), axis=0)
    share_I = np.minimum(1.0, passes_I / np.maximum(total_I, 1e-12))
    inside = {part: share_I * seconds_I for part, seconds_I in inside.items()}
    left_I = np.where(recorded_I > 0, np.maximum(passes_I - share_I * total_I, 0.0), 0.0)
    has_parts_I = np.array([_has_parts(record) for record in run.metrics])
    found = {
        "passes": np.where(has_parts_I, 0.0, left_I),
        "outside": np.where(has_parts_I, left_I, 0.0),
        **inside,
        "re-sharding": reshard_I,
    }
    rest_I = np.maximum(whole_I - np.sum(list(found.values()), axis=0), 0.0)
    return {**found, "rest": rest_I}


def layer_parts(run: RecordedRun, which: Pass) -> dict[str, NDArray[np.float64]]:
    """Return the mean seconds of the parts of every layer's passes in an iteration, without the first one.

    Args:
        run: Records of the run.
        which: Whether to return those of the forward or of the backward passes.

    Returns:
        Seconds of each part, float64 ``[L]``, by the keys in :data:`PASS_PARTS`: means over the ranks. Empty
        if no iteration has them.
    """
    known = [record for record in run.metrics if _has_parts(record)]
    known = known[1:] or known
    if not known:
        return {}
    fields = ("other_s", "dispatch_s", "experts_s", "combine_s")
    seconds_ILP = np.array(
        [
            [[getattr(getattr(layer, which), field, 0.0) for field in fields] for layer in record.layers]
            for record in known
        ]
    )
    mean_LP = seconds_ILP.mean(axis=0)
    return {part: mean_LP[:, i] for i, part in enumerate(PASS_PARTS)}


def mean_parts_s(run: RecordedRun) -> dict[str, float]:
    """Return the mean seconds of an iteration's parts, without the first iteration.

    The first iteration also allocates and compiles.

    Args:
        run: Records of the run.
    """
    return {
        part: float(seconds_I[1:].mean() if len(seconds_I) > 1 else seconds_I.mean())
        for part, seconds_I in time_parts(run).items()
    }


def has_layer_parts(run: RecordedRun) -> bool:
    """Whether a run has measured the parts of its layers' passes."""
    return any(_has_parts(record) for record in run.metrics)


def _has_parts(record: IterationMetrics) -> bool:
    return any(layer.forward is not None for layer in record.layers)


def _layers_I(run: RecordedRun, field: str) -> NDArray[np.float64]:
    return np.array([sum(getattr(layer, field) for layer in record.layers) for record in run.metrics], float)


def _sum_I(run: RecordedRun, seconds: Callable[[PassMetrics], float]) -> NDArray[np.float64]:
    return np.array(
        [
            sum(
                seconds(one)
                for layer in record.layers
                for one in (layer.forward, layer.backward)
                if one is not None
            )
            for record in run.metrics
        ],
        float,
    )
