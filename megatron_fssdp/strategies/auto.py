"""``auto``: selects for every layer the strategy with the fewest modelled seconds (ours).

Plans are data, so a layer can change its strategy between any two iterations: the runtime carries out any
plan, and losses do not change. Owners that a strategy has moved stay on their new devices after a change.

Shape letters: D devices, E experts, L MoE layers, C candidate strategies.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_fssdp.config.strategy.shipped_settings import AutoSettings
from megatron_fssdp.config.strategy.strategy_registry import BASELINE, SHIPPED, STRATEGIES
from megatron_fssdp.config.strategy.strategy_settings import profile_iterations
from megatron_fssdp.planning.loads import LoadHistory
from megatron_fssdp.planning.placement.owner_map import OwnerMap
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.plan_seconds import exchange_s, plan_seconds
from megatron_fssdp.strategies.registry import build_strategy
from megatron_fssdp.strategies.selection_report import (
    LEAST_SEEN,
    IterationSpread,
    LayerSelection,
    SeenSaving,
    SelectionReport,
)
from megatron_fssdp.strategies.strategy import MovesOwners, SelectsStrategies, Strategy, mistakes_named
from megatron_fssdp.strategies.token_travel import with_exchange

logger = logging.getLogger(__name__)

COMPARED_ITERATIONS = 3
"""Number of the latest iterations for which every candidate plans: one alone may be an exception."""

LEAST_GAIN = 0.03
"""Share of a layer's modelled seconds that a change must save; the model knows them no better."""

BARRED_SELECTIONS = 5
"""Number of selections in which a layer cannot change to a strategy that made iterations slower."""


@dataclass(frozen=True)
class _Change:
    """The last change: each layer's strategy before it, its modelled saving, and the iterations before it."""

    before: dict[int, str]
    saving_s: float
    spread: IterationSpread | None


