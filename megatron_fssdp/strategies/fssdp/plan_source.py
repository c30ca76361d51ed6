"""From which counts a layer's replicas are planned: whatever would have been faster lately (ours).

* ``past``: the counts of earlier iterations. Gathers hide beside attention. Plans are wrong where loads jump.
* ``first``: the same plan, corrected by the exact counts of the iteration's first micro-batch.
* ``each``: the exact counts of every micro-batch. Nothing hides the gathers of its replicas.

Only the rank that plans a layer decides, with all counts of the iteration before, so all ranks follow it.

Shape letters: D devices, E experts, S sources.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from megatron_fssdp.planning.loads import LoadHistory, load_similarity
from megatron_fssdp.strategies.fssdp import PlanSource
from megatron_fssdp.strategies.fssdp.exact_plans import (
    corrected,
    counting_s,
    even_s,
    of_micro_batch,
    search_s,
)
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.plan_price import plan_price

SOURCES: tuple[PlanSource, ...] = ("past", "first", "each")

WINDOW = 5
"""Iterations whose seconds are compared: as many as loads are looked at (Hecate §4.2, w)."""

LEAST_GAIN = 0.02
"""Part of the seconds that a source must save over the one before: prices know little of waits for ranks."""

MOST_WAITING = 0.1
"""Part of the seconds that ``first`` may wait while few iterations are compared: a jump costs far more."""

ALIKE = 0.9
"""Similarity of counts to the forecast from which on no source can save much."""

MOST_PRICED = 4
"""Micro-batches with which plans are priced; each takes about 0.3 ms with 256 experts on 64 devices."""

MOST_COMPARED = 0.01
"""Host's part of an iteration for comparisons, which the ranks divide. Larger layers are compared rarely."""


class _Planned(NamedTuple):
    """What the past planned for the iteration after the first ``number`` ones, by which forecast."""

    number: int
    plan: LayerPlan
    forecast_DE: np.ndarray


class SourceChoice:
    """Chooses the source of one layer's plans, after each iteration."""

    def __init__(self) -> None:
        self._planned: _Planned | None = None
        self._saved: deque[tuple[float, np.ndarray]] = deque(maxlen=WINDOW)
        """Seconds of iterations with plans of the past, and what sources would have saved, ``[S]``."""
        self._chosen = 0

    def of(
        self, context: LayerContext, history: LoadHistory, past: LayerPlan, slots: Callable[[PlanSource], int]
    ) -> PlanSource:
        """The source for the coming iteration, for which ``past`` is the plan of earlier loads.

        ``slots`` are the most replicas on a device with plans of a source, 0 if it is impossible.
        """
        known, number = self._planned, history.num_seen
        self._planned = _Planned(number, past, history.forecast_DE())
        if history.repeats:  # All compared iterations were as forecast.
            self._chosen = 0
        elif known is not None and known.number == number - 1 and _same_owners(known.plan, context):
            row = _saved_s(known, history, context, slots, is_each=SOURCES[self._chosen] == "each")
            if row is not None:
                self._saved.append(row)
                least_s = LEAST_GAIN * sum(one_s for one_s, _ in self._saved)
                saved_S = sum(one_S for _, one_S in self._saved) - least_s * np.arange(len(SOURCES))
                saved_S[self._chosen] += least_s / 2  # So layers do not change to and fro.
                self._chosen = int(np.argmax(saved_S))
        if self._chosen == 0 and len(self._saved) < WINDOW and not history.repeats and slots("first"):
            past_s = plan_price(past, history.forecast_DE(), context).seconds
            return "first" if _wait_s(context) <= MOST_WAITING * past_s else "past"
        return SOURCES[self._chosen]


def _same_owners(plan: LayerPlan, context: LayerContext) -> bool:
    return np.array_equal(plan.placement.owner_E, context.owner_E)


def _wait_s(context: LayerContext) -> float:
    """Seconds in which a plan from exact counts keeps the ranks waiting."""
    return counting_s(context) + search_s(context)


def _saved_s(
    known: _Planned,
    history: LoadHistory,
    context: LayerContext,
    slots: Callable[[PlanSource], int],
    *,
    is_each: bool,
) -> tuple[float, np.ndarray] | None:
    """Seconds of the last iteration with plans of the past, and what each source would have saved, ``[S]``.

    ``None`` if the layer is not compared after this iteration. Where exact counts can save little, nothing is
    searched; but if ``is_each``, the layer has no replicas without a search, so it is compared.
    """
    past, times, forecast_E = known.plan, context.costs.num_micro_batches, known.forecast_DE.sum(axis=0)
    counts = history.iterations_like(MOST_PRICED)
    past_s = _mean_s([past] * len(counts), counts, context)
    is_even = even_s(context, counts[0]) > (1 - LEAST_GAIN) * past_s
    first_s = counting_s(context) + (not is_even) * search_s(context)
    saved_S = -np.array([0.0, first_s, times * _wait_s(context)])
    alike = (load_similarity(counts_DE.sum(axis=0), forecast_E) for counts_DE in counts)
    if not is_each and (is_even or all(found is None or found >= ALIKE for found in alike)):
        return past_s, saved_S
    compared_s = (1 + len(counts)) * search_s(context) / context.num_devices
    if (history.num_seen + context.layer) % max(1, round(compared_s / (MOST_COMPARED * past_s))):
        return None
    gains_S = [0.0, -np.inf, -np.inf]
    if num := slots("first"):
        first = corrected(past, counts[0] // times, context, slots=num, times=times)
        gains_S[1] = past_s - _mean_s([first] * len(counts), counts, context, planned=past)
    if num := slots("each"):
        plain = replace(context.owners_only, each_micro_batch=True, gather_ahead=past.gather_ahead)
        plans = [of_micro_batch(plain, counts_DE // times, context, slots=num) for counts_DE in counts]
        gains_S[2] = past_s - _mean_s(plans, counts, context)
    return past_s, saved_S + gains_S


def _mean_s(
    plans: Sequence[LayerPlan],
    counts: Sequence[np.ndarray],
    context: LayerContext,
    planned: LayerPlan | None = None,
) -> float:
    """Mean seconds of iterations ``[D, E]``, each under its plan."""
    prices = (plan_price(*priced, context, planned=planned) for priced in zip(plans, counts, strict=True))
    return sum(price.seconds for price in prices) / len(counts)
