"""Kernels of transfer plans: the edges of a two-level transfer, their check, and their traffic.

``planning/transfer/transfer_plan.py`` has the rules. An edge is a row of a table with four columns: expert,
source, destination and depth.

Shape letters: E experts, D devices, N nodes, P pairs of expert and device.
"""

from megatron_fssdp.planning.kernels.parts.edge_sums import EdgeSums
from megatron_fssdp.planning.kernels.parts.two_level_sums import TwoLevelSums
from megatron_fssdp.planning.kernels.parts.two_level_trees import TwoLevelTrees
from megatron_fssdp.planning.native import compiler_marks as cython
from megatron_fssdp.planning.native.kernel_types import Flag, Index, Int, Ints, Ints2, ReadInts, ReadInts2
from megatron_fssdp.planning.native.work_arrays import zero_ints


def two_level_edges(
    holder_P: ReadInts,
    owner_E: ReadInts,
    node_D: ReadInts,
    by_node_D: ReadInts,
    first_N: ReadInts,
    key_P: Ints,
) -> None:
    """The edges by which each expert crosses to each node once, and then spreads inside the node.

    Args:
        holder_P: The owner and the replicas of each expert as numbers ``expert D + place``, ascending, int64
            ``[P]``.
        owner_E: Owner of every expert, int64 ``[E]``.
        node_D: Node of each device, int64 ``[D]``.
        by_node_D: The devices by node, then number, int64 ``[D]``.
        first_N: Where the devices of each node begin in ``by_node_D``, then D; int64 ``[N + 1]``.
        key_P: Gets a number for each edge, int64 with room for all replicas. Ascending numbers are the order
            of the plan. The number is ``(((2 depth + inside) E + expert) D + source) D + destination``, where
            ``inside`` is 1 inside a node and 0 between nodes.
    """
    trees = TwoLevelTrees(holder_P, owner_E, node_D, by_node_D, first_N)
    num_experts: Index = owner_E.shape[0]
    num_devices: Index = node_D.shape[0]
    with cython.nogil:
        num_edges: Index = 0
        for expert in range(num_experts):
            trees.find(expert)
            for i in range(trees.num_edges):
                key = (trees.depth[i] * num_experts + expert) * num_devices + trees.source[i]
                key_P[num_edges] = key * num_devices + trees.target[i]
                num_edges += 1


def first_wrong_edge(
    edges: ReadInts2, num_devices: Index, num_experts: Index, is_rooted: Flag, depth: Ints
) -> Index:
    """Position of the first edge that has a wrong number or does not belong to a tree, or -1.

    Args:
        edges: The edges, int64, four columns. Experts are below their number.
        num_devices: Number of devices, D.
        num_experts: Number of experts, E.
        is_rooted: Whether each expert has one tree, which starts at the source of its first edge.
        depth: Zeros, or 1 where an expert was before; int64 ``[E * D]``. Changed in place.
    """
    is_begun: Ints = zero_ints(num_experts)
    with cython.nogil:
        wrong = _first_wrong(edges, num_devices, is_rooted, is_begun, depth)
    return wrong


@cython.inner
def _first_wrong(edges: ReadInts2, num_devices: Index, is_rooted: Flag, is_begun: Ints, depth: Ints) -> Index:
    for i in range(edges.shape[0]):
        expert: Index = edges[i, 0]
        lowest: Int = min(min(edges[i, 0], edges[i, 3]), min(edges[i, 1], edges[i, 2]))
        if lowest < 0 or max(edges[i, 1], edges[i, 2]) >= num_devices:
            return i
        source: Index = expert * num_devices + edges[i, 1]
        target: Index = expert * num_devices + edges[i, 2]
        if depth[source] == 0:
            if not is_rooted or is_begun[expert] != 0:
                return i
            is_begun[expert] = 1
            depth[source] = 1
        if depth[target] != 0 or edges[i, 3] != depth[source] - 1:
            return i
        depth[target] = edges[i, 3] + 2
    return -1


def sum_edges(edges: ReadInts2, num_experts: Index, node_D: ReadInts, num_nodes: Index, found: Ints2) -> None:
    """Count the experts on the busiest links, and the hops of the longest path.

    Args:
        edges: The edges, parents before children, int64, four columns.
        num_experts: Number above all experts of the edges.
        node_D: Node of each device, int64 ``[D]``.
        num_nodes: Number of nodes, N.
        found: Gets a row of seven numbers, int64: the experts between the busiest device and its node,
            between the busiest device and other nodes, between the busiest node and others, and between nodes
            in all. Then, for the path before the last hop that takes longest, its hops between nodes and
            inside a node. Then the highest depth.
    """
    num_devices: Index = node_D.shape[0]
    sums = EdgeSums(node_D, num_nodes)
    far_hops: Ints = zero_ints(num_experts * num_devices)  # to each holder
    near_hops: Ints = zero_ints(num_experts * num_devices)
    with cython.nogil:
        for i in range(edges.shape[0]):
            source: Index = edges[i, 1]
            to: Index = edges[i, 2]
            before: Index = edges[i, 0] * num_devices + source
            after: Index = edges[i, 0] * num_devices + to
            sums.add_path(far_hops[before], near_hops[before], edges[i, 3])
            far_hops[after] = far_hops[before]
            near_hops[after] = near_hops[before]
            if node_D[source] == node_D[to]:
                sums.add_near(source, to)
                near_hops[after] += 1
            else:
                sums.add_far(source, to)
                far_hops[after] += 1
        sums.move_to(found, 0)


def sum_two_level_edges(
    expert_P: ReadInts,
    device_P: ReadInts,
    ends: ReadInts,
    owner_E: ReadInts,
    node_D: ReadInts,
    by_node_D: ReadInts,
    first_N: ReadInts,
    found: Ints2,
) -> None:
    """The sums of :func:`sum_edges` for two-level transfers of several placements, without tables of edges.

    Args:
        expert_P: Expert of each replica, int64 ``[P]``, one placement after the other. In a placement, the
            replicas of an expert come one after the other.
        device_P: Device of each replica, int64 ``[P]``.
        ends: Where the replicas of each placement end, int64.
        owner_E: As in :func:`two_level_edges`, and so are the arguments up to ``first_N``.
        node_D: Nodes.
        by_node_D: Devices by node.
        first_N: First devices of nodes.
        found: Gets a row for each placement, as in :func:`sum_edges`.
    """
    trees = TwoLevelSums(owner_E, node_D, by_node_D, first_N)
    with cython.nogil:
        pair: Index = 0
        for case in range(ends.shape[0]):
            while pair < ends[case]:
                expert: Index = expert_P[pair]
                first: Index = pair
                while pair < ends[case] and expert_P[pair] == expert:
                    trees.has_D[trees.place_D[device_P[pair]]] = 1
                    pair += 1
                trees.has_D[trees.place_D[owner_E[expert]]] = 1
                trees.add(expert, pair - first + 1)
                trees.has_D[trees.place_D[owner_E[expert]]] = 0
                for i in range(first, pair):
                    trees.has_D[trees.place_D[device_P[i]]] = 0
            trees.sums.move_to(found, case)
