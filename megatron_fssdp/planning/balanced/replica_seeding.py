"""A start for the search over replicas, built in one pass over the experts of overloaded devices.

This start is ours and goes beyond the papers. Hecate's Alg. 1 sets numbers of replicas by the loads of
experts alone. Here an expert gets as many holders as its owner needs to lower its load, and these holders are
devices that have room.

Shape letters: D devices.
"""

from bisect import bisect_left, insort
from heapq import heapify, heappop, heapreplace

from megatron_fssdp.planning.loads.even_dispatch_model import EvenDispatchModel
from megatron_fssdp.planning.placement.topology import Topology

OWNER_RATIO = 0.85
"""Part of the mean device load to which an overloaded owner lowers its load.

The rest of the mean is room for replicas of other owners' experts, which makes it easier to place them.
"""

FIT_RATIO = 1.03
"""Device load, divided by the mean device load, up to which a device is not overloaded.

An owner up to this load keeps all its tokens, and a replica fits on a device that stays within it. An expert
whose replica does not fit gets more holders.
"""


def seed_replicas(
    model: EvenDispatchModel,
    topology: Topology,
    *,
    slots: int,
    max_replicated: int,
    owner_ratio: float = OWNER_RATIO,
) -> list[int]:
    """Replicate the experts of overloaded devices.

    First, :func:`holders_wanted` finds how many holders the experts of every overloaded owner need. Then one
    pass places the experts in descending order of the load of one holder. Each goes to the least loaded
    devices that have a free slot. These devices are in different nodes. If there are more holders than nodes,
    each node gets equally many.

    Args:
        model: A model without replicas; changed in place.
        topology: Nodes of the devices.
        slots: Most replicas that a device may hold.
        max_replicated: Most experts that may have replicas. If there are more experts, only the most loaded
            ones may have them.
        owner_ratio: Part of the mean device load to which an overloaded owner lowers its load.

    Returns:
        The experts that need more than one holder. They have their replicas as far as there is room.
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
    """How many holders each expert needs so that its owner keeps only ``owner_ratio`` times the mean load.

    An owner whose load is above ``FIT_RATIO`` times the mean adds holders one at a time. It adds each to the
    expert for which one more holder lowers the owner's load most. With ``n`` holders and load ``F``, that is
    by ``F / n - F / (n + 1)``.

    Args:
        model: A model without replicas.
        num_slots: Slots of all devices together.
        max_replicated: Most experts that may have replicas.
        owner_ratio: Part of the mean device load to which an overloaded owner lowers its load.

    Returns:
        Number of holders of each expert that needs more than one: expert -> number.
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
        # Entries are (minus the decrease by one more holder, expert, number of holders).
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
    """The devices, ordered by planned load: their load after every owner has given away what it plans to.

    The planned load counts instead of the present one. So an owner's future room can be used for other
    owners' experts before its own experts are placed.

    Attributes:
        _planned: Planned load of every device, ``[D]``.
        _rising: (planned load, device) of every device that had a free slot at the last check, sorted.
        _to_give: For each expert that gets replicas, the load that its owner plans to give away.
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
        """Take the least loaded devices with a free slot for an expert's replicas.

        There is one device for each wanted holder besides the owner.
        More devices are taken while the load of the last one is too high and another holder would lower it,
        because each holder's share becomes smaller when there are more holders.
        """
        model, rising, slots = self._model, self._rising, self._slots
        node_of, replicas = model.node_of, model.replicas
        owner, total, count = model.owners[expert], model.total[expert], self._wanted[expert]
        most_in_node = -(-count // self._num_nodes)
        may_grow = True
        if self._num_nodes == 1:
            most_in_node = len(model.loads)
        elif most_in_node > 1:
            # A node with a holder divides its own load among its own holders, so all nodes get equally many.
            count, may_grow = most_in_node * self._num_nodes, False
        holders_in = {node_of[owner]: 1}
        taken: list[int] = []
        gone: list[int] = []
        num_after = 2
        highest = 0.0  # Load of the last device taken, which is the highest one.
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
                continue  # The device is full. It stays full, because this pass never removes a replica.
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
        """Update the planned loads after an expert has been placed.

        Args:
            expert: The expert.
            taken: Devices of its replicas, as :meth:`take` returned them.
        """
        loads, planned, owner = self._model.loads, self._planned, self._model.owners[expert]
        rising = self._rising
        for device, before in zip(taken, self._before, strict=True):
            planned[device] += loads[device] - before
            insort(rising, (planned[device], device))
        change = loads[owner] - self._owner_before + self._to_give[expert]
        at = bisect_left(rising, (planned[owner], owner))
        planned[owner] += change
        if at < len(rising) and rising[at][1] == owner:  # Otherwise the owner had no free slot.
            del rising[at]
            insort(rising, (planned[owner], owner))
