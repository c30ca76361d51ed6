"""A start for the search over replicas, built in one pass over the overloaded devices' experts.

Ours, beyond the papers: Hecate's Alg. 1 counts replicas by load alone. Here an expert gets as many
holders as its owner needs to have room, and they go where room is.

Shape letters: D devices.
"""

from bisect import bisect_left, insort
from heapq import heapify, heappop, heapreplace

from megatron_fssdp.planning.loads.even_dispatch_model import EvenDispatchModel
from megatron_fssdp.planning.placement.topology import Topology

OWNER_RATIO = 0.85
"""Part of the mean device load down to which an overloaded owner shares out its experts; the
rest is room for replicas of the others' experts, which makes the packing easier."""

FIT_RATIO = 1.03
"""Load over mean device load up to which an owner keeps all and a replica fits; an expert that
does not fit gets more holders."""


def seed_replicas(
    model: EvenDispatchModel,
    topology: Topology,
    *,
    slots: int,
    max_replicated: int,
    owner_ratio: float = OWNER_RATIO,
) -> list[int]:
    """Replicates the experts of overloaded devices; ``model`` has owners only before.

    First every overloaded owner says how many holders its experts need (:func:`holders_wanted`).
    Knowing that, one pass places the experts by descending share of a holder, each on the least
    loaded devices with a free slot: in different nodes, or equally many in each node where
    there are more holders than nodes.

    Args:
        model: The owners-only model; changed in place.
        topology: Nodes of the devices.
        slots: Most replicas a device may hold.
        max_replicated: Most experts with replicas; where it binds, the most loaded ones.
        owner_ratio: Part of the mean device load that an overloaded owner keeps.

    Returns:
        The experts that need more than one holder; they have them as far as there is room.
    """
    wanted = holders_wanted(
        model, num_slots=len(model.loads) * slots, max_replicated=max_replicated, owner_ratio=owner_ratio
    )
    total = model.total
    room = _Room(model, topology, wanted, slots)
    for _, expert in sorted([(-total[expert] / count, expert) for expert, count in wanted.items()]):
        devices = room.take(expert)
        if devices:
            model.spread(expert, devices)
        room.settle(expert, devices)
    model.sort_loads()
    return list(wanted)


def holders_wanted(
    model: EvenDispatchModel, *, num_slots: int, max_replicated: int, owner_ratio: float
) -> dict[int, int]:
    """How many holders an expert needs for its owner to keep ``owner_ratio`` of the mean load.

    An owner with more than ``FIT_RATIO`` of it adds holders one at a time to the expert of its own
    from which one more takes most: with ``n`` holders and load ``F``, ``F / n - F / (n + 1)``.

    Returns:
        Number of holders by expert, for the experts that need more than one.
    """
    total, owned, num_devices = model.total, model.owned, len(model.loads)
    limit, overloaded = owner_ratio * model.mean, FIT_RATIO * model.mean
    allowed: set[int] | None = None
    if max_replicated < len(total):
        allowed = set(sorted(range(len(total)), key=lambda expert: -total[expert])[:max_replicated])
    wanted: dict[int, int] = {}
    for load, device in reversed(model.ascending):
        if load <= overloaded or num_slots <= 0:
            break
        # (-relief of one more holder, expert, holders)
        reliefs = [(-total[e] / 2, e, 1) for e in owned[device] if allowed is None or e in allowed]
        heapify(reliefs)
        while load > limit and reliefs and num_slots > 0:
            relief, expert, count = reliefs[0]
            count += 1
            if count > num_devices or not relief:
                heappop(reliefs)
                continue
            load += relief
            num_slots -= 1
            wanted[expert] = count
            heapreplace(reliefs, (-total[expert] / (count * (count + 1)), expert, count))
    return wanted


class _Room:
    """The devices by what their load will be once every owner has given away what it plans to.

    The planned load counts, not the present one, so that an owner's room is there for the
    others' experts before its own are placed.

    Attributes:
        _planned: Planned load of every device, [D].
        _rising: (planned load, device) of every device that had a free slot when last looked at, sorted.
        _to_give: What the owner of an expert is to give away of it.
    """

    def __init__(
        self, model: EvenDispatchModel, topology: Topology, wanted: dict[int, int], slots: int
    ) -> None:
        self._model, self._wanted, self._slots = model, wanted, slots
        self._num_nodes = topology.num_nodes
        self._fits = FIT_RATIO * model.mean
        self._to_give = {e: model.total[e] - model.total[e] / count for e, count in wanted.items()}
        self._planned = model.loads.copy()
        for expert, load in self._to_give.items():
            self._planned[model.owners[expert]] -= load
        self._rising = sorted([(load, device) for device, load in enumerate(self._planned)])
        self._before: list[float] = []
        self._owner_before = 0.0

    def take(self, expert: int) -> list[int]:
        """Takes out the least loaded devices with a free slot for an expert's replicas, one a holder wanted.

        More are taken while the last one's load is above what fits and another holder lowers
        it, for each holder's share falls with their number.
        """
        model, rising, slots = self._model, self._rising, self._slots
        node_of, replicas = model.node_of, model.replicas
        owner, total, count = model.owners[expert], model.total[expert], self._wanted[expert]
        most_in_node = -(-count // self._num_nodes)
        may_grow = True
        if self._num_nodes == 1:
            most_in_node = len(model.loads)
        elif most_in_node > 1:
            # Equal numbers: once a node has a holder, it splits its load by itself.
            count, may_grow = most_in_node * self._num_nodes, False
        holders_in = {node_of[owner]: 1}
        taken: list[int] = []
        gone: list[int] = []
        num_after = 2
        highest = 0.0  # load of the last device taken, the highest
        for position, (load, device) in enumerate(rising):
            if num_after > count and (
                not may_grow or highest <= self._fits or load + total / num_after >= highest
            ):
                break
            node = node_of[device]
            in_node = holders_in.get(node, 0)
            if device == owner or in_node >= most_in_node:
                continue
            gone.append(position)
            if len(replicas[device]) >= slots:
                continue  # full for good: here nobody gets a slot back
            holders_in[node] = in_node + 1
            taken.append(device)
            highest = load + total / num_after
            num_after += 1
        for position in reversed(gone):
            del rising[position]
        self._before = [model.loads[device] for device in taken]
        self._owner_before = model.loads[owner]
        return taken

    def settle(self, expert: int, taken: list[int]) -> None:
        """Brings the planned loads up to date after the expert went to the devices taken for it."""
        loads, planned, owner = self._model.loads, self._planned, self._model.owners[expert]
        rising = self._rising
        for device, before in zip(taken, self._before, strict=True):
            planned[device] += loads[device] - before
            insort(rising, (planned[device], device))
        change = loads[owner] - self._owner_before + self._to_give[expert]
        at = bisect_left(rising, (planned[owner], owner))
        planned[owner] += change
        if at < len(rising) and rising[at][1] == owner:  # else it had no free slot
            del rising[at]
            insort(rising, (planned[owner], owner))
