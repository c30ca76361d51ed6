"""The algorithms of Hecate: replicas (Alg. 1, §4.2), and owners of all layers together (Alg. 2, §4.3).

Shape letters: L MoE layers, E experts, D devices, N nodes, H selected experts of a layer.
"""

import numpy as np

from megatron_fssdp.planning.arrays import doubling
from megatron_fssdp.planning.placement.owner_map import OwnerMap
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology


def sparse_materialization(
    owner_E: np.ndarray, load_E: np.ndarray, topology: Topology, *, overlap_degree: int, slots: int
) -> ExpertPlacement:
    """Replicate the most loaded experts within the overlap degree and the free slots (Hecate, Alg. 1).

    At most t = ``overlap_degree`` experts get replicas, and a device holds at most m = min(``slots``, t).

    1. Take the t most loaded experts.
    2. If m == t, there is enough memory: all of them go to all devices.
    3. Otherwise share the D * m slots among them in proportion to load (:func:`apportion_replicas`). Then
       place the replicas of each expert, the most loaded expert first. A node that lacks the expert comes
       before a node that has it, then the node with more free slots, then the device with more, then the
       lowest rank.

    The paper leaves some points open. Ties of load go to the lowest expert. An expert without load gets no
    replicas and no slots. If an expert cannot place all its replicas because no device without it has a free
    slot, the next experts get them. Slots that the last expert cannot use stay empty.
    """
    placement = ExpertPlacement.owners_only(owner_E, topology.num_devices)
    load = np.asarray(load_E)
    num_top = min(overlap_degree, placement.num_experts)
    num_slots, num_devices = min(slots, num_top), topology.num_devices
    top = np.argsort(-load, kind="stable")[:num_top]
    top = top[load[top] > 0]
    present_ED = placement.present_ED.copy()
    if num_slots == num_top:
        present_ED[top] = True
    elif num_slots > 0:
        numbers = apportion_replicas(load[top].tolist(), num_devices * num_slots, num_devices - 1)
        free_D, unplaced = np.full(num_devices, num_slots), 0
        for expert, number in zip(top.tolist(), numbers, strict=True):
            wanted = min(number + unplaced, num_devices - 1)
            devices = _best_devices(int(placement.owner_E[expert]), free_D, topology)[:wanted]
            free_D[devices] -= 1
            unplaced += number - len(devices)
            present_ED[expert, devices] = True
    return ExpertPlacement(placement.owner_E, present_ED)


def apportion_replicas(loads: list[float], total: int, most: int) -> list[int]:
    """Share ``total`` slots among experts in proportion to load (Hecate, Alg. 1, line 9).

    Loads are positive and descending. Fractions are rounded by the method of largest remainders. An expert
    whose share exceeds ``most`` gets ``most``, and the next ones share the rest in proportion to load.
    """
    load_left = np.cumsum(loads[::-1])[::-1].tolist()
    num_capped = 0
    while num_capped < len(loads) and total * loads[num_capped] >= most * load_left[num_capped]:
        if total <= most:
            break
        total -= most
        num_capped += 1
    shares = [total * load / load_left[num_capped] for load in loads[num_capped:]]
    numbers = [min(int(share), most) for share in shares]
    left = total - sum(numbers)
    for i in sorted(range(len(shares)), key=lambda i: numbers[i] - shares[i]):
        if left > 0 and numbers[i] < most:
            numbers[i] += 1
            left -= 1
    return [most] * num_capped + numbers


def _best_devices(owner: int, free_D: np.ndarray, topology: Topology) -> np.ndarray:
    """The devices with a free slot other than an expert's owner, in the order in which Alg. 1 takes them.

    Taking a device gives its node the expert and one free slot less. In a node, devices are taken in a fixed
    order, so the key of the i-th one is known beforehand, and all of them can be sorted at once.
    """
    node_D = topology.node_of_device_D
    node_free_N = np.bincount(node_D, weights=free_D).astype(np.int64)
    can_D = free_D > 0
    can_D[owner] = False
    devices = np.flatnonzero(can_D)
    devices = devices[np.lexsort((-free_D[devices], node_D[devices]))]
    nodes = node_D[devices]
    taken_before = np.arange(len(nodes)) - np.searchsorted(nodes, nodes)
    has_expert = (nodes == node_D[owner]) | (taken_before > 0)
    order = np.lexsort((devices, -free_D[devices], taken_before - node_free_N[nodes], has_expert))
    return devices[order]


