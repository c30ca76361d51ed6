"""Counts the edges of two-level transfers without a list of them. Part of the kernel of transfer plans.

``planning/transfer/transfer_plan.py`` has the rules.

Shape letters: E experts, D devices, N nodes.
"""

from megatron_fssdp.planning.kernels.parts.edge_sums import EdgeSums
from megatron_fssdp.planning.native import compiler_marks as cython
from megatron_fssdp.planning.native.kernel_types import Index, Int, Ints, ReadInts
from megatron_fssdp.planning.native.work_arrays import zero_ints


@cython.cclass
class TwoLevelSums:
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
    sums: EdgeSums
    rank_E: Ints
    place_D: Ints
    has_D: Ints
    inside: Ints

    def __init__(self, owner_E: ReadInts, node_D: ReadInts, by_node_D: ReadInts, first_N: ReadInts) -> None:
        size: Index = node_D.shape[0]
        self.owner_E, self.node_D, self.by_node_D, self.first_N = owner_E, node_D, by_node_D, first_N
        self.sums = EdgeSums(node_D, first_N.shape[0] - 1)
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
