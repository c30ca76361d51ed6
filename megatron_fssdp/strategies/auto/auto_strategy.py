"""``auto``: selects for every layer the strategy with the fewest modelled seconds (ours).

Plans are data, so a layer can change its strategy between any two iterations: the runtime carries out any
plan, and losses do not change. Owners stay.

Shape letters: D devices, E experts, L MoE layers, C candidate strategies.
"""

import logging
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np

from megatron_fssdp.config.strategy.strategy_registry import BASELINE, SHIPPED, STRATEGIES
from megatron_fssdp.config.strategy.strategy_settings import profile_iterations
from megatron_fssdp.planning.loads import LoadHistory
from megatron_fssdp.planning.replica_life import ReplicaLife
from megatron_fssdp.strategies.auto import AutoSettings
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.plan_price import plan_price
from megatron_fssdp.strategies.registry import build_strategy
from megatron_fssdp.strategies.strategy import Strategy, mistakes_named

logger = logging.getLogger(__name__)

COMPARED_ITERATIONS = 3
"""Number of the latest iterations for which every candidate plans: one alone may be an exception."""

LEAST_GAIN = 0.03
"""Share of a layer's modelled seconds that a change must save; the model knows them no better."""


@dataclass(frozen=True)
class SelectionReport:
    """The result of one selection for all layers of a pipeline stage.

    ``selected`` has the strategy of each layer by the layer's number, and ``changes`` the layers for which it
    is a new one. They save ``saving_s`` modelled seconds of an iteration.
    """

    selected: dict[int, str]
    changes: tuple[int, ...]
    saving_s: float

    def describe(self) -> str:
        """A line for the log: which strategies are selected now."""
        selected = ", ".join(
            f"{name} in {_numbers([layer for layer, chosen in self.selected.items() if chosen == name])}"
            for name in dict.fromkeys(self.selected.values())
        )
        if not self.changes:
            return f"nothing changes: {selected}"
        gain = f"predicted gain {1e3 * self.saving_s:.2f} ms of an iteration"
        return f"selected: {selected}; new in {_numbers(self.changes)}; {gain}"


class AutoStrategy(Strategy[AutoSettings]):
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
        self._selected: dict[int, str] = {}
        self._has_selected = False

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

    def resume(self, selected: Mapping[int, str]) -> None:
        """Start with the selection of another run, names by layer number; unknown names are ignored."""
        self._selected = {layer: name for layer, name in selected.items() if name in self.candidates}
        self._has_selected = bool(self._selected)

    def selects_at(self, iteration: int, num_known: int) -> bool:
        """Whether to select after ``iteration`` iterations.

        It is due as soon as costs are measured, and then at the interval. ``num_known`` of the iterations
        were run by this process; it is 0 until costs are measured.
        """
        is_due = not self._has_selected or iteration % self.settings.choice_interval == 0
        return num_known > COMPARED_ITERATIONS and is_due

    def price(self, contexts: Sequence[LayerContext], histories: Sequence[LoadHistory]) -> np.ndarray:
        """Modelled seconds of an iteration of each layer under every candidate, float ``[L, C]``.

        Each candidate plans for each of the latest iterations from the loads before it; the loads that
        followed price its plans. The layers have profiles, and histories of at least two iterations.
        """
        layers = zip(contexts, histories, strict=True)
        seconds_LC = [[self._price(name, *layer) for name in self.candidates] for layer in layers]
        return np.reshape(seconds_LC, (len(contexts), len(self.candidates)))

    def select(self, layers: Sequence[int], seconds_LC: np.ndarray) -> SelectionReport:
        """Reconsider the strategies of a pipeline stage's layers, by the results of :meth:`price`.

        Ranks that share owners give equal results.
        """
        self._has_selected, names = True, list(self.candidates)
        before_L = np.array([names.index(self.selected(layer)) for layer in layers])
        selected_L = select_by_seconds(seconds_LC, before_L)
        (changed,) = np.nonzero(selected_L != before_L)
        saved_L = seconds_LC[changed, before_L[changed]] - seconds_LC[changed, selected_L[changed]]
        selected = {layer: names[index] for layer, index in zip(layers, selected_L, strict=True)}
        changes = tuple(layers[index] for index in changed)
        self._selected.update((layer, selected[layer]) for layer in changes)
        return SelectionReport(selected, changes, float(sum(saved_L)))

    def serves(self, name: str, context: LayerContext) -> bool:
        """Whether a candidate can serve a layer."""
        try:
            self.candidates[name].check(context)
        except ValueError:
            return False
        return True

    def _price(self, name: str, context: LayerContext, history: LoadHistory) -> float:
        candidate = self._priced[name]
        if not self.serves(name, context):
            return np.inf
        try:
            return self._seconds(candidate, context, history)
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
        times, seconds, by_exchange = context.costs.num_micro_batches, [], [context]
        if self.travel.exchange == "by_price":
            by_exchange = [context.with_exchange(False), context.with_exchange(True)]
        # The oldest first: some candidates compare their plans of one iteration with the next one's counts.
        for age in reversed(range(min(COMPARED_ITERATIONS, len(history) - 1))):
            counts_DE = history.counts_DE(age)
            past = history.excerpt(candidate.window, without_latest=age + 1)
            planned = candidate.before_gate(context, past)
            plan = candidate.after_gate(context, counts_DE // times, planned, times)
            ways = (plan_price(plan, counts_DE, priced, planned=planned).seconds for priced in by_exchange)
            seconds.append(min(ways))
        return float(np.mean(seconds))


def select_by_seconds(seconds_LC: np.ndarray, present_L: np.ndarray) -> np.ndarray:
    """Select for each layer the first candidate that is close to the fewest seconds, if it saves enough.

    Candidates that differ by less than the fraction :data:`LEAST_GAIN` are close: the model cannot tell them
    apart, and candidates that move less come first. A layer also keeps its present candidate if another one
    saves less. Seconds are infinite where a candidate cannot serve a layer. Candidates are indices ``[L]``.
    """
    layers = np.arange(len(seconds_LC))
    close_LC = seconds_LC <= (1 + LEAST_GAIN) * seconds_LC.min(axis=1, keepdims=True)
    best_L = close_LC.argmax(axis=1)
    saves_L = seconds_LC[layers, best_L] < (1 - LEAST_GAIN) * seconds_LC[layers, present_L]
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


def _numbers(layers: Sequence[int]) -> str:
    """Layer numbers as a text, for example ``layer 3`` or ``layers 1-4, 6``."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][-1] + 1:
            runs[-1][1:] = [layer]
        else:
            runs.append([layer])
    ranges = ", ".join("-".join(map(str, run)) for run in runs)
    return f"layer{'s' if len(layers) > 1 else ''} {ranges}"
