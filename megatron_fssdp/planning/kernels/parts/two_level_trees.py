"""The edges of a two-level transfer, one expert at a time. Part of the kernel of transfer plans.

``planning/transfer/transfer_plan.py`` has the rules. The place of a device is its position among the devices
sorted by node, then number.

Shape letters: E experts, D devices, N nodes, P pairs of expert and device.
"""

from megatron_fssdp.planning.native import compiler_marks as cython
from megatron_fssdp.planning.native.kernel_types import Index, Int, Ints, ReadInts
from megatron_fssdp.planning.native.work_arrays import zero_ints


@cython.cclass
class TwoLevelTrees:
    """Finds the edges by which an expert crosses to each node once, and then spreads inside the node.

    Attributes:
        holder_P: The owner and the replicas of each expert as numbers ``expert D + place``, ascending.
        owner_E: Owner of every expert.
        node_D: Node of each device.
        by_node_D: The devices by node, then number.
        first_N: Where the devices of each node begin in ``by_node_D``, then D.
        end: Position in ``holder_P`` after the holders of the experts so far.
        owned_D: Experts of each owner so far.
        place_D: Place of each device in its node.
        inside: Holders of one node, in the order in which they get the expert.
        source: Source of each edge of the present expert, parents before children.
        target: Destination of each edge.
        depth: Depth of each edge.
        num_edges: Number of edges of the present expert.
    """

    holder_P: ReadInts
    owner_E: ReadInts
    node_D: ReadInts
    by_node_D: ReadInts
    first_N: ReadInts
    end: Index
    owned_D: Ints
    place_D: Ints
    inside: Ints
    source: Ints
    target: Ints
    depth: Ints
    num_edges: Index

    def __init__(
        self, holder_P: ReadInts, owner_E: ReadInts, node_D: ReadInts, by_node_D: ReadInts, first_N: ReadInts
    ) -> None:
        num_devices: Index = node_D.shape[0]
        self.holder_P, self.owner_E = holder_P, owner_E
        self.node_D, self.by_node_D, self.first_N = node_D, by_node_D, first_N
        work: Ints = zero_ints(6 * num_devices)  # one array, because each one takes a microsecond to make
        self.owned_D, self.place_D = work[:num_devices], work[num_devices : 2 * num_devices]
        self.inside, self.source = (
            work[2 * num_devices : 3 * num_devices],
            work[3 * num_devices : 4 * num_devices],
        )
        self.target, self.depth = work[4 * num_devices : 5 * num_devices], work[5 * num_devices :]
        self.end, self.num_edges = 0, 0
        for i in range(num_devices):
            self.place_D[by_node_D[i]] = i - first_N[node_D[by_node_D[i]]]

    @cython.inner
    def find(self, expert: Index) -> cython.void:
        """Find the edges of the next expert. Experts must come in ascending order."""
        num_devices: Index = self.node_D.shape[0]
        base = expert * num_devices
        first: Index = self.end
        while self.end < self.holder_P.shape[0] and self.holder_P[self.end] < base + num_devices:
            self.end += 1
        self.num_edges = 0
        owner: Index = self.owner_E[expert]
        begin: Index = self.place_D[owner] + self.owned_D[owner]
        self.owned_D[owner] += 1
        if self.end - first == 1:
            return
        at: Index = first  # the first holder in the owner's node
        while self.holder_P[at] - base < self.first_N[self.node_D[owner]]:
            at += 1
        leader: Index = owner
        hops: Int = 0
        left = self.end - first
        while left > 0:
            node: Index = self.node_D[self.by_node_D[self.holder_P[at] - base]]
            stop = at
            while stop < self.end and self.holder_P[stop] - base < self.first_N[node + 1]:
                stop += 1
            if hops == 0:
                self.line_up(at, stop, base, self.first_N[node] + self.place_D[owner])
            else:
                size = self.first_N[node + 1] - self.first_N[node]
                self.line_up(at, stop, base, self.first_N[node] + begin % size)
                self.add(leader, self.inside[0], 2 * (hops - 1))
                leader = self.inside[0]
            self.spread(stop - at, hops - 1)
            hops += 1
            left -= stop - at
            at = stop if stop < self.end else first

    @cython.inner
    def line_up(self, first: Index, end: Index, base: Index, begin: Index) -> cython.void:
        """Write the holders of one node into ``inside``, in a ring that begins at a place.

        Args:
            first: Position of the node's first holder.
            end: Position after its last one.
            base: Number of the expert's holder at place 0.
            begin: The place. Holders before it come last.
        """
        num_before: Index = 0
        while num_before < end - first and self.holder_P[first + num_before] - base < begin:
            num_before += 1
        size = end - first
        for i in range(size):
            turn: Index = first + num_before + i
            if turn >= end:
                turn -= size
            self.inside[i] = self.by_node_D[self.holder_P[turn] - base]

    @cython.inner
    def spread(self, size: Index, depth: Int) -> cython.void:
        """Add the edges of a binary tree over the holders of one node.

        Args:
            size: Number of holders in ``inside``.
            depth: Depth of the edge that brings the expert to the first one, or -1.
        """
        level_end: Index = 1  # the first position whose depth is higher
        for i in range(1, size):
            if i == level_end:
                depth += 1
                level_end = 2 * level_end + 1
            self.add(self.inside[(i - 1) // 2], self.inside[i], 2 * depth + 1)

    @cython.inner
    def add(self, source: Index, target: Index, depth: Int) -> cython.void:
        """Add an edge, with twice its depth, plus 1 inside a node."""
        self.source[self.num_edges] = source
        self.target[self.num_edges] = target
        self.depth[self.num_edges] = depth
        self.num_edges += 1
