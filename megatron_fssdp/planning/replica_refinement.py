"""Local search over replicas that only ever lowers the modelled maximum device load.

Ours, beyond the papers: Alg. 1 counts replicas without asking where their load lands, so it
can leave, or make, one device the straggler. Shape letters: E experts, D devices, N nodes.
"""

from dataclasses import dataclass

import numpy as np

from megatron_fssdp.planning.even_dispatch_model import EvenDispatchModel
from megatron_fssdp.planning.placement import ExpertPlacement
from megatron_fssdp.planning.sparse_materialization import sparse_materialization
from megatron_fssdp.planning.topology import Topology

BALANCED_RATIO = 1.01
"""Maximum over mean device load at which a layer counts as balanced; the search stops there."""

RESTART_RATIO = 1.05
"""Maximum over mean device load above which a second search starts from the owners alone."""

MIN_GAIN = 1e-3
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
    """Plans one layer: Hecate's Alg. 1, then :func:`refine_replicas`.

    Args:
        owner_E: Owner of every expert, integers [E].
        load_DE: Expected load by source and expert, [D, E].
        topology: Nodes of the devices.
        overlap_degree: Most experts that may be replicated, t.
        slots: Most replicas a device may hold, m.

    Returns:
        A placement whose modelled maximum device load is at most the owners-only one's.
    """
    load = _checked_load(load_DE, topology.num_devices, len(owner_E))
    placement = sparse_materialization(
        owner_E, load.sum(axis=0), topology, overlap_degree=overlap_degree, slots=slots
    )
    return refine_replicas(placement, load, topology, slots=slots, max_replicated=overlap_degree)


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

    The search starts from the input. Each move relieves the most loaded device: a new replica of one of
    its experts on a free slot, the same in exchange for a replica there, or the end of one of
    its own replicas. Of the moves tried (its experts by descending share; with many devices, until
    one lets the next device be the most loaded), the one whose most loaded affected device ends lowest is
    made; all must end below the present maximum, so it never rises and the search ends: when
    balanced, when nothing helps, or after ``max_moves``.

    A search that ends above ``RESTART_RATIO`` is repeated from the owners alone, if
    ``max_moves`` can fill all slots, and with few devices once more from the owners and the
    most loaded expert everywhere; the best result is returned.

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
    node_load_NE = topology.sum_over_nodes(load)
    mean = float(load.sum()) / topology.num_devices
    owners_only = ExpertPlacement.owners_only(placement.owner_E, topology.num_devices)
    load_E = load.sum(axis=0)
    owners_max = float(np.bincount(placement.owner_E, weights=load_E, minlength=topology.num_devices).max())
    starts = [placement, owners_only]
    if topology.num_devices <= NUM_CANDIDATES and slots > 0 and max_replicated > 0:
        hottest = int(load_E.argmax())
        starts.append(owners_only.with_replicas((hottest, d) for d in range(topology.num_devices)))
    best, best_max = placement, np.inf
    for start in starts:
        may_stop = best_max <= RESTART_RATIO * mean or topology.num_devices * slots > max_moves
        if may_stop and best_max <= owners_max:
            break
        model = EvenDispatchModel(start, load, node_load_NE, topology)
        num_moves = 0
        while num_moves < max_moves and model.most_loaded()[0] > BALANCED_RATIO * mean:
            move = _best_move(model, topology, slots, max_replicated, MIN_GAIN * mean)
            if move is None:
                break
            num_moves += 1
            for expert, device in move.ends:
                model.remove(expert, device)
            for expert, device in move.begins:
                model.add(expert, device)
        if model.most_loaded()[0] < best_max:
            best_max = model.most_loaded()[0]
            best = start
            if num_moves:
                best = ExpertPlacement(placement.owner_E, model.present_ED(), slots=slots)
    return best


@dataclass(frozen=True, slots=True)
class _Move:
    """Replicas, as (expert, device), that end and begin together."""

    ends: tuple[tuple[int, int], ...] = ()
    begins: tuple[tuple[int, int], ...] = ()


def _best_move(
    model: EvenDispatchModel, topology: Topology, slots: int, max_replicated: int, min_gain: float
) -> _Move | None:
    """The move after which the most loaded of the devices it affects is lowest."""
    loads, node_of, replicas, ascending = model.loads, model.node_of, model.replicas, model.ascending
    highest, device = model.most_loaded()
    best = highest - min_gain  # a move must leave every device it affects below this
    move: _Move | None = None
    node = node_of[device]
    num_devices = len(loads)
    candidates = ascending[:NUM_CANDIDATES]
    if num_devices > NUM_CANDIDATES:
        here_first = sorted([(loads[other], other) for other in topology.devices_by_node[node]])
        candidates += [entry for entry in here_first[:NUM_NODE_CANDIDATES] if entry not in candidates]
    targets = [
        (target, load, node_of[target], len(replicas[target]) < slots)
        for load, target in candidates
        if target != device
    ]
    endings_on: dict[int, list[tuple[int, float, float, float]]] = {}
    may_widen = model.num_replicated < max_replicated

    # Below the next device's load a move lowers the maximum no further; few devices are searched fully.
    enough = ascending[-2][0] if num_devices > NUM_CANDIDATES else -1.0
    for expert in sorted(model.owned[device] + replicas[device], key=lambda e: -model.share_on(e, device)):
        if move is not None and best <= enough:
            break
        shares = model.shares(expert)
        near_here, far = shares.near[node], shares.far
        if highest - near_here - far >= best:
            continue  # what the device routes to the expert itself stays
        own, near, unserved = shares.own, shares.near, shares.unserved
        holders, holders_in, node_load = shares.holders, shares.holders_in, shares.node_load
        num_after = len(holders) + 1
        is_new = num_after == 2
        for target, target_load, target_node, has_free_slot in targets:
            if target in holders:
                continue
            if target_node in holders_in:
                far_after = unserved / num_after
                count = holders_in[target_node]
                near_after = (near[target_node] * count - own[target]) / (count + 1)
                here = highest - far + far_after
                if target_node == node:
                    here += near_after - near_here
                there = target_load + own[target] + near_after + far_after
            else:
                far_after = (unserved - node_load[target_node]) / num_after
                here = highest - far + far_after
                there = target_load + node_load[target_node] + far_after
            if here >= best:
                continue
            if has_free_slot:
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

    for replica in replicas[device]:
        _, share, worst, _ = _ending(model, replica, device, device)
        worst = max(worst, highest - share)
        if worst < best:
            best = worst
            move = _Move(ends=((replica, device),))
    return move


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
