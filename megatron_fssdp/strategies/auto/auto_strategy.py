"""``auto``: selects for every layer the strategy with the fewest modelled seconds (ours).

Plans are data, so a layer can change its strategy between any two iterations: the runtime carries out any
plan, and losses do not change. Owners that a strategy has moved stay on their new devices after a change.

Shape letters: D devices, E experts, L MoE layers, C candidate strategies.
"""

import logging
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import TypeGuard

import numpy as np

from megatron_fssdp.config.strategy.strategy_registry import BASELINE, SHIPPED, STRATEGIES
from megatron_fssdp.config.strategy.strategy_settings import profile_iterations
from megatron_fssdp.planning.loads import LoadHistory
from megatron_fssdp.planning.placement.owner_map import OwnerMap
from megatron_fssdp.planning.replica_life import ReplicaLife
from megatron_fssdp.strategies.auto import AutoSettings
from megatron_fssdp.strategies.auto.selection_report import (
    LEAST_SEEN,
    IterationSpread,
    SeenSaving,
    SelectionReport,
)
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan, exchange_s, plan_price
from megatron_fssdp.strategies.registry import build_strategy
from megatron_fssdp.strategies.strategy import MovesOwners, Strategy, mistakes_named

logger = logging.getLogger(__name__)

COMPARED_ITERATIONS = 3
"""Number of the latest iterations for which every candidate plans: one alone may be an exception."""

LEAST_GAIN = 0.03
"""Share of a layer's modelled seconds that a change must save; the model knows them no better."""

LEAST_OF_ITERATION = 0.01
"""Fraction of a measured iteration that all changes together must save; otherwise no change is made."""

BARRED_SELECTIONS = 5
"""Number of selections in which a layer cannot change to a strategy that made iterations slower."""


