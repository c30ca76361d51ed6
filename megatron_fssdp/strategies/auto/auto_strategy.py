"""``auto``: every layer runs under the strategy that is modelled to take the fewest seconds (ours).

Plans are data, so a layer can change its strategy between any two iterations: the runtime executes what it
gets, and losses do not change. Only owners that have moved stay where they are.

Shape letters: D devices, E experts, L MoE layers, C candidate strategies.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_fssdp.config.strategy_registry import BASELINE
from megatron_fssdp.config.strategy_settings import AutoSettings
from megatron_fssdp.planning.loads.load_history import LoadHistory
from megatron_fssdp.planning.memory.held_replicas import ReplicaLife
from megatron_fssdp.planning.placement.owner_map import OwnerMap
from megatron_fssdp.strategies.auto.selection_by_seconds import select_by_seconds
from megatron_fssdp.strategies.iteration_spread import LEAST_SEEN, IterationSpread
from megatron_fssdp.strategies.owner_moves import exchange_s
from megatron_fssdp.strategies.plan_seconds import plan_seconds
from megatron_fssdp.strategies.selection_report import LayerSelection, SeenSaving, SelectionReport
from megatron_fssdp.strategies.strategy import LayerContext, LayerPlan, Strategy

BARRED_CHOICES = 5
"""Choices for which a layer does not change again to a strategy that made iterations slower."""


@dataclass(frozen=True)
class _Change:
    """The last change: what was there before it, and what it was to save."""

    before: dict[int, str]
    saving_s: float
    spread: IterationSpread | None


class AutoStrategy(Strategy[AutoSettings]):
    """Asks the strategy that a layer has chosen; chooses anew every so many iterations.

    Args:
        settings: Candidates among them.
        candidates: Built from these, by name, doing nothing first.
    """

    replica_life = ReplicaLife.CHOSEN
    selects = True

    def __init__(self, settings: AutoSettings, candidates: Mapping[str, Strategy]) -> None:
        super().__init__(settings)
        self.candidates = dict(candidates)
        self._selected: dict[int, str] = {}
        self._has_selected = False
        self._reshard_due: set[int] = set()
        self._change: _Change | None = None
        self._barred: dict[tuple[int, str], int] = {}

    @property
    def window(self) -> int:
        """As long as any candidate's, before the first of the iterations that are compared."""
        longest = max(candidate.window for candidate in self.candidates.values())
        return longest + self.settings.compared_iterations

    @property
    def profile_iterations(self) -> int:
        """Iterations to measure."""
        return self.settings.profile_iterations

    @property
    def overlaps(self) -> bool:
        """Where any candidate does."""
        return any(candidate.overlaps for candidate in self.candidates.values())

    @property
    def moves_owners(self) -> bool:
        """Where any candidate does."""
        return any(candidate.moves_owners for candidate in self.candidates.values())

    def may_replicate(self, layer: int) -> bool:
        """Whether the strategy that the layer has may."""
        return self._of(layer).may_replicate(layer)

    def limits(self, context: LayerContext) -> str:
        """What can be chosen."""
        able = [name for name in self.candidates if self.serves(name, context)]
        return f"each layer chooses among {', '.join(able)} every {self.settings.choice_interval} iterations"

    def slots(self, context: LayerContext) -> int:
        """Most replicas that any candidate puts on a device."""
        return max(candidate.slots(context) for candidate in self.candidates.values())

    def selected(self, layer: int) -> str:
        """The strategy that a layer has."""
        return self._selected.get(layer, BASELINE)

    def _of(self, layer: int) -> Strategy:
        return self.candidates[self.selected(layer)]

    def resume(self, selected: Mapping[int, str]) -> None:
        """Start with the selection of another run of the same model.

        Args:
            selected: Names by layer number; those that are no candidates here are left out.
        """
        self._selected = {layer: name for layer, name in selected.items() if name in self.candidates}

    def selects_at(self, iteration: int, num_known: int) -> bool:
        """Whether to reconsider the selection once ``iteration`` iterations are complete.

        Args:
            iteration: Iterations that the model has been trained for.
            num_known: Iterations that this process has seen, once costs are measured; else 0.
        """
        # The first iteration is no measure, and as many as quartiles need have to come before a change.
        if num_known <= LEAST_SEEN:
            return False
        return not self._has_selected or iteration % self.settings.choice_interval == 0

    def price(self, contexts: Sequence[LayerContext], histories: Sequence[LoadHistory]) -> np.ndarray:
        """Modelled seconds of an iteration under every candidate, [L, C].

        Each candidate plans for the latest iterations from what was known before them, and its plans
        are charged for the loads that then came. Moving owners is shared out over the iterations until
        the next choice.

        Args:
            contexts: The layers, with profiles.
            histories: Their loads, with two iterations at least.
        """
        return np.array(
            [
                [self._price(name, context, history) for name in self.candidates]
                for context, history in zip(contexts, histories, strict=True)
            ]
        ).reshape(len(contexts), len(self.candidates))

    def select(
        self, layers: Sequence[int], seconds_LC: np.ndarray, since_change: IterationSpread | None
    ) -> SelectionReport:
        """Choose anew for all layers; the same arguments on all ranks that share owners.

        A change that made iterations slower is taken back first, and not made again for a while.

        Args:
            layers: Numbers of the layers.
            seconds_LC: What :meth:`price` said, agreed on.
            since_change: Seconds of the iterations since the last change, or since the start.
        """
        self._has_selected = True
        before = {layer: self.selected(layer) for layer in layers}
        seen = self._seen(since_change)
        self._barred = {key: left - 1 for key, left in self._barred.items() if left > 1}
        if seen is not None and seen.is_slower and self._change is not None:
            for layer, name in before.items():
                if name != (earlier := self._change.before.get(layer, BASELINE)):
                    self._barred[layer, name] = BARRED_CHOICES
                    self._selected[layer] = earlier
        names = list(self.candidates)
        present_L = np.array([names.index(self.selected(layer)) for layer in layers], np.int64)
        barred_LC = np.array([[(layer, name) in self._barred for name in names] for layer in layers])
        chosen_L = select_by_seconds(
            seconds_LC, present_L, least_gain=self.settings.least_gain, barred_LC=barred_LC
        )
        choices = tuple(
            LayerSelection(
                layer, names[chosen], before[layer], dict(zip(names, of_layer.tolist(), strict=True))
            )
            for layer, chosen, of_layer in zip(layers, chosen_L, seconds_LC, strict=True)
        )
        report = SelectionReport(choices, since_change, seen)
        if not (seen is not None and seen.is_slower) and report.is_too_little:
            choices = tuple(replace(choice, strategy=choice.before) for choice in choices)
            report = SelectionReport(choices, since_change, seen, report.saving_s)
        for choice in report.changes:
            self._selected[choice.layer] = choice.strategy
            if self.candidates[choice.strategy].moves_owners:
                self._reshard_due.add(choice.layer)
        if report.changes:
            self._change = _Change(before, report.saving_s, since_change)
        elif seen is not None:
            self._change = None
        return report

    def reshards_at(self, iteration: int) -> bool:
        """Where a layer is due whose strategy moves owners, or one has just got such a strategy."""
        return bool(self._reshard_due) or any(
            self.candidates[name].reshards_at(iteration) for name in set(self._selected.values())
        )

    def reshard(self, contexts: Sequence[LayerContext], load_LE: np.ndarray, owners: OwnerMap) -> OwnerMap:
        """New owners for the layers whose strategies move owners."""
        self._reshard_due.clear()
        return super().reshard(contexts, load_LE, owners)

    def reshard_layer(self, context: LayerContext, load_E: np.ndarray) -> np.ndarray:
        """What the layer's strategy says."""
        return self._of(context.layer).reshard_layer(context, load_E)

    def before_gate(self, context: LayerContext, history: LoadHistory) -> LayerPlan:
        """What the layer's strategy plans."""
        candidate = self._of(context.layer)
        return candidate.before_gate(context, history.excerpt(candidate.window))

    def after_gate(
        self, context: LayerContext, counts_DE: np.ndarray, plan: LayerPlan, num_micro_batches: int
    ) -> LayerPlan:
        """What the layer's strategy makes of it."""
        candidate = self._of(context.layer)
        return candidate.after_gate(context, counts_DE, plan, num_micro_batches)

    def _price(self, name: str, context: LayerContext, history: LoadHistory) -> float:
        if not self.serves(name, context):
            return float("inf")
        candidate, profile = self.candidates[name], context.profile
        assert profile is not None
        moving_s = 0.0
        if candidate.moves_owners:
            old_E = context.owner_E
            load_E = history.excerpt(candidate.window).mean_E()
            context = replace(context, owner_E=candidate.reshard_layer(context, load_E))
            moving_s = exchange_s(old_E, context.owner_E, profile, context.topology)
        times = profile.num_micro_batches
        seconds = []
        for age in range(min(self.settings.compared_iterations, len(history) - 1)):
            counts_DE = history.counts_DE(age)
            planned = candidate.before_gate(
                context, history.excerpt(candidate.window, without_latest=age + 1)
            )
            plan = candidate.after_gate(context, counts_DE // times, planned, times)
            seconds.append(plan_seconds(plan, counts_DE, context, num_micro_batches=times, planned=planned))
        return float(np.mean(seconds)) + moving_s / self.settings.choice_interval

    def serves(self, name: str, context: LayerContext) -> bool:
        """Whether a candidate can have a layer."""
        try:
            self.candidates[name].check(context)
        except ValueError:
            return False
        return True

    def _seen(self, since_change: IterationSpread | None) -> SeenSaving | None:
        """What the last change was to bring and has brought; ``None`` where there is nothing to compare."""
        change = self._change
        if change is None or change.spread is None or since_change is None:
            return None
        if min(change.spread.num_seen, since_change.num_seen) < LEAST_SEEN:
            return None
        return SeenSaving(change.saving_s, change.spread, since_change)
