"""Sparse materialization: which experts to replicate, and where (Hecate, Alg. 1).

Shape letters: E experts, D devices.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import heapify, heappop, heapreplace

import numpy as np

from megatron_fssdp.planning.arrays import checked_load
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology


def sparse_materialization(
    owner_E: np.ndarray, load_E: np.ndarray, topology: Topology, *, overlap_degree: int, slots: int
) -> ExpertPlacement:
    """Replicate the most loaded experts within the overlap degree and the free slots (Hecate, Alg. 1).

    Let t = min(overlap_degree, E) and m = min(slots, t).

    1. Take the t most loaded experts.
    2. If m == t, there is enough memory: all of them go to all devices.
    3. Otherwise share the D * m slots among them in proportion to load (see :func:`apportion_replicas`). Then
       place the replicas of each expert, the most loaded expert first. A node that lacks the expert comes
       before a node that has it, then the node with more free slots, then the device with more free slots,
       then the device with the lowest rank.

    The paper leaves some points open. We solve them as follows. Ties of load go to the lowest expert. An
    expert without load gets no replicas and no slots, so the result has no replicas if all loads are zero. If
    an expert cannot place all its replicas because no device without the expert has a free slot, the next
    experts get them. Slots that the last expert cannot use stay empty.

    Args:
        owner_E: Owner of every expert, integers ``[E]``.
        load_E: Load of every expert, ``[E]``, in any non-negative unit.
        topology: Nodes of the devices.
        overlap_degree: Most experts that may be replicated, t.
        slots: Most replicas that a device may hold, m.

    Returns:
        A placement with at most ``slots`` replicas on every device.

    Raises:
        ValueError: The loads do not match the owners, or a limit is negative.
    """
    placement = ExpertPlacement.owners_only(owner_E, topology.num_devices)
    load = checked_load(load_E, "load_E", (placement.num_experts,), "one load an expert")
    if overlap_degree < 0 or slots < 0:
        raise ValueError(
            f"overlap_degree is {overlap_degree} and slots is {slots}: wanted 0 or more of each; "
            "0 of either means no replicas"
        )
    num_top = min(overlap_degree, placement.num_experts)
    num_slots = min(slots, num_top)
    top = np.argsort(-load, kind="stable")[:num_top]
    top = top[load[top] > 0]
    present_ED = placement.present_ED.copy()
    if num_slots == num_top:
        present_ED[top] = True
    elif num_slots > 0:
        num_replicas = apportion_replicas(
            load[top].tolist(), topology.num_devices * num_slots, topology.num_devices - 1
        )
        owners = placement.owner_E.tolist()
        free = _FreeSlots(topology, num_slots)
        unplaced = 0
        for expert, wanted in zip(top.tolist(), num_replicas, strict=True):
            devices = free.take(owners[expert], min(wanted + unplaced, topology.num_devices - 1))
            unplaced += wanted - len(devices)
            present_ED[expert, devices] = True
    return ExpertPlacement(placement.owner_E, present_ED, slots=slots)


def apportion_replicas(loads: list[float], total: int, most: int) -> list[int]:
    """Share slots among experts in proportion to load (Hecate, Alg. 1, line 9).

    Fractions are rounded by the method of largest remainders. An expert whose share exceeds ``most`` gets
    ``most``. The rest is again shared among the next experts in proportion to load.

    Args:
        loads: Positive loads of the experts in descending order.
        total: Number of slots to share.
        most: Most replicas of one expert.

    Returns:
        Number of replicas of every expert, in the order of ``loads``.
    """
    load_left = [0.0] * (len(loads) + 1)
    for i in range(len(loads) - 1, -1, -1):
        load_left[i] = load_left[i + 1] + loads[i]
    num_capped = 0
    while num_capped < len(loads) and total * loads[num_capped] >= most * load_left[num_capped]:
        if total <= most:
            break
        total -= most
        num_capped += 1
    rest = loads[num_capped:]
    if not rest:
        return [most] * num_capped
    shares = [total * load / load_left[num_capped] for load in rest]
    numbers = [min(int(share), most) for share in shares]
    rounded_down = [number - share for number, share in zip(numbers, shares, strict=True)]
    order = sorted(range(len(rest)), key=rounded_down.__getitem__)
    left = total - sum(numbers)
    for i in order:
        if left <= 0:
            break
        if numbers[i] < most:
            numbers[i] += 1
            left -= 1
    return [most] * num_capped + numbers


class _FreeSlots:
    """The free replica slots of every node and device while one placement is being built.

    Attributes:
        _devices: For each node, (-free slots, device) of its devices that have a free slot, sorted.
        _nodes: For each node with a free slot, (-free slots of the node, -free slots, device) of its first
            device in ``_devices``, sorted.
    """

    def __init__(self, topology: Topology, slots_per_device: int) -> None:
        self._node_of = topology.node_of_device
        self._free = [slots_per_device] * topology.num_devices
        self._devices = [
            [(-slots_per_device, device) for device in devices] for devices in topology.devices_by_node
        ]
        self._node_free = [slots_per_device * len(devices) for devices in self._devices]
        self._nodes = sorted(
            (-free, *devices[0]) for free, devices in zip(self._node_free, self._devices, strict=True)
        )

    def take(self, owner: int, wanted: int) -> list[int]:
        """Take slots for one expert on distinct devices other than its owner, in the order of Alg. 1.

        Args:
            owner: Owner of the expert.
            wanted: Number of slots to take at most.

        Returns:
            The devices of the taken slots.
        """
        node_of = self._node_of
        owner_node = node_of[owner]
        taken: list[int] = []
        # At first only the owner's node has the expert. The first device of a node is its best one.
        for _, _, device in self._nodes:
            if len(taken) == wanted:
                break
            if node_of[device] != owner_node:
                taken.append(device)
        if len(taken) < wanted:
            taken += self._take_again(owner, taken, wanted - len(taken))
        for device in taken:
            self._claim(device)
        return taken

    def _take_again(self, owner: int, taken: list[int], wanted: int) -> list[int]:
        """More devices for one expert, after every node with a free slot has the expert.

        Args:
            owner: Owner of the expert.
            taken: Devices that already get the expert.
            wanted: Number of more devices at most.
        """
        first_on = {self._node_of[device]: device for device in taken}
        # While this expert is placed, the eligible devices of a node keep their order, because the expert
        # takes each of them at most once. Only the number of free slots of the node changes.
        eligible: list[Iterator[tuple[int, int]]] = []
        heap: list[tuple[int, int, int, int]] = []
        for node, devices in enumerate(self._devices):
            first = first_on.get(node, owner)
            candidates = iter([entry for entry in devices if entry[1] != first])
            eligible.append(candidates)
            best = next(candidates, None)
            if best is not None:
                heap.append(((node in first_on) - self._node_free[node], *best, node))
        heapify(heap)
        more: list[int] = []
        while heap and len(more) < wanted:
            node_key, _, device, node = heap[0]
            more.append(device)
            best = next(eligible[node], None)
            if best is None:
                heappop(heap)
            else:
                heapreplace(heap, (node_key + 1, *best, node))
        return more

    def _claim(self, device: int) -> None:
        """Take one slot of a device, and keep the sorted lists up to date."""
        node = self._node_of[device]
        devices, free = self._devices[node], self._free[device]
        del self._nodes[bisect_left(self._nodes, (-self._node_free[node], *devices[0]))]
        del devices[bisect_left(devices, (-free, device))]
        self._free[device] = free - 1
        self._node_free[node] -= 1
        if free > 1:
            insort(devices, (1 - free, device))
        if devices:
            insort(self._nodes, (-self._node_free[node], *devices[0]))
