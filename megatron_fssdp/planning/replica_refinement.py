"""Local search over replicas that only ever lowers the modelled maximum device load.

Ours, beyond the papers: Alg. 1 counts replicas without asking where their load lands, so it
can leave, or make, one device the straggler. Shape letters: E experts, D devices, N nodes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from megatron_fssdp.planning.even_dispatch_model import EvenDispatchModel
from megatron_fssdp.planning.placement import ExpertPlacement
from megatron_fssdp.planning.replica_seeding import OWNER_RATIO, seed_replicas
from megatron_fssdp.planning.sparse_materialization import sparse_materialization
from megatron_fssdp.planning.topology import Topology

BALANCED_RATIO = 1.01
"""Maximum device load over its lower bound, most often the mean, at which the search stops."""

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

ROUNDING = 1e-12
"""Relative difference at which loads summed in another order count as equal."""

MIN_GAIN = 2e-3
"""Smallest relief of the most loaded device worth a move, as a part of the mean device load."""

NUM_CANDIDATES = 8
"""Least loaded devices tried as the place of a new replica."""

NUM_NODE_CANDIDATES = 4
"""Least loaded devices of the most loaded device's own node tried besides."""

DEFAULT_MAX_MOVES = 256
"""Most moves of one search."""


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
    owners_only = ExpertPlacement.owners_only(owner_E, topology.num_devices)
    load = _checked_load(load_DE, owners_only.num_devices, owners_only.num_experts)
    if overlap_degree < 0 or slots < 0:
        raise ValueError(
            f"overlap_degree is {overlap_degree} and slots is {slots}: wanted 0 or more of each; "
            "0 of either means no replicas"
        )
    max_replicated = min(overlap_degree, owners_only.num_experts)
    layer = _Layer.of(owners_only.owner_E, load, topology, slots, max_replicated)
    lower_bound, owners_max = layer.lower_bound, layer.owners_max * (1 + ROUNDING)
    may_replicate = max_replicated > 0 and slots > 0
    if not may_replicate or (owners_max <= BALANCED_RATIO * lower_bound and not layer.memory_is_enough):
        return owners_only
    best: EvenDispatchModel | None = None
    best_max = np.inf
    for ratio, start in _starts(layer):
        if best_max <= min(owners_max, max(ratio * layer.mean, CHEAP_RESTART_RATIO * lower_bound)):
            break
        model = start()
        _search(model, layer, DEFAULT_MAX_MOVES)
        if model.most_loaded()[0] < best_max:
            best, best_max = model, model.most_loaded()[0]
    if best is None or best_max > owners_max:
        return owners_only
    return ExpertPlacement(owners_only.owner_E, best.present_ED(), slots=slots)


@dataclass(frozen=True, slots=True)
class _Layer:
    """What is planned for: one layer's owners and loads, and how many replicas are allowed."""

    owner_E: np.ndarray
    load_DE: np.ndarray
    node_load_NE: np.ndarray
    topology: Topology
    slots: int
    max_replicated: int
    mean: float
    owners_max: float
    lower_bound: float

    @classmethod
    def of(
        cls, owner_E: np.ndarray, load_DE: np.ndarray, topology: Topology, slots: int, max_replicated: int
    ) -> "_Layer":
        """With mean and maximum device load of the owners alone and a bound that no placement gets below.

        At most ``max_replicated`` owners give anything away, so the next most loaded one's load
        stays; and no maximum is below the mean.
        """
        node_load_NE = topology.sum_over_nodes(load_DE)
        num_devices = topology.num_devices
        load_D = np.bincount(owner_E, weights=node_load_NE.sum(axis=0), minlength=num_devices)
        mean = float(load_D.sum()) / num_devices
        stays = float(np.sort(load_D)[-1 - max_replicated]) if max_replicated < num_devices else 0.0
        return cls(
            owner_E,
            load_DE,
            node_load_NE,
            topology,
            slots,
            max_replicated,
            mean,
            float(load_D.max()),
            max(mean, stays),
        )

    @property
    def memory_is_enough(self) -> bool:
        """Whether every expert that may be replicated fits on every device: m == t in Hecate's Alg. 1."""
        return self.slots >= self.max_replicated

    def owners_model(self) -> EvenDispatchModel:
        """The owners alone."""
        return EvenDispatchModel(self.owner_E, self.load_DE, self.node_load_NE, self.topology)

    def model_of(self, placement: ExpertPlacement) -> EvenDispatchModel:
        """A placement with these owners."""
        model = self.owners_model()
        model.spread_like(placement)
        return model

    def seeded(self, owner_ratio: float) -> EvenDispatchModel:
        """The result of :func:`seed_replicas`."""
        model = self.owners_model()
        seed_replicas(
            model,
            self.topology,
            slots=self.slots,
            max_replicated=self.max_replicated,
            owner_ratio=owner_ratio,
        )
        return model

    def alg1(self) -> EvenDispatchModel:
        """The result of Hecate's Alg. 1."""
        return self.model_of(
            sparse_materialization(
                self.owner_E,
                self.node_load_NE.sum(axis=0),
                self.topology,
                overlap_degree=self.max_replicated,
                slots=self.slots,
            )
        )

    def hottest_everywhere(self, num_experts: int) -> EvenDispatchModel:
        """The most loaded experts on every device."""
        model = self.owners_model()
        devices = range(self.topology.num_devices)
        for expert in sorted(range(len(model.total)), key=lambda e: -model.total[e])[:num_experts]:
            model.spread(expert, [device for device in devices if device != model.owners[expert]])
        model.sort_loads()
        return model


