"""Heterogeneous sharding: owners of the experts of all layers, planned together (Hecate, Alg. 2).

Shape letters: L MoE layers, E experts, D devices, N nodes, H selected experts of a layer.
"""

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
       replicated anyway.
    2. The other experts are placed layer by layer. Layers are ordered by the load of their most loaded
       remaining expert, the highest first. Within a layer, experts are placed in descending load. Each goes
       to the least loaded node that has a free slot, and there to the least loaded device that has one. The
       load is that of the experts of this layer that have been placed so far. Among equally loaded nodes or
       devices, the one with fewer free slots comes first.
    3. The experts that were set aside fill the remaining slots. In descending load over all layers, each
       stays with its present owner if that has a free slot. The others are then placed layer by layer as in
       step 2.

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
    shards.place(remaining_LH)
    layers, experts = np.repeat(np.arange(len(load)), set_aside_LH.shape[1]), set_aside_LH.reshape(-1)
    by_load = np.lexsort((experts, layers, -load[layers, experts]))
    for layer, expert in zip(layers[by_load].tolist(), experts[by_load].tolist(), strict=True):
        owner = shards.owner_LE[layer][expert]
        if shards.free_D[owner]:
            shards.assign(layer, expert, owner)
    shards.place(set_aside_LH)
    return owners.with_owners(np.array(shards.device_LE, dtype=np.int64).reshape(load.shape))


class _Shards:
    """The experts placed so far (-1: not yet), free slots, and the load of every layer on every device.

    These are plain lists and floats, because every step touches only one device and one node.
    """

    def __init__(self, owners: OwnerMap, load_LE: np.ndarray, topology: Topology) -> None:
        self.device_LE: list[list[int]] = np.full(load_LE.shape, -1).tolist()
        self.owner_LE: list[list[int]] = owners.device_LE.tolist()
        self.free_D = [owners.slots_per_device] * owners.num_devices
        self._load_LE: list[list[float]] = load_LE.tolist()
        self._load_LD = [[0.0] * owners.num_devices for _ in load_LE]
        self._topology = topology

    def assign(self, layer: int, expert: int, device: int) -> None:
        """Give an expert of a layer a slot on a device."""
        self.device_LE[layer][expert] = device
        self._load_LD[layer][device] += self._load_LE[layer][expert]
        self.free_D[device] -= 1

    def place(self, expert_LH: np.ndarray) -> None:
        """Place those of each layer's experts (in descending load) that have no slot yet (lines 9 to 13)."""
        if expert_LH.shape[1]:
            first_L = [self._load_LE[layer][expert] for layer, expert in enumerate(expert_LH[:, 0].tolist())]
            for layer in sorted(range(len(first_L)), key=lambda layer: -first_L[layer]):
                self._place_layer(layer, expert_LH[layer].tolist())

    def _place_layer(self, layer: int, experts: list[int]) -> None:
        """Place experts of one layer in the given order, each on the least loaded node and device."""
        load_D, free_D, members_N = self._load_LD[layer], self.free_D, self._topology.devices_by_node
        in_node = [_OpenPlaces() for _ in members_N]
        nodes = _OpenPlaces()
        node_load = [sum([load_D[device] for device in devices]) for devices in members_N]
        node_free = [sum([free_D[device] for device in devices]) for devices in members_N]
        for node, devices in enumerate(members_N):
            nodes.update_place(node, node_load[node] / len(devices), node_free[node] / len(devices))
            for device in devices:
                in_node[node].update_place(device, load_D[device], free_D[device])
        for expert in experts:
            if self.device_LE[layer][expert] >= 0:
                continue
            owner = self.owner_LE[layer][expert]
            node = nodes.least_loaded(self._topology.node_of_device[owner])
            device, size = in_node[node].least_loaded(owner), len(members_N[node])
            self.assign(layer, expert, device)
            node_load[node] += self._load_LE[layer][expert]
            node_free[node] -= 1
            in_node[node].update_place(device, load_D[device], free_D[device])
            nodes.update_place(node, node_load[node] / size, node_free[node] / size)


class _OpenPlaces(dict[int, tuple[float, float, int]]):
    """The nodes or devices that have a free slot: number -> (load, free slots, number)."""

    def update_place(self, number: int, load: float, free: float) -> None:
        """Set the load and the free slots of one place."""
        if free:
            self[number] = (load, free, number)
        else:
            self.pop(number, None)

    def least_loaded(self, preferred: int) -> int:
        """The first place by load, then free slots; ``preferred`` if it equals the first one in both."""
        first = min(self.values())
        return preferred if self.get(preferred, ())[:2] == first[:2] else first[2]
