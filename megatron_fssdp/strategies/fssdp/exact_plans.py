"""Plans by the exact counts of one micro-batch, which the host knows after the gate (ours).

All ranks make them from equal arguments. Nothing hides their gathers, and the host works while the device
waits, so prices have both. A layer's replicas are planned from whatever counts would have been faster lately:

* ``past``: the counts of earlier iterations. Gathers hide beside attention. Plans are wrong where loads jump.
* ``first``: the same plan, corrected by the exact counts of the iteration's first micro-batch.
* ``each``: the exact counts of every micro-batch. Nothing hides the gathers of its replicas.

Only the rank that plans a layer decides this, with all counts of the iteration before; all ranks follow it.

Shape letters: D devices, E experts, S sources.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from megatron_fssdp.planning.compiled_form import TIMES_SLOWER, is_compiled
from megatron_fssdp.planning.cost.host_seconds import MEASURED
from megatron_fssdp.planning.cost.link_seconds import gather_counts_s
from megatron_fssdp.planning.loads import LoadHistory
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.quotas import quota_assignment
from megatron_fssdp.planning.replica_life import ReplicaLife
from megatron_fssdp.planning.search import LEAST_SAVING
from megatron_fssdp.strategies.fssdp import PlanSource
from megatron_fssdp.strategies.fssdp.kept_searches import search_of
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.plan_price import plan_price

SOURCES: tuple[PlanSource, ...] = ("past", "first", "each")

WINDOW = 5
"""Iterations whose loads are looked at (Hecate §4.2, w), and whose seconds are compared."""

LEAST_GAIN = 0.02
"""Part of the seconds that a source must save over the one before: prices know little of waits for ranks."""

MOST_WAITING = 0.5
"""Part of the seconds that ``first`` may wait while few iterations are compared: a jump costs far more."""

MOST_PRICED = 4
"""Micro-batches with which plans are priced; each takes about 0.3 ms with 256 experts on 64 devices."""

MOST_COMPARED = 0.01
"""Host's part of an iteration for comparisons after the first :data:`WINDOW`; the ranks divide them."""


@lru_cache(maxsize=512)
def planning_s(context: LayerContext) -> tuple[float, float]:
    """Seconds in which the host corrects a plan of a layer of this size, and plans one micro-batch."""
    host = MEASURED.of_layer("fssdp", context.num_experts, context.num_devices)
    times = 1 if is_compiled() else TIMES_SLOWER
    return times * host.correction_s, times * (host.after_gate_s + host.dispatch_s)


@lru_cache(maxsize=512)
def _even_plan(context: LayerContext, log_mean: int, life: ReplicaLife, slots: int, hides: bool) -> LayerPlan:
    """The best plan for counts that are all 2 to the power of ``log_mean``; it serves means close to it."""
    load_DE = np.full((context.num_devices, context.num_experts), 2.0**log_mean)
    placement, _ = search_of(context, load_DE, life, hides).best_placement(slots=slots)
    in_pass, in_micro_batch = life is ReplicaLife.LAYER_PASS, life is ReplicaLife.MICRO_BATCH
    plan = replace(context.owners_only, rematerialize=in_pass, each_micro_batch=in_micro_batch)
    return replace(plan, gather_ahead=hides).placed(placement, context)


@lru_cache(maxsize=512)  # layers of a model have equally many pairs in all iterations
def even_s(context: LayerContext, mean: float, life: ReplicaLife, slots: int, hides: bool) -> float:
    """Modelled seconds of an iteration in which all counts are as their mean: hardly any plan is faster.

    Replicas save traffic then, too. They have this ``life``, at most ``slots`` are on a device, and ``hides``
    says whether their transfers run beside compute.
    """
    mean_DE = np.full((context.num_devices, context.num_experts), mean)
    plan = _even_plan(context, round(np.log2(max(mean, 1.0))), life, slots, hides)
    return min(plan_price(tried, mean_DE, context).seconds for tried in (plan, context.owners_only))


def corrected(
    plan: LayerPlan, counts_DE: np.ndarray, context: LayerContext, *, slots: int, times: int
) -> LayerPlan:
    """The plan, or one that is faster in ``times`` micro-batches with these counts, int64 ``[D, E]``.

    Its new replicas live as long as the plan's, and their gathers count. Costs are measured.
    """
    counts_DE = times * counts_DE
    planned_s = plan_price(plan, counts_DE, context, num_micro_batches=times).seconds
    best_s = even_s(context, float(counts_DE.mean()), plan.life, slots, plan.gather_ahead)
    if best_s > (1 - LEAST_SAVING) * planned_s:
        return plan
    search = search_of(context, counts_DE, plan.life, False)
    start = plan.placement if plan.placement.replicas_per_device_D.max() <= slots else None
    placement, _ = search.best_placement(slots=slots, start=start, is_quick=True)
    new = replace(plan.placed(placement, context), corrects=False)
    new_s = plan_price(new, counts_DE, context, num_micro_batches=times, planned=plan).seconds
    return new if new_s < planned_s else plan


