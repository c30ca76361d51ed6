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


@cython.cclass
class _EdgeSums:
    """Counts the experts on the busiest links, and the hops of the longest path.

    Attributes:
        node_D: Node of each device.
        near_D: Experts inside nodes that each device sends, then those that each device receives.
        far_D: The same between nodes.
        far_N: Experts that each node sends to other nodes, then those that it receives.
        found: The results of :func:`sum_edges` so far.
    """

    node_D: ReadInts
    near_D: Ints
    far_D: Ints
    far_N: Ints
    found: Ints

    def __init__(self, node_D: ReadInts, num_nodes: Index) -> None:
        self.node_D = node_D
        size: Index = 2 * node_D.shape[0]
        work: Ints = zero_ints(2 * size + 2 * num_nodes + 7)
        self.near_D, self.far_D = work[:size], work[size : 2 * size]
        self.far_N, self.found = work[2 * size : 2 * size + 2 * num_nodes], work[2 * size + 2 * num_nodes :]

    @cython.inner
    def add_near(self, source: Index, to: Index) -> cython.void:
        """Count an edge inside a node."""
        self.near_D[source] += 1
        self.near_D[self.node_D.shape[0] + to] += 1

    @cython.inner
    def add_far(self, source: Index, to: Index) -> cython.void:
        """Count an edge between nodes."""
        self.found[3] += 1
        self.far_D[source] += 1
        self.far_D[self.node_D.shape[0] + to] += 1
        self.far_N[self.node_D[source]] += 1
        self.far_N[self.far_N.shape[0] // 2 + self.node_D[to]] += 1

    @cython.inner
    def add_path(self, far_hops: Int, near_hops: Int, depth: Int) -> cython.void:
        """Note the hops before an edge, and the depth of the edge.

        A hop between nodes takes longer than a hop inside a node, so these hops count first.
        """
        found = self.found
        if far_hops > found[4] or (far_hops == found[4] and near_hops > found[5]):
            found[4] = far_hops
            found[5] = near_hops
        found[6] = max(found[6], depth)

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
    sums = _EdgeSums(node_D, num_nodes)
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


@cython.cclass
class _TwoLevelSums:
    """Counts the edges of two-level transfers, one expert at a time. Attributes are arguments of the kernel.

    Attributes:
        sums: Sums of the edges.
        rank_E: Number of experts of the same owner before each expert.
        place_D: Position of each device in ``by_node_D``.
        has_D: 1 where the present expert is, by position in ``by_node_D``.
        inside: Holders of one node, in the order in which they get the expert.
    """

    owner_E: ReadInts
    node_D: ReadInts
    by_node_D: ReadInts
    first_N: ReadInts
    sums: _EdgeSums
    rank_E: Ints
    place_D: Ints
    has_D: Ints
    inside: Ints

    def __init__(self, owner_E: ReadInts, node_D: ReadInts, by_node_D: ReadInts, first_N: ReadInts) -> None:
        size: Index = node_D.shape[0]
        self.owner_E, self.node_D, self.by_node_D, self.first_N = owner_E, node_D, by_node_D, first_N
        self.sums = _EdgeSums(node_D, first_N.shape[0] - 1)
        work: Ints = zero_ints(3 * size + owner_E.shape[0])
        self.place_D, self.has_D, self.inside = work[:size], work[size : 2 * size], work[2 * size : 3 * size]
        self.rank_E = work[3 * size :]
        owned_D: Ints = zero_ints(size)
        for i in range(size):
            self.place_D[by_node_D[i]] = i
        for expert in range(owner_E.shape[0]):
            owner: Index = owner_E[expert]
            self.rank_E[expert] = owned_D[owner]
            owned_D[owner] += 1

    @cython.inner
    def add(self, expert: Index, num_holders: Index) -> cython.void:
        """Count the edges of an expert whose holders, with the owner, are marked in ``has_D``."""
        leader: Index = self.owner_E[expert]
        node: Index = self.node_D[leader]
        start: Index = self.place_D[leader]
        begin: Index = start - self.first_N[node] + self.rank_E[expert]
        hops: Int = 0
        while num_holders > 0:
            size = self.line_up(node, start)
            if size > 0:
                if hops > 0:
                    self.sums.add_far(leader, self.inside[0])
                    self.sums.add_path(hops - 1, 0, hops - 1)
                    leader = self.inside[0]
                levels: Int = 0
                while size >> (levels + 1):
                    levels += 1
                if levels > 0:
                    self.sums.add_path(hops, levels - 1, hops + levels - 1)
                for i in range(1, size):
                    self.sums.add_near(self.inside[(i - 1) // 2], self.inside[i])
                num_holders -= size
                hops += 1
            node = node + 1 if node + 2 < self.first_N.shape[0] else 0
            start = self.first_N[node] + begin % (self.first_N[node + 1] - self.first_N[node])

    @cython.inner
    def line_up(self, node: Index, start: Index) -> Index:
        """Write the holders of a node into ``inside``, in a ring from a position on; returns how many."""
        size: Index = 0
        for at in range(start, self.first_N[node + 1]):
            if self.has_D[at] != 0:
                self.inside[size] = self.by_node_D[at]
                size += 1
        for at in range(self.first_N[node], start):
            if self.has_D[at] != 0:
                self.inside[size] = self.by_node_D[at]
                size += 1
        return size


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
    trees = _TwoLevelSums(owner_E, node_D, by_node_D, first_N)
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