type _Start = Callable[[], EvenDispatchModel]


def _starts(layer: _Layer) -> list[tuple[float, _Start]]:
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
        starts.append((0.0, layer.alg1))
    starts.append((CHEAP_RESTART_RATIO, partial(layer.seeded, OWNER_RATIO)))
    if num_devices * layer.slots > MAX_RESTART_SLOTS:
        return starts
    owners_only = layer.owners_model
    if not few:
        return [*starts, (RESTART_RATIO, partial(layer.seeded, 1.1)), (RESTART_RATIO, owners_only)]
    starts += [(CHEAP_RESTART_RATIO, partial(layer.seeded, ratio)) for ratio in (1.0, 0.75)]
    everywhere = [partial(layer.hottest_everywhere, n) for n in (1, min(layer.slots, layer.max_replicated))]
    costly: list[_Start] = [partial(layer.seeded, 1.1), owners_only, layer.alg1, *everywhere]
    return starts + [(FEW_DEVICES_RESTART_RATIO, start) for start in costly]


def refine_replicas(
    placement: ExpertPlacement,
    load_DE: np.ndarray,
    topology: Topology,
    *,
    slots: int,
    max_moves: int = DEFAULT_MAX_MOVES,
    max_replicated: int | None = None,
) -> ExpertPlacement:
    """Moves replicas while that lowers the most loaded device under even dispatch.

    Each move relieves the most loaded device: a new replica of one of its experts on a free slot,
    the same in exchange for a replica there, or the end of one of its own replicas. Of the moves
    tried (its experts by descending share; with many devices, until one lets the next device be
    the most loaded), the one whose most loaded affected device ends lowest is made; all must end
    below the present maximum, so it never rises and the search ends: when balanced, when nothing
    helps, or after ``max_moves``.

    The search starts from the input, or from the owners alone if it would end worse than those.

    Args:
        placement: Where to start.
        load_DE: Expected load by source and expert, [D, E].
        topology: Nodes of the devices.
        slots: Most replicas a device may hold.
        max_moves: Most moves made.
        max_replicated: Most experts with replicas, Alg. 1's overlap degree; None: no bound.

    Returns:
        A placement whose modelled maximum device load (``expected_device_load_D``) is at most
        the input's and at most the owners-only placement's.
    """
    load = _checked_load(load_DE, placement.num_devices, placement.num_experts)
    replicas_D = placement.replicas_per_device_D
    if int(replicas_D.max()) > slots:
        device = int(replicas_D.argmax())
        raise ValueError(
            f"device {device} holds {int(replicas_D[device])} replicas: wanted at most slots = {slots}; "
            "plan the placement to refine with the same slots"
        )
    if max_replicated is None:
        max_replicated = placement.num_experts
    layer = _Layer.of(placement.owner_E, load, topology, slots, max_replicated)
    model = layer.model_of(placement)
    num_moves = _search(model, layer, max_moves)
    if model.most_loaded()[0] > layer.owners_max * (1 + ROUNDING):
        model = layer.owners_model()
        num_moves = 1 + _search(model, layer, max_moves)
    return ExpertPlacement(placement.owner_E, model.present_ED(), slots=slots) if num_moves else placement


def _search(model: EvenDispatchModel, layer: _Layer, max_moves: int) -> int:
    """Makes the best move until balanced, nothing helps or ``max_moves`` are made; returns their number."""
    for num_moves in range(max_moves):
        if model.most_loaded()[0] <= BALANCED_RATIO * layer.lower_bound:
            return num_moves
        move = _best_move(model, layer, MIN_GAIN * model.mean)
        if move is None:
            return num_moves
        for expert, device in move.ends:
            model.remove(expert, device)
        for expert, device in move.begins:
            model.add(expert, device)
    return max_moves


@dataclass(frozen=True, slots=True)
class _Move:
    """Replicas, as (expert, device), that end and begin together."""

    ends: tuple[tuple[int, int], ...] = ()
    begins: tuple[tuple[int, int], ...] = ()


