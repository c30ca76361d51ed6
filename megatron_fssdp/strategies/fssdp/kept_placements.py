"""Keeps a layer's placement while it holds what its search promised (ours).

Loads change little from one iteration to the next. If a placement's price for the new forecast is still what
its search promised, another search would hardly find a better placement. A price takes about a hundredth of
the time of a search.
"""

from dataclasses import dataclass, field

import numpy as np

from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.search import LEAST_SAVING, LayerSearch, SearchCosts

RENEWAL = 16
"""Iterations after which a layer is searched again in any case.

Slow changes of the loads can make a much better placement possible without making the present one worse. A
search in 16 iterations finds it, and takes little time then.
"""


@dataclass(frozen=True)
class ExpectedSeconds:
    """What a placement was expected to cost under the forecast for which it was found.

    Attributes:
        planned_s: Modelled seconds of the layer with the placement.
        plain_s: Modelled seconds of the layer without replicas.
    """

    planned_s: float
    plain_s: float

    def least_s(self, plain_s: float) -> float:
        """Fewest seconds that a search for other loads would find.

        The promise came from a search. If the layer costs as much as the forecast promised, then a search
        finds nothing much better. Loads that cost less without replicas than the forecast's lower the
        promise in proportion.

        Args:
            plain_s: Seconds without replicas under the other loads.
        """
        return self.planned_s * min(1.0, plain_s / max(self.plain_s, 1e-12))


@dataclass(frozen=True, eq=False)
class _Found:
    """A placement, and the search that found it.

    Attributes:
        placement: The placement.
        promise: What the search promised.
        slots: Most replicas that a device could hold.
        costs: Costs of the layer; all searches with equal costs have the same object.
    """

    placement: ExpertPlacement
    promise: ExpectedSeconds
    slots: int
    costs: SearchCosts

    def fits(self, search: LayerSearch, slots: int) -> bool:
        """Whether the placement is possible in a search."""
        return self.slots == slots and np.array_equal(self.placement.owner_E, search.owner_E)


@dataclass(eq=False)
class KeptPlacements:
    """The placements of all layers in the last iterations.

    Attributes:
        num_iterations: Number of iterations whose placements are known.
    """

    num_iterations: int
    _found: dict[int, dict[int, _Found]] = field(default_factory=dict)

    def best_placement(
        self, layer: int, number: int, search: LayerSearch, slots: int
    ) -> tuple[ExpertPlacement, float]:
        """The placement of the iteration before, or the one that a search finds, and its modelled seconds.

        Args:
            layer: Number of the layer.
            number: Number of iterations before this one.
            search: The search for the forecast of this iteration.
            slots: Most replicas that a device may hold.
        """
        of_layer = self._found.setdefault(layer, {})
        before = of_layer.get(number - 1)
        if before is not None and not before.fits(search, slots):
            before = None
        # Layers take turns, so that no iteration has many searches.
        if before is not None and before.costs is search.costs and (number + layer) % RENEWAL:
            seconds = search.seconds(before.placement)
            if seconds - before.promise.least_s(search.plain_s) <= LEAST_SAVING * seconds:
                self._keep(of_layer, number, before)
                return before.placement, seconds
        start = None if before is None else before.placement
        placement, seconds = search.best_placement(
            slots=slots, most_replicated=len(search.owner_E), start=start
        )
        promise = ExpectedSeconds(seconds, search.plain_s)
        self._keep(of_layer, number, _Found(placement, promise, slots, search.costs))
        return placement, seconds

    def _keep(self, of_layer: dict[int, _Found], number: int, found: _Found) -> None:
        """Keep what was found for an iteration, and forget old iterations."""
        of_layer[number] = found
        # `auto` asks for several past iterations before it asks for the next one.
        for old in [old for old in of_layer if not number - self.num_iterations < old <= number]:
            del of_layer[old]
