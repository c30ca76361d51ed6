"""The last placement of each layer, which serves as long as it costs what its search promised (ours).

Shape letters: D devices, E experts.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from megatron_fssdp.planning.cost.layer_profile import LayerProfile
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.replica_life import ReplicaLife
from megatron_fssdp.planning.search import LEAST_SAVING, LayerSearch, layer_search
from megatron_fssdp.strategies.layer_plan import LayerContext

RENEWAL = 16
"""Iterations after which a layer's replicas are searched again in any case.

Slow changes of the loads can make a much better placement possible without making the present one worse, and
another search, from the present one, may find a better one for the same loads.
"""


def search_of(context: LayerContext, load_DE: np.ndarray, life: ReplicaLife, hides: bool) -> LayerSearch:
    """:func:`layer_search` for the loads ``[D, E]`` of a layer whose costs are measured."""
    return layer_search(context.owner_E, load_DE, context.topology, context.costs, life=life, hides=hides)


class SearchResult(NamedTuple):
    """A layer's placement, used last after ``number`` iterations, and what its search promised.

    Its replicas have the given life. It was searched for ``load_DE``, and ``planned_s`` are the modelled
    seconds of the layer. If ``is_settled``, it was also the seed: no further search finds another one.
    """

    placement: ExpertPlacement
    life: ReplicaLife
    number: int
    planned_s: float
    profile: LayerProfile
    load_DE: np.ndarray
    is_settled: bool = False


class KeptSearches:
    """Searches for replicas in all layers, and keeps what they find.

    ``slots_by_life`` has the most replicas on a device for each life, and ``hides`` says whether transfers
    run beside compute. Costs are measured.
    """

    def __init__(self, slots_by_life: Callable[[LayerContext], dict[ReplicaLife, int]], hides: bool) -> None:
        self._slots_by_life, self._hides = slots_by_life, hides
        self._kept: dict[int, SearchResult] = {}

    def of(self, context: LayerContext, load_DE: np.ndarray, number: int) -> SearchResult:
        """The placement of the iteration before while it holds its promise, or that of a new search.

        If its price for the new forecast ``[D, E]`` is still what its search promised, another search would
        hardly find a better one, and takes a hundred times as long as a price. Layers take turns, so that no
        iteration has many searches; ``number`` iterations were before this one.
        """
        kept = self._kept.get(context.layer)
        if kept is not None and (
            number - kept.number not in (0, 1) or not np.array_equal(kept.placement.owner_E, context.owner_E)
        ):
            kept = None
        if kept is not None and self._serves(kept, context, load_DE, number):
            result = kept._replace(number=number)
        else:
            result = self.searched(context, load_DE, number, kept)
        self._kept[context.layer] = result
        return result

    def searched(
        self, context: LayerContext, load_DE: np.ndarray, number: int = 0, kept: SearchResult | None = None
    ) -> SearchResult:
        """The best result of searches within the slots of each life; ``kept`` is a seed.

        Replicas of a pass travel more often than those that stay. So they are tried only where those that may
        stay are too few.
        """
        best: SearchResult | None = None
        for life, slots in self._slots_by_life(context).items():
            search, start = search_of(context, load_DE, life, self._hides), None
            if kept is not None and kept.life is life and kept.placement.replicas_per_device_D.max() <= slots:
                start = kept.placement
            placement, seconds = search.best_placement(slots=slots, start=start)
            if best is None or seconds < (1 - LEAST_SAVING) * best.planned_s:
                best = SearchResult(placement, life, number, seconds, context.costs, load_DE)
            if placement.replicas_per_device_D.max() < slots:
                break
        assert best is not None
        is_settled = kept is not None and best.life is kept.life and best.placement == kept.placement
        return best._replace(is_settled=is_settled)

    def _serves(self, kept: SearchResult, context: LayerContext, load_DE: np.ndarray, number: int) -> bool:
        """Whether a placement still costs what its search promised, and no search is due."""
        is_due = (number + context.layer) % RENEWAL == 0
        if kept.profile is not context.profile:
            return False
        if load_DE is kept.load_DE or np.array_equal(load_DE, kept.load_DE):
            return kept.is_settled or not is_due
        if is_due:
            return False
        seconds = search_of(context, load_DE, kept.life, self._hides).seconds(kept.placement)
        return seconds - kept.planned_s <= LEAST_SAVING * seconds
