"""Plans one layer's placement: starts of several kinds, each improved by the local search.

Ours, beyond the papers, within the limits of Hecate's Alg. 1 (overlap degree and slots).
Shape letters: E experts, D devices, N nodes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from megatron_fssdp.planning.balanced.replica_refinement import (
    BALANCED_RATIO,
    DEFAULT_MAX_MOVES,
    ROUNDING,
    search,
)
from megatron_fssdp.planning.balanced.replica_seeding import OWNER_RATIO, seed_replicas
from megatron_fssdp.planning.loads.checked_loads import checked_load
from megatron_fssdp.planning.loads.even_dispatch_model import EvenDispatchModel
from megatron_fssdp.planning.loads.layer_demand import LayerDemand
from megatron_fssdp.planning.papers.sparse_materialization import sparse_materialization
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology

RESTART_RATIO = 1.10
"""Maximum over mean device load above which the search starts once more from elsewhere."""

CHEAP_RESTART_RATIO = 1.05
"""The same for starts that cost little: another seed for few devices. Never again at this much
over the lower bound."""

FEW_DEVICES_RESTART_RATIO = 1.075
"""``RESTART_RATIO`` with few devices."""

FEW_DEVICES = 8
"""Up to so many devices a search takes little time and can end in a corner: there are more starts."""

MAX_RESTART_SLOTS = 256
"""Slots of all devices together up to which there is more than one start."""


def plan_materialization(
    owner_E: np.ndarray, load_DE: np.ndarray, topology: Topology, *, overlap_degree: int, slots: int
) -> ExpertPlacement:
    """Plans one layer: the starts of :func:`_starts`, each improved by the local search.

    Args:
        owner_E: Owner of every expert, integers [E].
        load_DE: Expected load by source and expert, [D, E].
        topology: Nodes of the devices.
        overlap_degree: Most experts that may be replicated, t.
        slots: Most replicas a device may hold, m.

    Returns:
        A placement whose modelled maximum device load is at most the owners-only one's.
    """
    layer = _demand(owner_E, load_DE, topology, overlap_degree, slots)
    if not _is_worth_it(layer):
        return layer.owners_only()
    best: EvenDispatchModel | None = None
    best_max, owners_max = np.inf, layer.owners_max * (1 + ROUNDING)
    for ratio, start in _starts(layer):
        if best_max <= min(owners_max, max(ratio * layer.mean, CHEAP_RESTART_RATIO * layer.lower_bound)):
            break
        model = start()
        search(model, layer, DEFAULT_MAX_MOVES)
        if model.most_loaded()[0] < best_max:
            best, best_max = model, model.most_loaded()[0]
    if best is None or best_max > owners_max:
        return layer.owners_only()
    return layer.placement_of(best)


@dataclass(frozen=True, eq=False)
class QuickLook:
    """What one start and one search come to.

    Attributes:
        placement: Its modelled maximum device load is at most the owners-only one's.
        least_degree: With an overlap degree from this number up to the one that was allowed, the placement
            would be the same.
    """

    placement: ExpertPlacement
    least_degree: int


def quick_look(
    owner_E: np.ndarray, load_DE: np.ndarray, topology: Topology, *, overlap_degree: int, slots: int
) -> QuickLook:
    """As :func:`plan_materialization`, but for only :func:`seed_replicas` and one search from there."""
    layer = _demand(owner_E, load_DE, topology, overlap_degree, slots)
    if _is_worth_it(layer):
        model = layer.owners_model()
        wanted = _seed(model, layer, OWNER_RATIO)
        search(model, layer, DEFAULT_MAX_MOVES)
        if model.most_loaded()[0] <= layer.owners_max * (1 + ROUNDING):
            return QuickLook(layer.placement_of(model), _least_degree(model, layer, wanted))
    return QuickLook(layer.owners_only(), layer.max_replicated)


def _least_degree(model: EvenDispatchModel, layer: LayerDemand, wanted: Sequence[int]) -> int:
    """See :class:`QuickLook`.

    A lower degree changes three things. The seed may replicate only the most loaded experts, which makes
    no difference while all that it wanted are among them: it never came to the others. The search may not
    replicate more experts at a time than so many, which makes none while it never did: a move that it did
    not make, for a better one, does not keep it from the better one. And the lower bound rises only if more
    devices than so many are above it.
    """
    by_load = sorted(range(len(model.total)), key=lambda expert: -model.total[expert])
    last_wanted = max(map(by_load.index, wanted), default=-1)
    return max(last_wanted + 1, model.most_replicated, layer.num_above_bound)


def _demand(
    owner_E: np.ndarray, load_DE: np.ndarray, topology: Topology, overlap_degree: int, slots: int
) -> LayerDemand:
    """What is planned for, checked."""
    owners_only = ExpertPlacement.owners_only(owner_E, topology.num_devices)
    load = checked_load(
        load_DE,
        "load_DE",
        (owners_only.num_devices, owners_only.num_experts),
        "by source device and expert, as placement and topology have them",
    )
    if overlap_degree < 0 or slots < 0:
        raise ValueError(
            f"overlap_degree is {overlap_degree} and slots is {slots}: wanted 0 or more of each; "
            "0 of either means no replicas"
        )
    max_replicated = min(overlap_degree, owners_only.num_experts)
    return LayerDemand.of(owners_only.owner_E, load, topology, slots, max_replicated)


def _is_worth_it(layer: LayerDemand) -> bool:
    """Whether there may be replicas, and the owners alone are not balanced already."""
    if not (layer.max_replicated > 0 and layer.slots > 0):
        return False
    balanced = layer.owners_max * (1 + ROUNDING) <= BALANCED_RATIO * layer.lower_bound
    return layer.memory_is_enough or not balanced


type _Start = Callable[[], EvenDispatchModel]


def _starts(layer: LayerDemand) -> list[tuple[float, _Start]]:
    """Where the search starts, each with the maximum over mean load so far above which to try it.

    Hecate's Alg. 1 comes first where its memory does not bind (m == t): it then puts the top
    experts everywhere, which keeps most tokens where they are. Else :func:`seed_replicas` is
    first: it ends nearer to balance than Alg. 1 and takes less time. The others are for layers
    on which that ends too high: owners that give away less and so leave slots to others, the
    owners alone, and with few devices also Alg. 1 and the most loaded experts everywhere.
    """
    num_devices = layer.topology.num_devices
    few = num_devices <= FEW_DEVICES
    starts: list[tuple[float, _Start]] = []
    if layer.memory_is_enough:
        starts.append((0.0, partial(_alg1, layer)))
    starts.append((CHEAP_RESTART_RATIO, partial(_seeded, layer, OWNER_RATIO)))
    if num_devices * layer.slots > MAX_RESTART_SLOTS:
        return starts
    owners_only = layer.owners_model
    if not few:
        return [*starts, (RESTART_RATIO, partial(_seeded, layer, 1.1)), (RESTART_RATIO, owners_only)]
    starts += [(CHEAP_RESTART_RATIO, partial(_seeded, layer, ratio)) for ratio in (1.0, 0.75)]
    everywhere = [partial(_hottest_everywhere, layer, n) for n in (1, min(layer.slots, layer.max_replicated))]
    costly: list[_Start] = [partial(_seeded, layer, 1.1), owners_only, partial(_alg1, layer), *everywhere]
    return starts + [(FEW_DEVICES_RESTART_RATIO, start) for start in costly]


def _seeded(layer: LayerDemand, owner_ratio: float) -> EvenDispatchModel:
    """The result of :func:`seed_replicas`."""
    model = layer.owners_model()
    _seed(model, layer, owner_ratio)
    return model


def _seed(model: EvenDispatchModel, layer: LayerDemand, owner_ratio: float) -> Sequence[int]:
    return seed_replicas(
        model,
        layer.topology,
        slots=layer.slots,
        max_replicated=layer.max_replicated,
        owner_ratio=owner_ratio,
    )


def _alg1(layer: LayerDemand) -> EvenDispatchModel:
    """The result of Hecate's Alg. 1."""
    return layer.model_of(
        sparse_materialization(
            layer.owner_E,
            layer.node_load_NE.sum(axis=0),
            layer.topology,
            overlap_degree=layer.max_replicated,
            slots=layer.slots,
        )
    )


def _hottest_everywhere(layer: LayerDemand, num_experts: int) -> EvenDispatchModel:
    """The most loaded experts on every device."""
    model = layer.owners_model()
    devices = range(layer.topology.num_devices)
    for expert in sorted(range(len(model.total)), key=lambda e: -model.total[e])[:num_experts]:
        model.spread(expert, [device for device in devices if device != model.owners[expert]])
    model.sort_loads()
    return model
