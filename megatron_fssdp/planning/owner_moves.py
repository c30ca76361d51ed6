"""When owners are reconsidered, and which moves pay (ours; Hecate, §4.3, has a fixed interval).

Shape letters: L MoE layers, E experts.
"""

from collections import defaultdict
from collections.abc import Callable, Collection

import numpy as np

from megatron_fssdp.planning.placement.owner_map import OwnerMap


class ReshardClock:
    """Says at which iterations owners are reconsidered, and how long new owners will probably last.

    Loads are assumed to stay as long again as the time since owners last moved. So the intervals double while
    nothing moves, up to a longest one, and begin again after a move. In less than the shortest one, the loads
    are hardly known.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest = self._interval = min(shortest, longest)
        self._longest = longest
        self._moved_at: int | None = None
        self._next = self._now = 0

    def is_due(self, iteration: int) -> bool:
        """Whether owners are reconsidered after so many iterations; the first number asked is the start."""
        if self._moved_at is None:
            self._moved_at, self._next = iteration, iteration + self._interval
        self._now = iteration
        return iteration >= self._next

    @property
    def lasting_iterations(self) -> int:
        """Number of iterations for which new owners will probably last."""
        return max(self._now - (self._moved_at or 0), self._shortest)

    def reconsidered(self, *, moved: bool) -> None:
        """Set the next interval, after owners moved or stayed."""
        if moved:
            self._moved_at = self._now
        self._interval = self._shortest if moved else min(2 * self._interval, self._longest)
        self._next = self._now + self._interval


def paying_owners(
    old: OwnerMap,
    new: OwnerMap,
    *,
    layer_s: Callable[[int, np.ndarray], float],
    moving_s: Callable[[OwnerMap], float],
    num_iterations: int,
) -> OwnerMap:
    """New owners, a part of them, or the present ones: whichever saves most seconds after the move is paid.

    A part is what remains of the new owners if only layers that become faster take part. ``layer_s`` gives
    modelled seconds of a layer's index with owners ``[E]``, and ``moving_s`` those of all moves.
    """
    changed = np.flatnonzero((old.device_LE != new.device_LE).any(axis=1)).tolist()
    before_s = {layer: layer_s(layer, old.device_LE[layer]) for layer in changed}
    saved_s = {layer: before_s[layer] - layer_s(layer, new.device_LE[layer]) for layer in changed}
    part = closed_part(old, new, [layer for layer in changed if saved_s[layer] > 0])

    def net_s(owners: OwnerMap) -> float:
        total_s = 0.0
        for layer in np.flatnonzero((owners.device_LE != old.device_LE).any(axis=1)).tolist():
            owner_E = owners.device_LE[layer]
            is_new = np.array_equal(owner_E, new.device_LE[layer])
            total_s += saved_s[layer] if is_new else before_s[layer] - layer_s(layer, owner_E)
        return num_iterations * total_s - (moving_s(owners) if old.moves_to(owners) else 0.0)

    return max((old, new, part), key=net_s)


def closed_part(old: OwnerMap, new: OwnerMap, layers: Collection[int]) -> OwnerMap:
    """As many moves of some layers as leave every device as many experts as it has.

    Devices have a fixed number of slots for all layers. So moves must form circles: from a device to a second
    one, from there to a third, and so on back to the first.
    """
    leaving: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for layer in layers:
        for expert in np.flatnonzero(old.device_LE[layer] != new.device_LE[layer]).tolist():
            leaving[int(old.device_LE[layer, expert])].append((layer, expert))
    device_LE = old.device_LE.copy()
    for start in sorted(leaving):
        path: list[tuple[int, int]] = []  # Moves so far, each from the device at which the one before ends.
        device = start
        while path or leaving[device]:
            if not leaving[device]:
                path.pop()  # No circle goes through this device, so the move that led here is given up.
                device = int(new.device_LE[path[-1]]) if path else start
                continue
            path.append(leaving[device].pop())
            device = int(new.device_LE[path[-1]])
            begins = [i for i, place in enumerate(path) if old.device_LE[place] == device]
            if begins:
                for place in path[begins[0] :]:
                    device_LE[place] = new.device_LE[place]
                del path[begins[0] :]
    return old.with_owners(device_LE)
