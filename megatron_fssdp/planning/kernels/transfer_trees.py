# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
# cython: infer_types=True, annotation_typing=False
"""The trees along which experts travel from their owners to their replicas."""

import numpy as np

from megatron_fssdp.planning.arrays import zero_ints
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology


class TransferTrees:
    """The two-level trees along which experts travel to replicas; ``transfer_plan.py`` has the rule.

    Every device has its place in its node, ``place_D``. From the place
    ``start_E`` on, the leaders of an expert in other nodes are sought. ``has_ED`` is 1 where a device has an
    expert. ``line_D`` has the holders of one expert in one node, in the order in which they get it.
    """

    def __init__(self, placement: ExpertPlacement, topology: Topology) -> None:
        self.owner_E = memoryview(placement.owner_E)
        self.node_D, self.member_D, self.first_N = map(memoryview, topology.arrays)
        self.num_experts, self.num_devices = placement.num_experts, placement.num_devices
        self.num_nodes = len(self.first_N) - 1
        self.place_D, self.line_D = zero_ints(self.num_devices), zero_ints(self.num_devices)
        self.start_E = zero_ints(self.num_experts)
        self.has_ED = memoryview(np.array(placement.present_ED, np.uint8))
        owned_D = zero_ints(self.num_devices)
        for node in range(self.num_nodes):
            for i in range(self.first_N[node], self.first_N[node + 1]):
                self.place_D[self.member_D[i]] = i - self.first_N[node]
        for expert in range(self.num_experts):
            owner = self.owner_E[expert]
            self.has_ED[expert, owner] = 1
            self.start_E[expert] = self.place_D[owner] + owned_D[owner]
            owned_D[owner] += 1

    def leader_at(self, expert: int, node: int) -> int:
        """Position in ``member_D`` from which on the holders of an expert in a node are lined up."""
        owner = self.owner_E[expert]
        place = self.place_D[owner] if self.node_D[owner] == node else self.start_E[expert]
        first = self.first_N[node]
        return first + place % (self.first_N[node + 1] - first)

    def line_up(self, expert: int, node: int) -> int:
        """Write the holders of an expert in a node to ``line_D``, the leader first; return their number."""
        first = self.first_N[node]
        end = self.first_N[node + 1]
        at = self.leader_at(expert, node)
        num = 0
        for _ in range(end - first):
            if self.has_ED[expert, self.member_D[at]]:
                self.line_D[num] = self.member_D[at]
                num += 1
            at = at + 1 if at + 1 < end else first
        return num

    def write_edges(self, edges: memoryview) -> None:
        """Write a row for each edge: expert, source, destination and depth, int64 ``[P, 4]``.

        The depth is twice the number of hops before the edge, plus 1 inside a node.
        """
        row = 0
        for expert in range(self.num_experts):
            leader = self.owner_E[expert]
            node = self.node_D[leader]
            hops = 0
            for _ in range(self.num_nodes):
                num = self.line_up(expert, node)
                node = node + 1 if node + 1 < self.num_nodes else 0
                if num == 0:
                    continue
                depth = hops - 1
                level_end = 1  # the first position whose depth is higher
                for i in range(num):
                    if i == level_end:
                        depth += 1
                        level_end = 2 * level_end + 1
                    if i > 0 or hops > 0:
                        edges[row, 0], edges[row, 2] = expert, self.line_D[i]
                        edges[row, 1] = self.line_D[(i - 1) // 2] if i > 0 else leader
                        edges[row, 3] = 2 * depth + (i > 0)
                        row += 1
                leader = self.line_D[0]
                hops += 1


def count_edges(
    table: memoryview,
    node_D: memoryview,
    hops_ED: memoryview,
    of_device: memoryview,
    of_node: memoryview,
    results: memoryview,
) -> None:
    """Write what the edges of a transfer do to ``results``; a row comes after the edge to its source.

    That is, the most experts on a link inside a node, of a device and of a node between nodes; all experts
    between nodes; and the hops between nodes, and all hops, before the last one of the path with the most of
    them. The other arrays are 0: hops between nodes to each device, ``[E, D]``, and experts that it sends and
    gets in its node and between nodes, ``[4, D]``, of which nodes have the latter, ``[4, N]``.
    """
    for row in range(table.shape[0]):
        expert, source, device, hops = table[row, 0], table[row, 1], table[row, 2], table[row, 3]
        far_hops = hops_ED[expert, source]
        if far_hops > results[4] or (far_hops == results[4] and hops > results[5]):
            results[4], results[5] = far_hops, hops
        is_far = 1 if node_D[source] != node_D[device] else 0
        hops_ED[expert, device] = far_hops + is_far
        results[3] += is_far
        if source != device:
            of_device[2 * is_far, source] += 1
            of_device[2 * is_far + 1, device] += 1
            of_node[2 * is_far, node_D[source]] += 1
            of_node[2 * is_far + 1, node_D[device]] += 1
    for side in range(2):
        for device in range(of_device.shape[1]):
            results[0] = max(results[0], of_device[side, device])
            results[1] = max(results[1], of_device[2 + side, device])
        for node in range(of_node.shape[1]):
            results[2] = max(results[2], of_node[2 + side, node])