def calibration_candidates(
    planned: ExpertPlacement, counts_DE: np.ndarray, topology: Topology, *, overlap_degree: int, slots: int
) -> list[ExpertPlacement]:
    """Placements with more replicas, for the gate's exact counts (calibration, Hecate, §4.2).

    Alg. 1 runs again with the exact counts ``[D, E]`` and the same limits, so at most t more experts get
    replicas. Those that ``planned`` lacks go into the free slots, the most loaded experts first. Replicas
    that are there stay, because their transfer is already paid. The candidates have the additions of the most
    loaded 1, 2, 4, ... experts and of all: one expert's may pay off when those of all do not.
    """
    load_E = counts_DE.sum(axis=0)
    wanted = sparse_materialization(
        planned.owner_E, load_E, topology, overlap_degree=overlap_degree, slots=slots
    )
    missing_ED = wanted.present_ED & ~planned.present_ED
    left_D = slots - planned.replicas_per_device_D
    present_ED, candidates = planned.present_ED.copy(), []
    for expert in np.argsort(-load_E, kind="stable").tolist():
        devices = np.flatnonzero(missing_ED[expert] & (left_D > 0))
        if devices.size:
            left_D[devices] -= 1
            present_ED[expert, devices] = True
            candidates.append(ExpertPlacement(planned.owner_E, present_ED))
    return [candidates[number - 1] for number in doubling(len(candidates))]


def heterogeneous_sharding(
    owners: OwnerMap, load_LE: np.ndarray, topology: Topology, *, overlap_degree: int
) -> OwnerMap:
    """Plan new owners for all layers together (Hecate, Alg. 2).

    A device may own any number of one layer's experts. Every device keeps its L * E / D slots, which all
    layers share, so memory stays even.

    1. The t = ``overlap_degree`` most loaded experts of each layer are set aside, because they will be
       replicated anyway. With t of E or more, no expert moves.
    2. The other experts are placed layer by layer, the layer with the most loaded remaining expert first, and
       in it by load, descending. Each goes to the least loaded node that has a free slot, and there to the
       least loaded device that has one. The load is that of this layer's experts that have been placed so
       far. Among equals, the one with fewer free slots comes first.
    3. The experts that were set aside fill the remaining slots. In descending load over all layers, each
       stays with its present owner if that has a free slot. The others are then placed as in step 2.

    The paper leaves some points open. Nodes of different sizes are compared by load and free slots for each
    device. Remaining ties go to the present owner (its node, then the device), then to the lowest number, so
    a second run with the same loads moves nothing. On one node this rule changes only which device has which
    load.
    """
    load = np.asarray(load_LE)
    node_D, size_N = topology.node_of_device_D, np.bincount(topology.node_of_device_D)
    device_LE = np.full(load.shape, -1)
    load_LD = np.zeros((len(load), topology.num_devices))
    free_D = np.full(topology.num_devices, owners.slots_per_device)

    def assign(layer: int, expert: int, device: int) -> None:
        device_LE[layer, expert] = device
        load_LD[layer, device] += load[layer, expert]
        free_D[device] -= 1

    def place(expert_LH: np.ndarray) -> None:
        """Place those of each layer's experts (in descending load) that have no slot yet (lines 9 to 13)."""
        first_L = np.take_along_axis(load, expert_LH[:, :1], axis=1).reshape(-1)
        for layer in np.argsort(-first_L, kind="stable").tolist():
            for expert in expert_LH[layer][device_LE[layer, expert_LH[layer]] < 0].tolist():
                owner = owners.device_LE[layer, expert]
                load_N, free_N = (np.bincount(node_D, of_D) / size_N for of_D in (load_LD[layer], free_D))
                node = _least_loaded(load_N, free_N, node_D[owner] == np.arange(len(size_N)))
                here = np.flatnonzero(node_D == node)
                assign(layer, expert, here[_least_loaded(load_LD[layer, here], free_D[here], here == owner)])

    order_LE = np.argsort(-load, axis=1, kind="stable")
    set_aside_LH = order_LE[:, :overlap_degree]
    place(order_LE[:, overlap_degree:])
    layers, experts = np.repeat(np.arange(len(load)), set_aside_LH.shape[1]), set_aside_LH.reshape(-1)
    by_load = np.lexsort((experts, layers, -load[layers, experts]))
    for layer, expert in zip(layers[by_load].tolist(), experts[by_load].tolist(), strict=True):
        owner = owners.device_LE[layer, expert]
        if free_D[owner]:
            assign(layer, expert, owner)
    place(set_aside_LH)
    return owners.with_owners(device_LE)


def _least_loaded(load: np.ndarray, free: np.ndarray, is_present: np.ndarray) -> int:
    """The place with a free slot that comes first by load, free slots, present owner, and number."""
    return int(np.lexsort((~is_present, free, load, free == 0))[0])
