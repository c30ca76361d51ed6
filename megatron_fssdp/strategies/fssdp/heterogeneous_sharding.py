"""Owners of the experts of all layers (Hecate, Alg. 2).

Shape letters: L MoE layers, E experts, D devices, N nodes, H selected experts of a layer.
"""

import numpy as np

from megatron_fssdp.planning.placement.owner_map import OwnerMap
from megatron_fssdp.planning.placement.topology import Topology


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
