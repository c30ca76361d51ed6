"""Local search over replicas. It never raises the modelled maximum device load.

This search is ours and goes beyond the papers. Hecate's Alg. 1 sets numbers of replicas without looking at
which devices get their load, so one device may be, or become, much slower than the others.
"""

from dataclasses import dataclass

from megatron_fssdp.planning.loads.even_dispatch_model import EvenDispatchModel
from megatron_fssdp.planning.loads.layer_demand import LayerDemand

BALANCED_RATIO = 1.01
"""The search stops when the maximum device load divided by its lower bound is at most this number.

The lower bound is usually the mean device load.
"""

ROUNDING = 1e-12
"""Relative difference up to which loads count as equal. Sums in another order differ by rounding."""

MIN_GAIN = 2e-3
"""Smallest decrease of the maximum device load that a move must bring, as a part of the mean device load."""

NUM_CANDIDATES = 8
"""Number of least loaded devices on which a new replica is tried."""

NUM_NODE_CANDIDATES = 4
"""Number of least loaded devices of the most loaded device's node that are tried in addition."""

DEFAULT_MAX_MOVES = 256
"""Most moves of one search."""


def search(model: EvenDispatchModel, layer: LayerDemand, max_moves: int) -> int:
    """Make the best move again and again, until loads are balanced, no move helps or ``max_moves`` are made.

    Each move lowers the load of the most loaded device in one of three ways:

    * It adds a replica of one of the device's experts in a free slot of another device.
    * It adds such a replica in place of another replica.
    * It removes one of the device's own replicas.

    The device's experts are tried in descending order of their load on it. With many devices, this ends at
    the first move after which another device is the most loaded one. Of the tried moves, the search makes the
    one after which the highest load of the affected devices is lowest. All affected devices must end below
    the present maximum, so the maximum never rises.

    Args:
        model: The placement and its device loads; changed in place.
        layer: Owners, loads and limits of the layer.
        max_moves: Most moves to make.

    Returns:
        Number of moves made.
    """
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
    """A move of the search.

    Attributes:
        ends: Replicas to remove, as (expert, device).
        begins: Replicas to add, as (expert, device).
    """

    ends: tuple[tuple[int, int], ...] = ()
    begins: tuple[tuple[int, int], ...] = ()


def _best_move(model: EvenDispatchModel, layer: LayerDemand, min_gain: float) -> _Move | None:
    """The move after which the highest load of the devices that it affects is lowest; None if no move helps.

    Args:
        model: The placement and its device loads.
        layer: Owners, loads and limits of the layer.
        min_gain: Smallest decrease of the maximum device load.
    """
    node_of, replicas, ascending, slots = model.node_of, model.replicas, model.ascending, layer.slots
    highest, device = ascending[-1]
    best = highest - min_gain  # Every device that a move affects must end below this load.
    move: _Move | None = None
    node = node_of[device]
    targets = _targets(model, layer)
    endings_on: dict[int, list[tuple[int, float, float, float]]] = {}
    may_widen = model.num_replicated < layer.max_replicated

    # If a move brings the device below the next most loaded one, no move lowers the maximum further. With
    # many devices the search stops there. With few devices it tries all moves.
    enough = ascending[-2][0] if len(ascending) > NUM_CANDIDATES else -1.0
    here_shares = [(model.share_on(e, device), e) for e in model.owned[device] + replicas[device]]
    here_shares.sort(reverse=True)
    for share_here, expert in here_shares:
        if highest - share_here >= best or (move is not None and best <= enough):
            break
        shares = model.shares(expert)
        near_here, far = shares.near[node], shares.far
        if highest - near_here - far >= best:
            continue  # The device's own tokens for the expert stay in any case.
        own, near, unserved = shares.own, shares.near, shares.unserved
        holders, holders_in, node_load = shares.holders, shares.holders_in, shares.node_load
        num_after = len(holders) + 1
        is_new = num_after == 2
        here_without_far = highest - far
        # Far share of each holder after a new replica in a node that has a holder already.
        far_if_served = unserved / num_after
        here_if_served = here_without_far + far_if_served
        for target_load, target in targets:
            if target in holders:
                continue
            target_node = node_of[target]
            if target_node in holders_in:
                here = here_if_served
                if target_node != node and here >= best:
                    continue
                count = holders_in[target_node]
                near_after = (near[target_node] * count - own[target]) / (count + 1)
                if target_node == node:
                    here += near_after - near_here
                there = target_load + own[target] + near_after + far_if_served
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
                        continue  # There would be one more replicated expert, which is not allowed.
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


def _targets(model: EvenDispatchModel, layer: LayerDemand) -> list[tuple[float, int]]:
    """The devices on which to try new replicas, as (load, device).

    They are the least loaded devices, and some devices of the most loaded device's node.
    """
    loads, ascending = model.loads, model.ascending
    device = ascending[-1][1]
    if len(loads) <= NUM_CANDIDATES:
        return ascending[:-1]
    targets = ascending[:NUM_CANDIDATES]
    last = targets[-1]
    members = layer.topology.devices_by_node[model.node_of[device]]
    for entry in sorted([(loads[other], other) for other in members])[:NUM_NODE_CANDIDATES]:
        if entry > last and entry[1] != device:  # Entries up to ``last`` are among the targets already.
            targets.append(entry)
    return targets


def _ending(
    model: EvenDispatchModel, expert: int, device: int, apart: int
) -> tuple[int, float, float, float]:
    """How loads change if a replica is removed.

    Args:
        model: The placement and its device loads.
        expert: Expert of the replica.
        device: Device of the replica.
        apart: A device whose load is reported separately.

    Returns:
        The expert, the load that ``device`` loses, the highest load afterwards among the expert's other
        holders without ``apart``, and the load that ``apart`` gains.
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
