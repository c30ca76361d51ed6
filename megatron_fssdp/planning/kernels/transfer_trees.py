"""Kernels of transfer plans: the edges of a two-level transfer, their check, and their traffic.

``planning/transfer/transfer_plan.py`` has the rules. An edge is a row of a table with four columns: expert,
source, destination and depth.

Shape letters: E experts, D devices, N nodes, P pairs of expert and device.
"""

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
    trees = TwoLevelTrees(holder_P, node_D, by_node_D, first_N)
    num_experts: Index = owner_E.shape[0]
    num_devices: Index = node_D.shape[0]
    with cython.nogil:
        num_edges: Index = 0
        for expert in range(num_experts):
            trees.find(expert, owner_E[expert])
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


@cython.cclass
class _EdgeSums:
    """Counts the experts on the busiest links, and the hops of the longest path.

    Attributes:
        node_D: Node of each device.
        near_D: Experts inside nodes that each device sends, then those that each device receives.
        far_D: The same between nodes.
        far_N: Experts that each node sends to other nodes, then those that it receives.
        far_hops: Hops between nodes to each holder. A hop between nodes takes longer than a hop inside a
            node, so they count first.
        near_hops: Hops inside a node to each holder.
        found: The results of :func:`sum_edges` so far.
    """

    node_D: ReadInts
    near_D: Ints
    far_D: Ints
    far_N: Ints
    far_hops: Ints
    near_hops: Ints
    found: Ints

    def __init__(self, node_D: ReadInts, num_nodes: Index, num_holders: Index) -> None:
        self.node_D, self.found = node_D, zero_ints(7)
        size: Index = 2 * node_D.shape[0]
        work: Ints = zero_ints(2 * size + 2 * num_nodes)
        self.near_D, self.far_D, self.far_N = work[:size], work[size : 2 * size], work[2 * size :]
        self.far_hops, self.near_hops = zero_ints(num_holders), zero_ints(num_holders)

    @cython.inner
    def add(self, source: Index, to: Index, before: Index, after: Index, depth: Int) -> cython.void:
        """Count an edge.

        Args:
            source: Device that sends.
            to: Device that receives.
            before: Position in ``far_hops`` of the expert on ``source``.
            after: Position in ``far_hops`` of the expert on ``to``.
            depth: Depth of the edge.
        """
        found, far_hops, near_hops = self.found, self.far_hops, self.near_hops
        if far_hops[before] > found[4] or (far_hops[before] == found[4] and near_hops[before] > found[5]):
            found[4] = far_hops[before]
            found[5] = near_hops[before]
        found[6] = max(found[6], depth)
        far_hops[after] = far_hops[before]
        near_hops[after] = near_hops[before]
        if self.node_D[source] == self.node_D[to]:
            self.near_D[source] += 1
            self.near_D[self.node_D.shape[0] + to] += 1
            near_hops[after] += 1
        else:
            found[3] += 1
            self.far_D[source] += 1
            self.far_D[self.node_D.shape[0] + to] += 1
            self.far_N[self.node_D[source]] += 1
            self.far_N[self.far_N.shape[0] // 2 + self.node_D[to]] += 1
            far_hops[after] += 1

    @cython.inner
    def move_to(self, found: Ints2, row: Index) -> cython.void:
        """Write the sums into a row, and start again with nothing."""
        for i in range(self.near_D.shape[0]):
            self.found[0] = max(self.found[0], self.near_D[i])
            self.found[1] = max(self.found[1], self.far_D[i])
            self.near_D[i] = 0
            self.far_D[i] = 0
        for i in range(self.far_N.shape[0]):
            self.found[2] = max(self.found[2], self.far_N[i])
            self.far_N[i] = 0
        for i in range(7):
            found[row, i] = self.found[i]
            self.found[i] = 0


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
    sums = _EdgeSums(node_D, num_nodes, num_experts * num_devices)
    with cython.nogil:
        for i in range(edges.shape[0]):
            base = edges[i, 0] * num_devices
            sums.add(edges[i, 1], edges[i, 2], base + edges[i, 1], base + edges[i, 2], edges[i, 3])
        sums.move_to(found, 0)


def sum_two_level_edges(
    holder_P: ReadInts,
    owner_E: ReadInts,
    node_D: ReadInts,
    by_node_D: ReadInts,
    first_N: ReadInts,
    found: Ints2,
) -> None:
    """The sums of :func:`sum_edges` for the edges of :func:`two_level_edges`, without a table of the edges.

    Args:
        holder_P: As in :func:`two_level_edges`, for several placements with the same owners. The experts of
            the second placement have the numbers from E on, and so forth.
        owner_E: Owners.
        node_D: Nodes.
        by_node_D: Devices by node.
        first_N: First devices of nodes.
        found: Gets a row for each placement, as in :func:`sum_edges`.
    """
    trees = TwoLevelTrees(holder_P, node_D, by_node_D, first_N)
    sums = _EdgeSums(node_D, first_N.shape[0] - 1, node_D.shape[0])
    num_experts: Index = owner_E.shape[0]
    with cython.nogil:
        for case in range(found.shape[0]):
            trees.forget_owners()
            for expert in range(num_experts):
                trees.find(case * num_experts + expert, owner_E[expert])
                sums.far_hops[owner_E[expert]] = 0
                sums.near_hops[owner_E[expert]] = 0
                for i in range(trees.num_edges):
                    source: Index = trees.source[i]
                    to: Index = trees.target[i]
                    sums.add(source, to, source, to, trees.depth[i] // 2)
            sums.move_to(found, case)
