"""Which device owns which expert, over all layers at once (Hecate, Alg. 2).

Shape letters: L MoE layers, E experts, D devices, N nodes, H selected experts of a layer.
"""

from collections.abc import Iterable
from heapq import heapify, heappop, heappush

import numpy as np

from megatron_fssdp.planning.loads.checked_loads import checked_load
from megatron_fssdp.planning.placement.owner_map import OwnerMap
from megatron_fssdp.planning.placement.topology import Topology


def heterogeneous_sharding(
    owners: OwnerMap, load_LE: np.ndarray, topology: Topology, *, overlap_degree: int
) -> OwnerMap:
    """New owners for all layers together: any number of a layer's experts a device, memory even.

    Hecate, Alg. 2. Every device keeps its L * E / D slots, shared by all layers.

    1. Each layer's t = ``overlap_degree`` most loaded experts are set aside: they will be
       replicated anyway.
    2. The others are placed layer by layer, in descending order of a layer's most loaded
       remaining expert; in a layer in descending load: each on the least loaded node that has
       a slot left, on it on the least loaded device that has one. Load is that of the experts
       of this layer placed so far; of equally loaded ones the one with fewer free slots.
    3. The experts that were set aside fill the slots left over. In descending load over all
       layers each stays with its present owner where a slot is free; what then has no place
       goes layer by layer where step 2 would put it.

    What the paper leaves open: nodes of different sizes are compared by load, and by free
    slots, a device. What is still equal goes to the present owner (its node, then the
    device), then to the lowest number; so a second run with the same loads moves nothing.
    On one node that rule changes no device load but for the numbers of the devices. Experts of
    equal load go in ascending order, and so do layers.

    Args:
        owners: The present map.
        load_LE: Load of every expert, ``[L, E]``, any non-negative unit.
        topology: Nodes of the devices.
        overlap_degree: Experts of a layer to set aside, t; with E or more nothing moves.

    Returns:
        The new map; an expert whose owner stays the same stays in its slot.
    """
    load = checked_load(
        load_LE, "load_LE", owners.device_LE.shape, "one load for every layer and expert of the owner map"
    )
    if owners.num_devices != topology.num_devices:
        raise ValueError(
            f"the owner map has {owners.num_devices} devices and the topology {topology.num_devices}: wanted "
            "the same devices in both"
        )
    if overlap_degree < 0:
        raise ValueError(f"overlap_degree is {overlap_degree}: wanted 0 or more experts a layer to set aside")
    order_LE = np.argsort(-load, axis=1, kind="stable")
    set_aside_LH, remaining_LH = order_LE[:, :overlap_degree], order_LE[:, overlap_degree:]
    shards = _Shards(owners, load, topology)
    for layer in _by_first_load(load, remaining_LH):
        shards.place(layer, remaining_LH[layer].tolist())
    moving = shards.keep(_by_load(load, set_aside_LH))
    for layer in _by_first_load(load, set_aside_LH):
        shards.place(layer, [expert for expert in set_aside_LH[layer].tolist() if (layer, expert) in moving])
    return owners.with_owners(np.array(shards.device_LE, dtype=np.int64).reshape(load.shape))


def _by_first_load(load_LE: np.ndarray, expert_LH: np.ndarray) -> list[int]:
    """Layers in descending order of their first listed expert's load; none if nothing is listed."""
    if not expert_LH.shape[1]:
        return []
    first_L = np.take_along_axis(load_LE, expert_LH[:, :1], axis=1)[:, 0]
    return np.argsort(-first_L, kind="stable").tolist()


def _by_load(load_LE: np.ndarray, expert_LH: np.ndarray) -> list[tuple[int, int]]:
    """The listed (layer, expert) pairs of all layers in descending load; ties by layer, then expert."""
    layers = np.repeat(np.arange(load_LE.shape[0]), expert_LH.shape[1])
    experts = expert_LH.reshape(-1)
    order = np.lexsort((experts, layers, -load_LE[layers, experts]))
    return list(zip(layers[order].tolist(), experts[order].tolist(), strict=True))


class _Shards:
    """Experts placed so far, free slots, and the load of every layer on every device.

    Plain lists and floats: every step touches one device and one node.
    """

    def __init__(self, owners: OwnerMap, load_LE: np.ndarray, topology: Topology) -> None:
        self.device_LE = np.full(load_LE.shape, -1).tolist()
        self._owner_LE = owners.device_LE.tolist()
        self._load_LE = load_LE.tolist()
        self._load_LD = np.zeros((owners.num_layers, owners.num_devices)).tolist()
        self._free_D = [owners.slots_per_device] * owners.num_devices
        self._devices_N = topology.devices_by_node
        self._node_D = topology.node_of_device

    def keep(self, experts: Iterable[tuple[int, int]]) -> set[tuple[int, int]]:
        """Lets experts stay with their present owners, as long as there are slots; returns the others."""
        without_slot = set()
        for layer, expert in experts:
            device = self._owner_LE[layer][expert]
            if self._free_D[device]:
                self._assign(layer, expert, device)
            else:
                without_slot.add((layer, expert))
        return without_slot

    def place(self, layer: int, experts: list[int]) -> None:
        """Steps 9 to 13 of Alg. 2: each expert of a layer to the least loaded node and device."""
        if not experts:
            return
        loads, free = self._load_LD[layer], self._free_D
        node_load = [sum([loads[device] for device in devices]) for devices in self._devices_N]
        node_free = [sum([free[device] for device in devices]) for devices in self._devices_N]
        sizes = [len(devices) for devices in self._devices_N]
        nodes = _LeastLoaded(
            (load / size, num_free / size, node)
            for node, (load, num_free, size) in enumerate(zip(node_load, node_free, sizes, strict=True))
        )
        devices_in = [
            _LeastLoaded((loads[device], free[device], device) for device in devices)
            for devices in self._devices_N
        ]
        for expert in experts:
            owner = self._owner_LE[layer][expert]
            node = nodes.least(self._node_D[owner])
            device = devices_in[node].least(owner)
            self._assign(layer, expert, device)
            node_load[node] += self._load_LE[layer][expert]
            node_free[node] -= 1
            devices_in[node].change(loads[device], free[device], device)
            nodes.change(node_load[node] / sizes[node], node_free[node] / sizes[node], node)

    def _assign(self, layer: int, expert: int, device: int) -> None:
        self.device_LE[layer][expert] = device
        self._load_LD[layer][device] += self._load_LE[layer][expert]
        self._free_D[device] -= 1


class _LeastLoaded:
    """Nodes or devices with a slot left, the least (load, free slots, number) first."""

    def __init__(self, entries: Iterable[tuple[float, float, int]]) -> None:
        self._heap = [entry for entry in entries if entry[1]]
        heapify(self._heap)
        self._current = {number: (load, free) for load, free, number in self._heap}

    def least(self, preferred: int) -> int:
        """The first one, but ``preferred`` if only the number tells the two apart."""
        heap, current = self._heap, self._current
        # Free slots only fall, so an entry that was overtaken never becomes valid again.
        while current.get(heap[0][2]) != heap[0][:2]:
            heappop(heap)
        load, free, first = heap[0]
        return preferred if current.get(preferred) == (load, free) else first

    def change(self, load: float, free: float, number: int) -> None:
        """Takes note of a new load and number of free slots."""
        if free:
            self._current[number] = (load, free)
            heappush(self._heap, (load, free, number))
        else:
            del self._current[number]