def of_micro_batch(plan: LayerPlan, counts_DE: np.ndarray, context: LayerContext, *, slots: int) -> LayerPlan:
    """A plan for this micro-batch alone, or ``plan``, which has no replicas; counts are int64 ``[D, E]``.

    Candidates are quotas with the lowest possible highest load, and the placement of a search for the fewest
    seconds. Costs are measured.
    """
    times, topology = context.costs.num_micro_batches, context.topology
    plan_s = plan_price(plan, counts_DE, context, num_micro_batches=1).seconds
    best_s = even_s(context, float((times * counts_DE).mean()), plan.life, slots, False) / times
    if best_s > (1 - LEAST_SAVING) * plan_s:
        return plan
    tokens_ED = quota_assignment(context.owner_E, counts_DE, topology, slots=slots)
    held = ExpertPlacement(context.owner_E, plan.placement.present_ED | (tokens_ED > 0))
    search = search_of(context, times * counts_DE, ReplicaLife.MICRO_BATCH, False)
    placement, _ = search.best_placement(slots=slots, is_quick=True)
    by_search = plan.placed(placement, context)
    # The exact shares of these counts as quotas need no other gather of counts.
    exact = replace(by_search, dispatch_policy="exact").dispatch(counts_DE, topology)
    by_search = replace(by_search, tokens_ED=exact.whole_tokens_ED)
    plans = (plan, replace(plan.placed(held, context), tokens_ED=tokens_ED), by_search)
    new_s = (plan_price(new, counts_DE, context, num_micro_batches=1).seconds for new in plans[1:])
    return plans[int(np.argmin([plan_s, *new_s]))]


class SourceChoice:
    """Chooses the source of one layer's plans, after each iteration."""

    def __init__(self) -> None:
        self._planned: tuple[int, LayerPlan, np.ndarray] | None = None
        """What the past planned for the iteration after so many, by which forecast ``[E]``."""
        self._seconds: deque[np.ndarray] = deque(maxlen=WINDOW)
        """Seconds of compared iterations with plans of each source, ``[S]``."""
        self._chosen = 0

    def of(
        self, context: LayerContext, history: LoadHistory, past: LayerPlan, slots: Callable[[PlanSource], int]
    ) -> PlanSource:
        """The source for the coming iteration, for which ``past`` is the plan of earlier loads.

        ``slots`` are the most replicas on a device with plans of a source, 0 if it is impossible.
        """
        known, forecast_DE = self._planned, history.forecast_DE()
        self._planned = history.num_seen, past, forecast_DE
        if history.repeats:  # All compared iterations were as forecast.
            self._chosen = 0
        elif known is not None and known[0] == history.num_seen - 1:
            _, plan, before_DE = known
            if np.array_equal(plan.placement.owner_E, context.owner_E):
                self._compare(plan, before_DE, history, context, slots)
        if self._chosen == 0 and len(self._seconds) < WINDOW and not history.repeats and slots("first"):
            past_s = plan_price(past, forecast_DE, context).seconds
            wait_s = _counting_s(context) + planning_s(context)[0]
            return "first" if wait_s <= MOST_WAITING * past_s else "past"
        return SOURCES[self._chosen]

    def _compare(
        self,
        past: LayerPlan,
        forecast_DE: np.ndarray,
        history: LoadHistory,
        context: LayerContext,
        slots: Callable[[PlanSource], int],
    ) -> None:
        """Choose the source with the fewest seconds in the last iterations.

        Not every iteration is compared. Where exact counts can save little, nothing is searched; but a layer
        that plans each micro-batch has no replicas without a search, so it is compared.
        """
        times, counts = context.costs.num_micro_batches, history.iterations_like(MOST_PRICED)
        past_s, mean = _mean_s([past] * len(counts), counts, context), float(counts[0].mean())
        best_s = even_s(context, mean, past.life, slots("first"), past.gather_ahead)
        is_even = best_s > (1 - LEAST_GAIN) * past_s
        (correction_s, plan_s), count_s = planning_s(context), _counting_s(context)
        waits_S = np.array([0.0, count_s + (not is_even) * correction_s, times * (count_s + plan_s)])
        # Nothing hides the gathers of plans for each micro-batch, also where loads are even.
        each_s = even_s(context, mean, ReplicaLife.MICRO_BATCH, slots("each"), False)
        seconds_S = np.array([past_s, past_s, max(past_s, each_s)])
        promised_s = plan_price(past, forecast_DE, context).seconds
        cannot_pay = min(best_s + waits_S[1], each_s + waits_S[2]) > (1 - LEAST_GAIN) * past_s
        is_known = cannot_pay or not forecast_DE.any() or (1 - LEAST_GAIN) * past_s <= promised_s
        if not is_known or SOURCES[self._chosen] == "each":
            compared_s = (correction_s + len(counts) * plan_s) / context.num_devices
            every = max(1, round(compared_s / (MOST_COMPARED * past_s)))
            if len(self._seconds) == WINDOW and (history.num_seen + context.layer) % every:
                return
            seconds_S[1:] = np.inf
            if num := slots("first"):
                first = corrected(past, counts[0] // times, context, slots=num, times=times)
                seconds_S[1] = _mean_s([first] * len(counts), counts, context, planned=past)
            if num := slots("each"):
                plain = replace(context.owners_only, each_micro_batch=True, gather_ahead=past.gather_ahead)
                plans = [of_micro_batch(plain, batch_DE // times, context, slots=num) for batch_DE in counts]
                seconds_S[2] = _mean_s(plans, counts, context)
        self._seconds.append(seconds_S + waits_S)
        all_S = np.sum(self._seconds, axis=0)
        least_s = LEAST_GAIN * all_S.min()
        all_S += least_s * np.arange(len(SOURCES))
        all_S[self._chosen] -= least_s / 2  # So layers do not change to and fro.
        self._chosen = int(np.argmin(all_S))


def _counting_s(context: LayerContext) -> float:
    """Seconds in which all ranks get the exact counts of a micro-batch, and nothing else happens."""
    return gather_counts_s(context.costs.links, context.topology, context.num_experts)


def _mean_s(
    plans: Sequence[LayerPlan],
    counts: Sequence[np.ndarray],
    context: LayerContext,
    planned: LayerPlan | None = None,
) -> float:
    """Mean seconds of iterations ``[D, E]``, each under its plan."""
    prices = (plan_price(*priced, context, planned=planned) for priced in zip(plans, counts, strict=True))
    return sum(price.seconds for price in prices) / len(counts)
