"""Heterogeneous sharding: owners of the experts of all layers, planned together (Hecate, Alg. 2).

Shape letters: L MoE layers, E experts, D devices, N nodes, H selected experts of a layer.
"""

from collections.abc import Iterable
from heapq import heapify, heappop, heappush

import numpy as np

from megatron_fssdp.planning.arrays import checked_load
from megatron_fssdp.planning.placement.owner_map import OwnerMap
from megatron_fssdp.planning.placement.topology import Topology


def heterogeneous_sharding(
    owners: OwnerMap, load_LE: np.ndarray, topology: Topology, *, overlap_degree: int
) -> OwnerMap:
    """Plan new owners for all layers together (Hecate, Alg. 2).

    A device may own any number of one layer's experts. Every device keeps its L * E / D slots, which all
    layers share, so memory stays even.

    1. The t = ``overlap_degree`` most loaded experts of each layer are set aside, because they will be
    replicated
       anyway.
    2. The other experts are placed layer by layer. Layers are ordered by the load of their most loaded
    remaining
       expert, the highest first. Within a layer, experts are placed in descending load. Each goes to the
       least loaded node that has a free slot, and there to the least loaded device that has one. The load is
       that of the experts of this layer that have been placed so far. Among equally loaded nodes or devices,
       the one with fewer free slots comes first.
    3. The experts that were set aside fill the remaining slots. In descending load over all layers, each
    stays
       with its present owner if that has a free slot. The others are then placed layer by layer as in step 2.

    The paper leaves some points open. We solve them as follows. Nodes of different sizes are compared by load
    for each device and by free slots for each device. Remaining ties go to the present owner (its node, then
    the device), then to the lowest number. So a second run with the same loads moves nothing. On one node
    this rule changes only which device has which load, not the loads themselves. Experts of equal load, and
    layers of equal load, are handled in ascending order.

    Args:
        owners: The present owner map.
        load_LE: Load of every expert of every layer, ``[L, E]``, in any non-negative unit.
        topology: Nodes of the devices.
        overlap_degree: Number of experts of each layer to set aside, t. With E or more, no expert moves.

    Returns:
        The new owner map. An expert whose owner stays the same stays in its slot.

    Raises:
        ValueError: The loads or the topology do not match the owner map, or ``overlap_degree`` is negative.
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
        raise ValueError(
            f"overlap_degree is {overlap_degree}: wanted to set aside 0 or more experts of a layer"
        )
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
    """The layers in descending order of the load of their first listed expert; empty if no expert is listed.

    Args:
        load_LE: Load of every expert, float64 ``[L, E]``.
        expert_LH: Listed experts of every layer, int64 ``[L, H]``.
    """
    if not expert_LH.shape[1]:
        return []
    first_L = np.take_along_axis(load_LE, expert_LH[:, :1], axis=1)[:, 0]
    return np.argsort(-first_L, kind="stable").tolist()


def _by_load(load_LE: np.ndarray, expert_LH: np.ndarray) -> list[tuple[int, int]]:
    """The listed experts of all layers as (layer, expert), in descending load; ties by layer, then expert.

    Args:
        load_LE: Load of every expert, float64 ``[L, E]``.
        expert_LH: Listed experts of every layer, int64 ``[L, H]``.
    """
    layers = np.repeat(np.arange(load_LE.shape[0]), expert_LH.shape[1])
    experts = expert_LH.reshape(-1)
    order = np.lexsort((experts, layers, -load_LE[layers, experts]))
    return list(zip(layers[order].tolist(), experts[order].tolist(), strict=True))


class _Shards:
    """The experts placed so far, the free slots of every device, and the load of every layer on every device.

    The class uses plain lists and floats, because every step touches only one device and one node.

    Attributes:
        device_LE: New owner of every expert, or -1 before it is placed; nested lists ``[L, E]``.
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
        """Let experts stay with their present owners as long as these have free slots.

        Args:
            experts: (layer, expert) pairs in the order in which they get slots.

        Returns:
            The (layer, expert) pairs that did not get a slot.
        """
        without_slot = set()
        for layer, expert in experts:
            device = self._owner_LE[layer][expert]
            if self._free_D[device]:
                self._assign(layer, expert, device)
            else:
                without_slot.add((layer, expert))
        return without_slot

    def place(self, layer: int, experts: list[int]) -> None:
        """Place experts of one layer, each on the least loaded node and device (Alg. 2, lines 9 to 13).

        Args:
            layer: The layer.
            experts: Experts of the layer in the order in which they are placed.
        """
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
        """Give an expert of a layer a slot on a device."""
        self.device_LE[layer][expert] = device
        self._load_LD[layer][device] += self._load_LE[layer][expert]
        self._free_D[device] -= 1


class _LeastLoaded:
    """A queue of the nodes or devices that have a free slot, the lowest (load, free slots, number) first.

    Args:
        entries: (load, free slots, number) of every node or device.
    """

    def __init__(self, entries: Iterable[tuple[float, float, int]]) -> None:
        self._heap = [entry for entry in entries if entry[1]]
        heapify(self._heap)
        self._current = {number: (load, free) for load, free, number in self._heap}

    def least(self, preferred: int) -> int:
        """Number of the first node or device; ``preferred`` if it has the same load and free slots."""
        heap, current = self._heap, self._current
        # Free slots only become fewer, so an outdated entry of the heap never becomes valid again.
        while current.get(heap[0][2]) != heap[0][:2]:
            heappop(heap)
        load, free, first = heap[0]
        return preferred if current.get(preferred) == (load, free) else first

    def change(self, load: float, free: float, number: int) -> None:
        """Update the load and the number of free slots of one node or device."""
        if free:
            self._current[number] = (load, free)
            heappush(self._heap, (load, free, number))
        else:
            del self._current[number]
