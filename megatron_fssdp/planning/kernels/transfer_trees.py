"""Kernels of transfer plans: the edges of a two-level transfer, their check, and their traffic.

``planning/transfer/transfer_plan.py`` has the rules. An edge is a row of a table with four columns: expert,
source, destination and depth.

Shape letters: E experts, D devices, N nodes, P pairs of expert and device.
"""

from megatron_fssdp.planning.native.kernel_types import (
    Flag,
    Index,
    Int,
    Ints,
    ReadBytes2,
    ReadInts,
    ReadInts2,
)
from megatron_fssdp.planning.native.work_arrays import zero_ints


def two_level_edges(
    present_ED: ReadBytes2,
    owner_E: ReadInts,
    node_D: ReadInts,
    by_node_D: ReadInts,
    first_N: ReadInts,
    key_P: Ints,
) -> Index:
    """The edges by which each expert crosses to each node once, and then spreads inside the node.

    Args:
        present_ED: Whether each expert is on each device, one byte each, ``[E, D]``.
        owner_E: Owner of every expert, int64 ``[E]``.
        node_D: Node of each device, int64 ``[D]``.
        by_node_D: The devices by node, then number, int64 ``[D]``.
        first_N: Where the devices of each node begin in ``by_node_D``, then D; int64 ``[N + 1]``.
        key_P: Gets a number for each edge, int64 with room for all replicas. Ascending numbers are the order
            of the plan. The number is ``(((2 depth + inside) E + expert) D + source) D + destination``, where
            ``inside`` is 1 inside a node and 0 between nodes.

    Returns:
        Number of edges.
    """
    num_experts: Index = owner_E.shape[0]
    num_devices: Index = node_D.shape[0]
    num_nodes: Index = first_N.shape[0] - 1
    num_edges: Index = 0
    owned_D: Ints = zero_ints(num_devices)  # experts of each owner so far
    place_D: Ints = zero_ints(num_devices)  # place of each device in its node
    inside: Ints = zero_ints(num_devices)
    for i in range(num_devices):
        place_D[by_node_D[i]] = i - first_N[node_D[by_node_D[i]]]
    for expert in range(num_experts):
        leader: Index = owner_E[expert]
        place = place_D[leader] + owned_D[leader]
        owned_D[leader] += 1
        hops: Int = 0
        for turn in range(num_nodes):
            node: Index = (node_D[owner_E[expert]] + turn) % num_nodes
            begin: Index = place_D[leader] if turn == 0 else place
            size: Index = first_N[node + 1] - first_N[node]
            num_inside: Index = 0
            for i in range(size):
                device = by_node_D[first_N[node] + (begin + i) % size]
                if present_ED[expert, device] != 0:
                    inside[num_inside] = device
                    num_inside += 1
            if num_inside == 0:
                continue
            if turn > 0:
                previous = leader
                leader = inside[0]
                key_P[num_edges] = (2 * hops * num_experts + expert) * num_devices + previous
                key_P[num_edges] = key_P[num_edges] * num_devices + leader
                num_edges += 1
                hops += 1
            depth = hops - 1
            level_end: Index = 1  # the first position whose depth is higher
            for i in range(1, num_inside):
                if i == level_end:
                    depth += 1
                    level_end = 2 * level_end + 1
                source: Index = inside[(i - 1) // 2]
                key_P[num_edges] = ((2 * depth + 1) * num_experts + expert) * num_devices + source
                key_P[num_edges] = key_P[num_edges] * num_devices + inside[i]
                num_edges += 1
    return num_edges


def first_wrong_edge(
    edges: ReadInts2, num_devices: Index, num_experts: Index, is_rooted: Flag, depth: Ints
) -> Index:
    """Position of the first edge that does not belong to a tree, or -1.

    Args:
        edges: The edges, int64, four columns. Experts and devices are below their numbers.
        num_devices: Number of devices, D.
        num_experts: Number of experts, E.
        is_rooted: Whether each expert has one tree, which starts at the source of its first edge.
        depth: Zeros, or 1 where an expert was before; int64 ``[E * D]``. Changed in place.
    """
    is_begun: Ints = zero_ints(num_experts)
    for i in range(edges.shape[0]):
        expert: Index = edges[i, 0]
        source = expert * num_devices + edges[i, 1]
        target = expert * num_devices + edges[i, 2]
        if depth[source] == 0:
            if not is_rooted or is_begun[expert] != 0:
                return i
            is_begun[expert] = 1
            depth[source] = 1
        if depth[target] != 0 or edges[i, 3] != depth[source] - 1:
            return i
        depth[target] = edges[i, 3] + 2
    return -1


def sum_edges(edges: ReadInts2, num_experts: Index, node_D: ReadInts, num_nodes: Index, found: Ints) -> None:
    """Count the experts on the busiest links, and the hops of the longest path.

    Args:
        edges: The edges, parents before children, int64, four columns.
        num_experts: Number above all experts of the edges.
        node_D: Node of each device, int64 ``[D]``.
        num_nodes: Number of nodes, N.
        found: Zeros, int64, seven of them. Gets the experts between the busiest device and its node, between
            the busiest device and other nodes, between the busiest node and others, and between nodes in all.
            Then, for the path before the last hop that takes longest, its hops between nodes and inside a
            node. Then the highest depth.
    """
    num_devices: Index = node_D.shape[0]
    near_D: Ints = zero_ints(2 * num_devices)  # sent by each device, then received by each device
    far_D: Ints = zero_ints(2 * num_devices)
    far_N: Ints = zero_ints(2 * num_nodes)
    # Hops to each device. A hop between nodes takes longer than a hop inside a node, so they count first.
    far_hops: Ints = zero_ints(num_experts * num_devices)
    near_hops: Ints = zero_ints(num_experts * num_devices)
    for i in range(edges.shape[0]):
        source: Index = edges[i, 1]
        to: Index = edges[i, 2]
        before = edges[i, 0] * num_devices + source
        after = edges[i, 0] * num_devices + to
        if far_hops[before] > found[4] or (far_hops[before] == found[4] and near_hops[before] > found[5]):
            found[4] = far_hops[before]
            found[5] = near_hops[before]
        found[6] = max(found[6], edges[i, 3])
        far_hops[after] = far_hops[before]
        near_hops[after] = near_hops[before]
        if node_D[source] == node_D[to]:
            near_D[source] += 1
            near_D[num_devices + to] += 1
            near_hops[after] += 1
        else:
            found[3] += 1
            far_D[source] += 1
            far_D[num_devices + to] += 1
            far_N[node_D[source]] += 1
            far_N[num_nodes + node_D[to]] += 1
            far_hops[after] += 1
    for i in range(2 * num_devices):
        found[0] = max(found[0], near_D[i])
        found[1] = max(found[1], far_D[i])
    for i in range(2 * num_nodes):
        found[2] = max(found[2], far_N[i])
