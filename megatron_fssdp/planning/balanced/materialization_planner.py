"""Plans one layer's placement: a local search improves several starts, and the best result is taken.

This planner is ours and goes beyond the papers. It has the limits of Hecate's Alg. 1 (overlap degree and
slots). Shape letters: E experts, D devices, N nodes.
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
"""Maximum over mean device load above which the search runs again from another start."""

CHEAP_RESTART_RATIO = 1.05
"""The same ratio for starts that cost little time, such as another seed for few devices.

The search also does not run again if the maximum device load is at most this number times the lower bound.
"""

FEW_DEVICES_RESTART_RATIO = 1.075
"""The value of ``RESTART_RATIO`` for few devices."""

FEW_DEVICES = 8
"""Number of devices up to which a group counts as one with few devices.

For few devices a search takes little time and can end in a local optimum, so it has more starts.
"""

MAX_RESTART_SLOTS = 256
"""Number of slots of all devices together above which there are no starts except Alg. 1 and one seed."""


def plan_materialization(
    owner_E: np.ndarray, load_DE: np.ndarray, topology: Topology, *, overlap_degree: int, slots: int
) -> ExpertPlacement:
    """Plan one layer's placement by a local search from the starts of :func:`_starts`.

    Args:
        owner_E: Owner of every expert, integers ``[E]``.
        load_DE: Expected load by source device and expert, ``[D, E]``, in any non-negative unit.
        topology: Nodes of the devices.
        overlap_degree: Most experts that may be replicated, t.
        slots: Most replicas that a device may hold, m.

    Returns:
        A placement whose modelled maximum device load is at most the one without replicas.

    Raises:
        ValueError: The loads do not match the owners and devices, or a limit is negative.
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
    """The result of one search from one start.

    Attributes:
        placement: A placement whose modelled maximum device load is at most the one without replicas.
        least_degree: The placement would be the same with every overlap degree from this number up to the
            allowed one.
    """

    placement: ExpertPlacement
    least_degree: int


def quick_look(
    owner_E: np.ndarray, load_DE: np.ndarray, topology: Topology, *, overlap_degree: int, slots: int
) -> QuickLook:
    """Plan like :func:`plan_materialization`, but with one search only, from :func:`seed_replicas`.

    Args:
        owner_E: Owner of every expert, integers ``[E]``.
        load_DE: Expected load by source device and expert, ``[D, E]``, in any non-negative unit.
        topology: Nodes of the devices.
        overlap_degree: Most experts that may be replicated, t.
        slots: Most replicas that a device may hold, m.
    """
    layer = _demand(owner_E, load_DE, topology, overlap_degree, slots)
    if _is_worth_it(layer):
        model = layer.owners_model()
        wanted = _seed(model, layer, OWNER_RATIO)
        search(model, layer, DEFAULT_MAX_MOVES)
        if model.most_loaded()[0] <= layer.owners_max * (1 + ROUNDING):
            return QuickLook(layer.placement_of(model), _least_degree(model, layer, wanted))
    return QuickLook(layer.owners_only(), layer.max_replicated)


def _least_degree(model: EvenDispatchModel, layer: LayerDemand, wanted: Sequence[int]) -> int:
    """The lowest overlap degree that gives the same placement; see :class:`QuickLook`.

    A lower overlap degree has three effects:

    * The seed may replicate only that many of the most loaded experts. This changes nothing if all experts
    that
      it wanted to replicate are among them.
    * The search may replicate only that many experts at the same time. This changes nothing if the search
    never
      replicated more.
    * The lower bound becomes higher, but only if more devices than that are above it.

    Args:
        model: The model after the search.
        layer: Owners, loads and limits of the layer.
        wanted: The experts that the seed wanted to replicate.
    """
    by_load = sorted(range(len(model.total)), key=lambda expert: -model.total[expert])
    last_wanted = max(map(by_load.index, wanted), default=-1)
    return max(last_wanted + 1, model.most_replicated, layer.num_above_bound)


def _demand(
    owner_E: np.ndarray, load_DE: np.ndarray, topology: Topology, overlap_degree: int, slots: int
) -> LayerDemand:
    """Owners, loads and limits of a layer, after checks of the arguments."""
    owners_only = ExpertPlacement.owners_only(owner_E, topology.num_devices)
    load = checked_load(
        load_DE,
        "load_DE",
        (owners_only.num_devices, owners_only.num_experts),
        "by source device of the topology and expert of owner_E",
    )
    if overlap_degree < 0 or slots < 0:
        raise ValueError(
            f"overlap_degree is {overlap_degree} and slots is {slots}: wanted 0 or more of each; "
            "0 of either means no replicas"
        )
    max_replicated = min(overlap_degree, owners_only.num_experts)
    return LayerDemand.of(owners_only.owner_E, load, topology, slots, max_replicated)


def _is_worth_it(layer: LayerDemand) -> bool:
    """Whether replicas are allowed, and device loads without replicas are not balanced already."""
    if not (layer.max_replicated > 0 and layer.slots > 0):
        return False
    balanced = layer.owners_max * (1 + ROUNDING) <= BALANCED_RATIO * layer.lower_bound
    return layer.memory_is_enough or not balanced


type _Start = Callable[[], EvenDispatchModel]


def _starts(layer: LayerDemand) -> list[tuple[float, _Start]]:
    """The starts of the search in their order, each with a ratio of maximum over mean device load.

    A start is tried if the best placement so far is above its ratio.

    If every device has slots for all experts that may be replicated (m == t), Hecate's Alg. 1 comes first. It
    then puts the most loaded experts on all devices, so most tokens stay on their devices. Otherwise
    :func:`seed_replicas` comes first, because its result is closer to balance than that of Alg. 1 and takes
    less time. The other starts are for layers on which these results are not good enough: seeds in which
    owners give away less load and so leave slots to others, a start without replicas, and for few devices
    also Alg. 1 and the most loaded experts on all devices.
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
    """A start: the result of :func:`seed_replicas`."""
    model = layer.owners_model()
    _seed(model, layer, owner_ratio)
    return model


def _seed(model: EvenDispatchModel, layer: LayerDemand, owner_ratio: float) -> Sequence[int]:
    """Call :func:`seed_replicas` with the limits of a layer."""
    return seed_replicas(
        model,
        layer.topology,
        slots=layer.slots,
        max_replicated=layer.max_replicated,
        owner_ratio=owner_ratio,
    )


def _alg1(layer: LayerDemand) -> EvenDispatchModel:
    """A start: the result of Hecate's Alg. 1."""
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
    """A start: the most loaded experts are on all devices."""
    model = layer.owners_model()
    devices = range(layer.topology.num_devices)
    for expert in sorted(range(len(model.total)), key=lambda e: -model.total[e])[:num_experts]:
        model.spread(expert, [device for device in devices if device != model.owners[expert]])
    model.sort_loads()
    return model
