"""The experts on the busiest links of a transfer. Part of the kernel of transfer plans.

Shape letters: D devices, N nodes.
"""

from megatron_fssdp.planning.native import compiler_marks as cython
from megatron_fssdp.planning.native.kernel_types import Index, Int, Ints, Ints2, ReadInts
from megatron_fssdp.planning.native.work_arrays import zero_ints


@cython.cclass
class EdgeSums:
    """Counts the experts on the busiest links, and the hops of the longest path.

    Attributes:
        node_D: Node of each device.
        near_D: Experts inside nodes that each device sends, then those that each device receives.
        far_D: The same between nodes.
        far_N: Experts that each node sends to other nodes, then those that it receives.
        found: The results of ``sum_edges`` so far.
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