class AutoStrategy(MovesOwners[AutoSettings], SelectsStrategies[AutoSettings]):
    """Asks the selected strategy of each layer for plans, and reconsiders the selection at an interval.

    Args:
        settings: Settings of ``auto``, which contain those of the candidates.
        candidates: The candidates by name, built from these settings; ``ep`` is the first one.
        priced: The same candidates, built once more: each rank prices only a part of the layers, and
        candidates
            remember what they have planned, so that one set alone would make other plans on each rank.
    """

    def __init__(
        self, settings: AutoSettings, candidates: Mapping[str, Strategy], priced: Mapping[str, Strategy]
    ) -> None:
        super().__init__(settings)
        self.candidates = dict(candidates)
        self._priced = dict(priced)
        self.candidate_names = tuple(candidates)
        self.window = max(one.window for one in candidates.values()) + COMPARED_ITERATIONS
        self.profile_iterations = profile_iterations()
        self.overlaps = any(one.overlaps for one in candidates.values())
        self.splits = any(one.splits for one in candidates.values())
        self.moves_owners = any(one.moves_owners for one in candidates.values())
        self._selected: dict[int, str] = {}
        self._has_selected = False
        self._reshard_due: set[int] = set()
        self._change: _Change | None = None
        self._barred: dict[tuple[int, str], int] = {}

    def may_replicate(self, layer: int) -> bool:
        """Whether the layer's selected strategy may replicate experts."""
        return self._of(layer).may_replicate(layer)

    def limits(self, context: LayerContext) -> str:
        """The candidates and the interval of the selection, as a text for the log."""
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

    def resume(self, selected: Mapping[int, str]) -> None:
        """Start with the selection of another run of the same model."""
        self._selected = {layer: name for layer, name in selected.items() if name in self.candidates}
        self._has_selected = bool(self._selected)

    def selects_at(self, iteration: int, num_known: int) -> bool:
        """As soon as costs are measured, and then at the interval."""
        # The first iteration is cold, and a change needs enough iterations before it for quartiles.
        is_due = not self._has_selected or iteration % self.settings.choice_interval == 0
        return num_known > LEAST_SEEN and is_due

    def price(self, contexts: Sequence[LayerContext], histories: Sequence[LoadHistory]) -> np.ndarray:
        """Modelled seconds of an iteration under every candidate, float ``[L, C]``.

        Each candidate plans for each of the latest iterations from the loads before it. Its plans are then
        priced with the loads that followed. The cost of moving owners is divided over the iterations until
        the selection is reconsidered.
        """
        layers = zip(contexts, histories, strict=True)
        seconds = [self._price(name, *layer) for layer in layers for name in self.candidates]
        return np.array(seconds).reshape(len(contexts), len(self.candidates))

    def select(
        self, layers: Sequence[int], seconds_LC: np.ndarray, since_change: IterationSpread | None
    ) -> SelectionReport:
        """Reconsider the strategies of all layers; the arguments are equal on all ranks that share owners.

        If the last change made iterations slower, it is reverted first, and its layers cannot change to the
        same strategies again for :data:`BARRED_SELECTIONS` selections.
        """
        self._has_selected = True
        before = {layer: self.selected(layer) for layer in layers}
        seen = self._seen(since_change)
        is_slower = seen is not None and seen.is_slower
        self._barred = {key: left - 1 for key, left in self._barred.items() if left > 1}
        if is_slower and self._change is not None:
            for layer, name in before.items():
                if name != (earlier := self._change.before.get(layer, BASELINE)):
                    self._barred[layer, name] = BARRED_SELECTIONS
                    self._selected[layer] = earlier
        names = list(self.candidates)
        present_L = np.array([names.index(self.selected(layer)) for layer in layers], np.int64)
        barred_LC = np.array([[(layer, name) in self._barred for name in names] for layer in layers])
        selected_L = select_by_seconds(seconds_LC, present_L, barred_LC=barred_LC)
        selections = tuple(
            LayerSelection(
                layer, names[index], before[layer], dict(zip(names, seconds_C.tolist(), strict=True))
            )
            for layer, index, seconds_C in zip(layers, selected_L, seconds_LC, strict=True)
        )
        report = SelectionReport(selections, since_change, seen)
        if report.is_too_little and not is_slower:
            kept = tuple(replace(selection, strategy=selection.before) for selection in selections)
            report = SelectionReport(kept, since_change, seen, left_s=report.saving_s)
        for change in report.changes:
            self._selected[change.layer] = change.strategy
            if self.candidates[change.strategy].moves_owners:
                self._reshard_due.add(change.layer)
        if report.changes:
            self._change = _Change(before, report.saving_s, since_change)
        elif seen is not None:
            self._change = None
        return report

    def reshards_at(self, iteration: int) -> bool:
        """Whether a selected strategy reconsiders owners now, or a layer has just got such a strategy."""
        # Candidates may remember when they were asked. All selected ones are therefore asked, on all ranks.
        selected = set(self._selected.values())
        asked = [one for name, one in self.candidates.items() if name in selected and one.moves_owners]
        due = [one.reshards_at(iteration) for one in asked if isinstance(one, MovesOwners)]
        return bool(self._reshard_due) or any(due)

    def reshard(self, contexts: Sequence[LayerContext], load_LE: np.ndarray, owners: OwnerMap) -> OwnerMap:
        """New owners for the layers whose strategies move owners."""
        self._reshard_due.clear()
        return super().reshard(contexts, load_LE, owners)

    def reshard_layer(self, context: LayerContext, load_E: np.ndarray) -> np.ndarray:
        """New owners of a layer by its selected strategy."""
        return _new_owners(self._of(context.layer), context, load_E)

    def before_gate(self, context: LayerContext, history: LoadHistory) -> LayerPlan:
        """The plan of the layer's selected strategy, from the part of the history that it needs."""
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
        profile = context.profile
        assert profile is not None
        moving_s = 0.0
        if candidate.moves_owners:
            old_E = context.owner_E
            load_E = history.excerpt(candidate.window).mean_E()
            context = replace(context, owner_E=_new_owners(candidate, context, load_E))
            moving_s = exchange_s(old_E, context.owner_E, profile, context.topology)
        times = profile.num_micro_batches
        by_exchange = [context]
        if self.travel.exchange == "by_price":
            by_exchange = [with_exchange(context, False), with_exchange(context, True)]
        seconds = []
        # The oldest first: some candidates compare their plans of one iteration with the next one's counts.
        for age in reversed(range(min(COMPARED_ITERATIONS, len(history) - 1))):
            counts_DE = history.counts_DE(age)
            planned = candidate.before_gate(
                context, history.excerpt(candidate.window, without_latest=age + 1)
            )
            plan = candidate.after_gate(context, counts_DE // times, planned, times)
            ways = [
                plan_seconds(plan, counts_DE, priced, num_micro_batches=times, planned=planned)
                for priced in by_exchange
            ]
            seconds.append(min(ways))
        return float(np.mean(seconds)) + moving_s / self.settings.choice_interval

    def serves(self, name: str, context: LayerContext) -> bool:
        """Whether a candidate can serve a layer."""
        try:
            self.candidates[name].check(context)
        except ValueError:
            return False
        return True

    def _seen(self, since_change: IterationSpread | None) -> SeenSaving | None:
        """Predicted and measured saving of the last change; ``None`` if there is nothing to compare."""
        change = self._change
        if change is None or change.spread is None or since_change is None:
            return None
        if min(change.spread.num_seen, since_change.num_seen) < LEAST_SEEN:
            return None
        return SeenSaving(change.saving_s, change.spread, since_change)


def _new_owners(candidate: Strategy, context: LayerContext, load_E: np.ndarray) -> np.ndarray:
    """New owners of a layer by a candidate; one that moves no owners keeps them."""
    moves = isinstance(candidate, MovesOwners) and candidate.moves_owners
    return candidate.reshard_layer(context, load_E) if moves else context.owner_E  # type: ignore[attr-defined]


def select_by_seconds(
    seconds_LC: np.ndarray,
    present_L: np.ndarray,
    *,
    least_gain: float = LEAST_GAIN,
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
    """
    layers = np.arange(len(seconds_LC))
    allowed_LC = seconds_LC if barred_LC is None else np.where(barred_LC, np.inf, seconds_LC)
    close_LC = allowed_LC <= (1 + least_gain) * allowed_LC.min(axis=1, keepdims=True)
    best_L = close_LC.argmax(axis=1)
    saves_L = allowed_LC[layers, best_L] < (1 - least_gain) * seconds_LC[layers, present_L]
    return np.where(saves_L, best_L, present_L).astype(np.int64)


def build_auto(settings: AutoSettings) -> AutoStrategy:
    """Build ``auto`` with the candidates of its settings.

    A candidate of another package may fail to build, or may have abilities that one layer alone cannot use.
    Such a candidate is left out with a warning, because a user of ``auto`` may not know that it exists.

    Raises:
        Exception: Whatever a shipped candidate raises while it is built.
    """
    candidates, priced = {}, {}
    for name, keys in settings.candidates.items():
        try:
            candidates[name], priced[name] = build_strategy(name, keys), build_strategy(name, keys)
            if candidates[name].resident_slots or candidates[name].selects:
                raise ValueError(
                    "got a strategy with resident replicas or with candidates of its own, wanted a "
                    "strategy that a layer can start and stop using between two iterations"
                )
        except Exception as error:
            package = STRATEGIES[name].package
            if package == SHIPPED:
                raise
            candidates.pop(name, None)
            logger.warning(
                f"[fssdp] auto: candidate '{name}' of package {package} is left out: {error}; update the "
                f"package, or leave the candidate out with --moe-strategy-set {name}=false"
            )
    return AutoStrategy(settings, candidates, priced)
