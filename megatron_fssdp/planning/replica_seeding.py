"""A start for the search over replicas, built in one pass over the overloaded devices' experts.

Ours, beyond the papers: Alg. 1 counts replicas by load alone. Here an expert gets as many
holders as its owner needs to have room, and they go where room is. Shape letters: E experts, D devices,
N nodes.
"""

from heapq import heapify, heappop, heappush, heapreplace

from megatron_fssdp.planning.even_dispatch_model import EvenDispatchModel
from megatron_fssdp.planning.topology import Topology

OWNER_RATIO = 0.85
"""Part of the mean device load down to which an overloaded owner shares out its experts; the
rest is room for replicas of the others' experts, which makes the packing easier."""

FIT_RATIO = 1.03
"""Load over mean device load up to which a replica fits; an expert that does not fit gets more holders."""


def seed_replicas(
    model: EvenDispatchModel,
    topology: Topology,
    *,
    slots: int,
    max_replicated: int,
    owner_ratio: float = OWNER_RATIO,
) -> None:
    """Replicates the experts of overloaded devices; ``model`` has owners only before.

    First every overloaded owner says how many holders its experts need (:func:`holders_wanted`). Knowing
    that, one pass places the experts by descending share of a holder, each on the least loaded
    devices with a free slot: first in nodes without the expert, then evenly over the nodes.

    Args:
        model: The owners-only model; changed in place.
        topology: Nodes of the devices.
        slots: Most replicas a device may hold.
        max_replicated: Most experts with replicas; where it binds, the most loaded ones.
        owner_ratio: Part of the mean device load that an overloaded owner keeps.
    """
    wanted = holders_wanted(
        model, num_slots=len(model.loads) * slots, max_replicated=max_replicated, owner_ratio=owner_ratio
    )
    if not wanted:
        return
    total, loads, owners = model.total, model.loads, model.owners
    # What an owner has still to give away is room already, so that nobody else's replica stays out for it.
    planned = loads.copy()
    for expert, count in wanted.items():
        planned[owners[expert]] -= total[expert] - total[expert] / count
    heap = [(load, device) for device, load in enumerate(planned)]
    heapify(heap)
    for _, expert in sorted([(-total[expert] / count, expert) for expert, count in wanted.items()]):
        owner, count = owners[expert], wanted[expert]
        devices = _least_loaded(model, topology, heap, planned, expert, count, slots)
        before = [loads[device] for device in devices]
        owner_load = planned[owner] - loads[owner] + total[expert] - total[expert] / count
        if devices:
            model.spread(expert, devices)
        owner_load += loads[owner]
        # Every device keeps one current entry: those of ``devices`` were taken out, the owner's was not.
        for device, load in zip(devices, before, strict=True):
            planned[device] += loads[device] - load
            heappush(heap, (planned[device], device))
        if owner_load != planned[owner]:
            planned[owner] = owner_load
            heappush(heap, (owner_load, owner))
    model.sort_loads()


def holders_wanted(
    model: EvenDispatchModel, *, num_slots: int, max_replicated: int, owner_ratio: float
) -> dict[int, int]:
    """How many holders an expert needs for its owner to keep ``owner_ratio`` of the mean load.

    An overloaded owner adds holders one at a time to the expert of its own from which
    one more takes most: with ``n`` holders and load ``F``, ``F / n - F / (n + 1)``.

    Returns:
        Number of holders by expert, for the experts that need more than one.
    """
    total, owned, num_devices = model.total, model.owned, len(model.loads)
    limit, fits = owner_ratio * model.mean, model.mean
    allowed: set[int] | None = None
    if max_replicated < len(total):
        allowed = set(sorted(range(len(total)), key=lambda expert: -total[expert])[:max_replicated])
    wanted: dict[int, int] = {}
    for load, device in reversed(model.ascending):
        if load <= fits or num_slots <= 0:
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


def _least_loaded(
    model: EvenDispatchModel,
    topology: Topology,
    heap: list[tuple[float, int]],
    planned: list[float],
    expert: int,
    count: int,
    slots: int,
) -> list[int]:
    """Takes the devices for an expert's replicas out of the heap of (planned load, device).

    Entries that are no longer current are dropped, and so are devices without a free slot:
    here nobody gets a slot back.
    """
    node_of, replicas, num_nodes = model.node_of, model.replicas, topology.num_nodes
    owner, total = model.owners[expert], model.total[expert]
    fits = FIT_RATIO * model.mean
    most_in_node = -(-count // num_nodes)
    may_grow = most_in_node == 1 or num_nodes == 1
    if num_nodes == 1:
        most_in_node = len(planned)
    elif most_in_node > 1:
        count = most_in_node * num_nodes  # equal numbers, for each node splits its load by itself
    holders_in = {node_of[owner]: 1}
    taken: list[int] = []
    passed: list[tuple[float, int]] = []
    highest = 0.0
    while heap:
        load, device = entry = heap[0]
        num_holders = len(taken) + 1
        if num_holders >= count and (
            not may_grow or highest <= fits or load + total / (num_holders + 1) >= highest
        ):
            break
        heappop(heap)
        if load != planned[device] or len(replicas[device]) >= slots:
            continue
        node = node_of[device]
        in_node = holders_in.get(node, 0)
        if device == owner or in_node >= most_in_node:
            passed.append(entry)
            continue
        holders_in[node] = in_node + 1
        taken.append(device)
        highest = load + total / (num_holders + 1)
    for entry in passed:
        heappush(heap, entry)
    return taken