class AutoStrategy(MovesOwners[AutoSettings]):
    """Asks the selected strategy of each layer, and reconsiders the selection at an interval."""

    replica_life = ReplicaLife.SELECTED
    selects = True

    def __init__(self, settings: AutoSettings, candidates: Mapping[str, Strategy]) -> None:
        super().__init__(settings)
        # Each rank prices only a part of the layers, and candidates remember what they have planned, so one
        # set of them would make other plans on each rank.
        self.candidates, self._priced = dict(candidates), deepcopy(dict(candidates))
        self.window = max(candidate.window for candidate in candidates.values()) + COMPARED_ITERATIONS
        self.profile_iterations = profile_iterations()
        self.overlaps = any(candidate.overlaps for candidate in candidates.values())
        self.splits = any(candidate.splits for candidate in candidates.values())
        self.shares_plans = all(
            candidate.shares_plans or candidate.package == SHIPPED for candidate in candidates.values()
        )
        self.moves_owners = any(candidate.moves_owners for candidate in candidates.values())
        self._selected: dict[int, str] = {}
        self._has_selected = self._reshard_due = False
        self._last_change: SelectionReport | None = None
        self._barred: dict[tuple[int, str], int] = {}

    def may_replicate(self, layer: int) -> bool:
        """Whether the layer's selected strategy may replicate experts."""
        return self._of(layer).may_replicate(layer)

    def limits(self, context: LayerContext) -> str:
        """Candidates and interval of the selection, for the log."""
        able = ", ".join(name for name in self.candidates if self.serves(name, context))
        interval = self.settings.choice_interval
        return f"a strategy is selected for each layer among {able} every {interval} iterations"

    def slots(self, context: LayerContext) -> int:
        """Largest number of replicas of a layer that any candidate places on a device."""
        return max(candidate.slots(context) for candidate in self.candidates.values())

    def selected(self, layer: int) -> str:
        """Name of the layer's selected strategy; ``ep`` before the first selection."""
        return self._selected.get(layer, BASELINE)

    def _of(self, layer: int) -> Strategy:
        return self.candidates[self.selected(layer)]

    def before_gate(self, context: LayerContext, history: LoadHistory) -> LayerPlan:
        """The plan of the layer's selected strategy."""
        candidate = self._of(context.layer)
        with mistakes_named(candidate, f"before_gate for layer {context.layer}"):
            return candidate.before_gate(context, history.excerpt(candidate.window))

    def asks_after_gate(self, layer: int) -> bool:
        """Whether the layer's selected strategy asks."""
        return self._of(layer).asks_after_gate(layer)

    def after_gate(
        self, context: LayerContext, counts_DE: np.ndarray, plan: LayerPlan, num_micro_batches: int
    ) -> LayerPlan:
        """The plan of the layer's selected strategy after the gate."""
        candidate = self._of(context.layer)
        with mistakes_named(candidate, f"after_gate for layer {context.layer}"):
            return candidate.after_gate(context, counts_DE, plan, num_micro_batches)

    def reshards_at(self, iteration: int) -> bool:
        """Whether a selected strategy reconsiders owners now, or a layer has just got such a strategy."""
        # Candidates may remember when they were asked. All selected ones are therefore asked, on all ranks.
        selected = [self.candidates[name] for name in dict.fromkeys(self._selected.values())]
        due = [candidate.reshards_at(iteration) for candidate in selected if _moving(candidate)]
        return self._reshard_due or any(due)

    def reshard(self, contexts: Sequence[LayerContext], load_LE: np.ndarray, owners: OwnerMap) -> OwnerMap:
        """New owners for the layers whose strategies move owners."""
        self._reshard_due = False
        return super().reshard(contexts, load_LE, owners)

    def reshard_layer(self, context: LayerContext, load_E: np.ndarray) -> np.ndarray:
        """New owners of a layer by its selected strategy."""
        candidate = self._of(context.layer)
        return candidate.reshard_layer(context, load_E) if _moving(candidate) else context.owner_E

    def resume(self, selected: Mapping[int, str]) -> None:
        """Start with the selection of another run, names by layer number; unknown names are ignored."""
        self._selected = {layer: name for layer, name in selected.items() if name in self.candidates}
        self._has_selected = bool(self._selected)

    def selects_at(self, iteration: int, num_known: int) -> bool:
        """Whether to select after ``iteration`` iterations.

        It is due as soon as costs are measured, and then at the interval. ``num_known`` of the iterations
        were run by this process; it is 0 until costs are measured.
        """
        # The first iteration is cold, and a change needs enough iterations before it for quartiles.
        is_due = not self._has_selected or iteration % self.settings.choice_interval == 0
        return num_known > LEAST_SEEN and is_due

    def price(self, contexts: Sequence[LayerContext], histories: Sequence[LoadHistory]) -> np.ndarray:
        """Modelled seconds of an iteration of each layer under every candidate, float ``[L, C]``.

        Each candidate plans for each of the latest iterations from the loads before it; the loads that
        followed price its plans. The cost of moving owners is divided over the iterations until the next
        selection. The layers have profiles, and histories of at least two iterations.
        """
        layers = zip(contexts, histories, strict=True)
        seconds_LC = [[self._price(name, *layer) for name in self.candidates] for layer in layers]
        return np.reshape(seconds_LC, (len(contexts), len(self.candidates)))

    def select(
        self, layers: Sequence[int], seconds_LC: np.ndarray, since_change: IterationSpread | None
    ) -> SelectionReport:
        """Reconsider the strategies of a pipeline stage's layers.

        If the last change made iterations slower, it is reverted first, and barred for
        :data:`BARRED_SELECTIONS` selections. Ranks that share owners give equal results of :meth:`price` and
        equal times since the last change.
        """
        self._has_selected = True
        seen, last, names = self._seen(since_change), self._last_change, list(self.candidates)
        before = {layer: self.selected(layer) for layer in layers}
        self._barred = {key: left - 1 for key, left in self._barred.items() if left > 1}
        is_slower = seen is not None and seen.is_slower
        if is_slower and last is not None:
            for layer in last.changes:
                self._barred[layer, before[layer]] = BARRED_SELECTIONS
                self._selected[layer] = last.before[layer]
        before_L = np.array([names.index(name) for name in before.values()])
        present_L = np.array([names.index(self.selected(layer)) for layer in layers])
        barred_LC = np.array([[(layer, name) in self._barred for name in names] for layer in layers])
        selected_L = select_by_seconds(seconds_LC, present_L, barred_LC)
        changed = np.flatnonzero(selected_L != before_L)
        saved_L = seconds_LC[changed, before_L[changed]] - seconds_LC[changed, selected_L[changed]]
        saving_s, left_s = float(sum(saved_L)), 0.0
        is_little = since_change is not None and saving_s < LEAST_OF_ITERATION * since_change.median_s
        if is_little and not is_slower:
            selected_L, left_s, saving_s = before_L, saving_s, 0.0
        selected = {layer: names[index] for layer, index in zip(layers, selected_L, strict=True)}
        report = SelectionReport(before, selected, saving_s, since_change, seen, left_s)
        for layer in report.changes:
            self._selected[layer] = selected[layer]
            self._reshard_due |= self.candidates[selected[layer]].moves_owners
        if report.changes or seen is not None:
            self._last_change = report if report.changes else None
        return report

    def _seen(self, since_change: IterationSpread | None) -> SeenSaving | None:
        """Saving of the last change; ``None`` if there is nothing to compare."""
        last = self._last_change
        if last is None or last.measured is None or since_change is None:
            return None
        if min(last.measured.num_seen, since_change.num_seen) < LEAST_SEEN:
            return None
        return SeenSaving(last.saving_s, last.measured, since_change)

    def serves(self, name: str, context: LayerContext) -> bool:
        """Whether a candidate can serve a layer."""
        try:
            self.candidates[name].check(context)
        except ValueError:
            return False
        return True

    def _price(self, name: str, context: LayerContext, history: LoadHistory) -> float:
        candidate = self._priced[name]
        try:
            return self._seconds(candidate, context, history) if self.serves(name, context) else np.inf
        except Exception as error:
            if candidate.package == SHIPPED:
                raise
            # Each rank prices other layers, and the others wait for this price.
            logger.warning(
                f"[fssdp] auto: candidate '{name}' of package {candidate.package} failed for layer "
                f"{context.layer}: {error!r}; the layer does not select it"
            )
            return np.inf

    def _seconds(self, candidate: Strategy, context: LayerContext, history: LoadHistory) -> float:
        profile, moving_s, times = context.costs, 0.0, context.costs.num_micro_batches
        if _moving(candidate):
            old_E, load_E = context.owner_E, history.excerpt(candidate.window).mean_E()
            context = replace(context, owner_E=candidate.reshard_layer(context, load_E))
            moving_s = exchange_s(old_E, context.owner_E, profile, context.topology)
        by_exchange = [context]
        if self.travel.exchange == "by_price":
            by_exchange = [context.with_exchange(False), context.with_exchange(True)]
        seconds = []
        # The oldest first: some candidates compare their plans of one iteration with the next one's counts.
        for age in reversed(range(min(COMPARED_ITERATIONS, len(history) - 1))):
            counts_DE = history.counts_DE(age)
            past = history.excerpt(candidate.window, without_latest=age + 1)
            planned = candidate.before_gate(context, past)
            plan = candidate.after_gate(context, counts_DE // times, planned, times)
            ways = (plan_price(plan, counts_DE, priced, planned=planned).seconds for priced in by_exchange)
            seconds.append(min(ways))
        return float(np.mean(seconds)) + moving_s / self.settings.choice_interval


def _moving(candidate: Strategy) -> TypeGuard[MovesOwners]:
    return isinstance(candidate, MovesOwners) and candidate.moves_owners


def select_by_seconds(seconds_LC: np.ndarray, present_L: np.ndarray, barred_LC: np.ndarray) -> np.ndarray:
    """Select for each layer the first candidate that is close to the fewest seconds, if it saves enough.

    Candidates that differ by less than the fraction :data:`LEAST_GAIN` are close: the model cannot tell them
    apart, and candidates that move less come first. A layer also keeps its present candidate if another one
    saves less. Seconds are infinite where a candidate cannot serve a layer. Candidates are indices ``[L]``.
    """
    layers = np.arange(len(seconds_LC))
    allowed_LC = np.where(barred_LC, np.inf, seconds_LC)
    close_LC = allowed_LC <= (1 + LEAST_GAIN) * allowed_LC.min(axis=1, keepdims=True)
    best_L = close_LC.argmax(axis=1)
    saves_L = allowed_LC[layers, best_L] < (1 - LEAST_GAIN) * seconds_LC[layers, present_L]
    return np.where(saves_L, best_L, present_L)


def selecting(strategy: Strategy) -> TypeGuard[AutoStrategy]:
    """Whether a strategy selects others for layers, and so has the methods of ``auto``."""
    return strategy.selects


def build_auto(settings: AutoSettings) -> AutoStrategy:
    """Build ``auto`` with the candidates of its settings.

    A candidate of another package that fails to build, or cannot serve a single layer, is left out with a
    warning: a user of ``auto`` may not know that it exists.
    """
    candidates = {}
    for name, keys in settings.candidates.items():
        try:
            candidate = build_strategy(name, keys)
            if candidate.resident_slots or candidate.selects:
                raise ValueError(
                    "got a strategy with resident replicas or with candidates of its own, wanted a "
                    "strategy that a layer can start and stop using between two iterations"
                )
            deepcopy(candidate)  # A candidate that cannot be copied, as auto does, is left out as well.
            candidates[name] = candidate
        except Exception as error:
            package = STRATEGIES[name].package
            if package == SHIPPED:
                raise
            logger.warning(
                f"[fssdp] auto: candidate '{name}' of package {package} is left out: {error}; update the "
                f"package, or leave the candidate out with --moe-strategy-set {name}=false"
            )
    return AutoStrategy(settings, candidates)