def _best_move(model: EvenDispatchModel, layer: _Layer, min_gain: float) -> _Move | None:
    """The move after which the most loaded of the devices it affects is lowest."""
    node_of, replicas, ascending, slots = model.node_of, model.replicas, model.ascending, layer.slots
    highest, device = ascending[-1]
    best = highest - min_gain  # a move must leave every device it affects below this
    move: _Move | None = None
    node = node_of[device]
    targets = _targets(model, layer)
    endings_on: dict[int, list[tuple[int, float, float, float]]] = {}
    may_widen = model.num_replicated < layer.max_replicated

    # Below the next device's load a move lowers the maximum no further; few devices are searched fully.
    enough = ascending[-2][0] if len(ascending) > NUM_CANDIDATES else -1.0
    here_shares = [(model.share_on(e, device), e) for e in model.owned[device] + replicas[device]]
    here_shares.sort(reverse=True)
    for share_here, expert in here_shares:
        if highest - share_here >= best or (move is not None and best <= enough):
            break
        shares = model.shares(expert)
        near_here, far = shares.near[node], shares.far
        if highest - near_here - far >= best:
            continue  # what the device routes to the expert itself stays
        own, near, unserved = shares.own, shares.near, shares.unserved
        holders, holders_in, node_load = shares.holders, shares.holders_in, shares.node_load
        num_after = len(holders) + 1
        is_new = num_after == 2
        here_without_far = highest - far
        for target_load, target in targets:
            if target in holders:
                continue
            target_node = node_of[target]
            if target_node in holders_in:
                far_after = unserved / num_after
                count = holders_in[target_node]
                near_after = (near[target_node] * count - own[target]) / (count + 1)
                here = here_without_far + far_after
                if target_node == node:
                    here += near_after - near_here
                there = target_load + own[target] + near_after + far_after
            else:
                far_after = (unserved - node_load[target_node]) / num_after
                here = here_without_far + far_after
                there = target_load + node_load[target_node] + far_after
            if here >= best:
                continue
            if len(replicas[target]) < slots:
                if there < best and (may_widen or not is_new):
                    best = here if here > there else there
                    move = _Move(begins=((expert, target),))
                continue
            endings = endings_on.get(target)
            if endings is None:
                endings = endings_on[target] = [
                    _ending(model, replica, target, device) for replica in replicas[target]
                ]
            for replica, share, worst, growth_here in endings:
                if worst < best and there - share < best and here + growth_here < best:
                    if is_new and not may_widen and len(model.holders[replica]) > 2:
                        continue  # one more replicated expert, and none less
                    best = max(worst, there - share, here + growth_here)
                    move = _Move(ends=((replica, target),), begins=((expert, target),))

    if move is not None and best <= enough:
        return move
    for replica in replicas[device]:
        _, share, worst, _ = _ending(model, replica, device, device)
        worst = max(worst, highest - share)
        if worst < best:
            best = worst
            move = _Move(ends=((replica, device),))
    return move


def _targets(model: EvenDispatchModel, layer: _Layer) -> list[tuple[float, int]]:
    """(load, device) of the devices to try: the least loaded ones, and some of the most loaded one's node."""
    loads, ascending = model.loads, model.ascending
    device = ascending[-1][1]
    if len(loads) <= NUM_CANDIDATES:
        return ascending[:-1]
    targets = ascending[:NUM_CANDIDATES]
    members = layer.topology.devices_by_node[model.node_of[device]]
    for entry in sorted([(loads[other], other) for other in members])[:NUM_NODE_CANDIDATES]:
        if entry not in targets and entry[1] != device:
            targets.append(entry)
    return targets


def _ending(
    model: EvenDispatchModel, expert: int, device: int, apart: int
) -> tuple[int, float, float, float]:
    """What the end of a replica on ``device`` does to the loads.

    Returns:
        The expert, what ``device`` loses, the highest load of its other holders but ``apart``
        afterwards, and what ``apart`` gains.
    """
    shares, loads, node_of = model.shares(expert), model.loads, model.node_of
    node = node_of[device]
    holders, near, far = shares.holders, shares.near[node], shares.far
    count, num_left = shares.holders_in[node], len(holders) - 1
    own = shares.own[device]
    if count == 1:
        growth_near = growth_far = (shares.unserved + shares.node_load[node]) / num_left - far
    else:
        growth_far = shares.unserved / num_left - far
        growth_near = growth_far + (near * count + own) / (count - 1) - near
    worst = growth_apart = 0.0
    for holder in holders:
        if holder != device:
            growth = growth_near if node_of[holder] == node else growth_far
            if holder == apart:
                growth_apart = growth
            elif loads[holder] + growth > worst:
                worst = loads[holder] + growth
    return expert, own + near + far, worst, growth_apart


def _checked_load(load_DE: np.ndarray, num_devices: int, num_experts: int) -> np.ndarray:
    load = np.ascontiguousarray(load_DE, dtype=np.float64)
    if load.shape != (num_devices, num_experts):
        raise ValueError(
            f"load_DE has shape {load.shape}: wanted ({num_devices}, {num_experts}), by source device and "
            "expert, as placement and topology have them"
        )
    if not (float(load.min()) >= 0 and np.isfinite(float(load.max()))):
        source, expert = (int(i) for i in np.argwhere(~((load >= 0) & np.isfinite(load)))[0])
        raise ValueError(
            f"load_DE[{source}, {expert}] is {load[source, expert]}: wanted a finite load of 0 or more"
        )
    return load
