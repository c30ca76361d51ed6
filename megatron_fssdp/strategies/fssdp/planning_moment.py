"""Decides for each layer whether to plan before the gate or after it, by what both would have cost lately.

A plan before the gate is made for a forecast, and its gather is hidden. A plan after the gate is made for the
exact counts, and the layer waits for its gather. Which one is faster depends on how well the forecasts of the
layer hold, so both are priced with the real counts of the last iterations.

Shape letters: D devices, E experts.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from megatron_fssdp.planning.balanced.replica_planner import LEAST_SAVING
from megatron_fssdp.planning.loads.load_history import LoadHistory
from megatron_fssdp.strategies.fssdp.corrected_plan import ExactCounts, ExpectedSeconds, unplanned
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan


@dataclass(frozen=True, eq=False)
class ForecastPlan:
    """A plan for a forecast.

    Attributes:
        context: Data of the layer for which the plan was made.
        plan: The plan.
        expected: What the forecast promises.
    """

    context: LayerContext
    plan: LayerPlan
    expected: ExpectedSeconds


@dataclass(frozen=True)
class _Trial:
    """Seconds that a past iteration would have taken with a plan before the gate, and after it.

    Attributes:
        before_s: Seconds with the forecast's plan and its correction.
        after_s: Seconds with a plan for the exact counts.
    """

    before_s: float
    after_s: float


@dataclass(eq=False)
class _LayerRecord:
    """Plans and trials of one layer by the number of iterations in its history."""

    plans: dict[int, ForecastPlan] = field(default_factory=dict)
    trials: dict[int, tuple[np.ndarray, _Trial]] = field(default_factory=dict)

    def forget(self, num_seen: int, num_kept: int) -> None:
        """Keep only the ``num_kept`` numbers up to ``num_seen``."""
        for kept in (self.plans, self.trials):
            for number in [number for number in kept if not num_seen - num_kept < number <= num_seen]:
                del kept[number]


class PlanningMoment:
    """Keeps the forecasts' plans of the last iterations and prices them.

    Args:
        window: Number of iterations that are compared.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self._records: dict[int, _LayerRecord] = {}

    def expected(self, context: LayerContext, plan: LayerPlan) -> ExpectedSeconds | None:
        """What the forecast of a plan promised; ``None`` if the plan was not made for a forecast.

        Args:
            context: Data of the layer.
            plan: Plan before the gate.
        """
        record = self._records.get(context.layer, _LayerRecord())
        # Several iterations can have the same placement; the last one is meant.
        latest_first = reversed(record.plans.values())
        return next((made.expected for made in latest_first if made.plan.placement is plan.placement), None)

    def is_after_gate(
        self,
        made: ForecastPlan,
        history: LoadHistory,
        exact: Callable[[np.ndarray], ExactCounts],
    ) -> bool:
        """Whether the layer is to be planned after the gate, without ``made``.

        Args:
            made: Plan for the forecast of the next iteration; it is kept, and priced in the next call.
            history: Loads of the iterations before.
            exact: Function that returns the exact counts of an iteration from its (token, k) pairs
                ``[D, E]``.
        """
        layer, now = made.context.layer, history.num_seen
        record = self._records.setdefault(layer, _LayerRecord())
        record.plans[now] = made
        # `auto` asks for several past iterations before it asks for the next one.
        record.forget(now, 2 * self._window)
        before = record.plans.get(now - 1)
        if before is not None and not history.is_empty and _is_comparable(before.context, made.context):
            counts_DE = history.counts_DE(0)
            known = record.trials.get(now)
            if known is None or not np.array_equal(known[0], counts_DE):
                record.trials[now] = counts_DE, _tried(before, exact(counts_DE))
        trials = [trial for number, (_, trial) in record.trials.items() if number > now - self._window]
        before_s = sum(trial.before_s for trial in trials)
        return sum(trial.after_s for trial in trials) < (1 - LEAST_SAVING) * before_s


def _is_comparable(old: LayerContext, new: LayerContext) -> bool:
    return old.profile == new.profile and np.array_equal(old.owner_E, new.owner_E)


def _tried(made: ForecastPlan, exact: ExactCounts) -> _Trial:
    """Price a past iteration both ways."""
    before = exact.corrected(made.plan, made.expected)
    if before.has_searched:
        return _Trial(before.seconds, exact.corrected(unplanned(made.plan, made.context), None).seconds)
    # The forecast held, so its placement suits the exact counts too, and a search is not needed here.
    late_s = exact.seconds(made.plan, after_gate=True) + exact.search_s
    return _Trial(before.seconds, min(late_s, exact.plain_s))
