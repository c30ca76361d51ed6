# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: infer_types=True, annotation_typing=False
"""A layer whose placement changes, and what this does to its traffic and its price."""

import cython
import numpy as np
from cython.cimports.libc.math import sqrt

from megatron_fssdp.planning.arrays import zero_ints, zero_reals
from megatron_fssdp.planning.cost.layer_costs import CostedLayer
from megatron_fssdp.planning.placement.placement import ExpertPlacement

if not cython.compiled:  # the .pxd file imports them for C
    from megatron_fssdp.planning.kernels.constants import (
        FAR_PAIRS,
        GETS,
        HOP_BITS,
        IN,
        NO_PAIRS,
        OUT,
        SENDS,
        WORK,
    )
    from megatron_fssdp.planning.kernels.price_formula import PriceFormula
    from megatron_fssdp.planning.kernels.transfer_trees import TransferTrees


class PricedLayer(TransferTrees):
    """One layer with a placement that changes, the traffic of the placement, and its price.

    The sums count all experts that are not *out*. Near traffic stays in a node, far traffic crosses nodes. An
    expert's tokens stay on a device that has it; those of other devices go in equal parts to the holders in
    their node, or to all holders if the node has none.

    Attributes:
        load_ED: (token, k) pairs by expert and source device, and ``load_EN`` by source node; ``rest_EN`` are
            those of devices that lack the expert, and ``unserved_E`` those of nodes that lack it.
        slots: Most replicas that a device may hold, and ``used_D`` those that it holds.
        holders_E: Number of holders of each expert, and ``holders_EN`` in each node.
        busy: What each device does in its node, then each node, and from the place ``far_at`` on each device
            between nodes, if its NIC limits it; ``[5, 2 D + N]``. Rows: pairs that one computes, gets and
            sends; experts that it gets and sends. A node gets and sends between nodes.
        own: What the expert that was last walked adds to the places of nodes that have it, ``[5, N]``; each
            of its holders computes ``each_far`` pairs of nodes without one.
        hops_E: Hops of each expert's longest path; 0 while it is out.
        fill_E: Hops before the last one of that path: those between nodes, shifted, plus those inside.
        is_smooth: Whether prices have norms of the eighth power in place of the highest numbers of pairs, so
            that every device and link counts a little.
        most: For each node the highest values, or sums of eighth powers, of its devices' load, pairs and
            moved experts in the node, experts between nodes; then the node's experts between nodes; then
            pairs between nodes, of its devices and of the node. One more row is of a node with the expert
            that is out. Then come the rows of all nodes if they lack it, and those joined. ``[2 N + 2, 7]``.
        all_nodes: The columns of ``most``, joined for all nodes.
        is_stale_N: 1 for nodes whose devices changed in the node since :meth:`price`.
        version: Rises with each change of ``busy``. In ``known``, the last rows of ``most`` were written.
    """

    def __init__(self, layer: CostedLayer, placement: ExpertPlacement, slots: int) -> None:
        TransferTrees.__init__(self, placement, layer.topology)
        self.load_ED = memoryview(np.array(layer.load_DE.T, order="C"))
        self.load_EN = memoryview(np.array(layer.topology.sum_over_nodes(layer.load_DE).T, order="C"))
        self.slots, self.costs = slots, PriceFormula(layer.costs)
        devices, num_nodes, experts = self.num_devices, self.num_nodes, self.num_experts
        self.total_E, self.unserved_E = zero_reals(experts), zero_reals(experts)
        self.all_pairs, self.num_prices = 0.0, 0
        self.is_smooth = False
        self.holders_E, self.used_D = zero_ints(experts), zero_ints(devices)
        self.hops_E, self.fill_E = zero_ints(experts), zero_ints(experts)
        self.holders_EN = memoryview(np.zeros((experts, num_nodes), np.int64))
        self.rest_EN = memoryview(np.array(self.load_EN))
        self.far_at = devices + num_nodes
        self.busy = memoryview(np.zeros((5, self.far_at + devices)))
        self.own = memoryview(np.zeros((5, num_nodes)))
        self.most, self.all_nodes = memoryview(np.zeros((2 * num_nodes + 2, 7))), zero_reals(7)
        self.is_stale_N, self.most_is_smooth = memoryview(np.ones(num_nodes, np.int64)), False
        self.known, self.version = -1, 0
        for expert in range(experts):
            for i in range(num_nodes):
                self.total_E[expert] += self.load_EN[expert, i]
            self.all_pairs += self.total_E[expert]
            self.unserved_E[expert] = self.total_E[expert]
            for i in range(devices):
                if self.has_ED[expert, i]:
                    self.put(expert, i, 1)
            self.used_D[self.owner_E[expert]] -= 1
            self.count(expert, 1)
        self.start_s = self.price()

    def walk(self, expert: int) -> None:
        """Find what an expert adds to the places of the nodes that have it, and its longest path."""
        self.each_far = self.unserved_E[expert] / self.holders_E[expert]
        left = self.holders_E[expert]
        position = 0  # place of the node in the chain between nodes
        node = self.node_D[self.owner_E[expert]]
        self.own_hops = 0
        self.own_fill = 0
        while left > 0:
            num = self.holders_EN[expert, node]
            if num > 0:
                left -= num
                self.own[IN, node] = self.each_far * num
                self.own[GETS, node] = 1.0 if position > 0 else 0.0
                self.own[SENDS, node] = 1.0 if left > 0 else 0.0
                depth = 0
                while num >> (depth + 1):
                    depth += 1
                self.own_hops = max(self.own_hops, position + depth)
                if num > 1:
                    self.own_fill = max(self.own_fill, (position << HOP_BITS) + depth - 1)
                elif left > 0:
                    self.own_fill = max(self.own_fill, position << HOP_BITS)
                position += 1
            node = node + 1 if node + 1 < self.num_nodes else 0

    def rank_of_first(self, expert: int, node: int, at: int) -> int:
        """Place in a node's tree of the node's first holder, if the holders are lined up from ``at`` on."""
        num = self.holders_EN[expert, node]
        for i in range(self.first_N[node], at):
            num -= self.has_ED[expert, self.member_D[i]]
        return num

    def count(self, expert: int, sign: int) -> None:
        """Add an expert to the sums (sign 1), or take it out (sign -1)."""
        self.walk(expert)
        self.version += 1
        for node in range(self.num_nodes):
            place = self.num_devices + node
            if self.holders_EN[expert, node] > 0:
                self.busy[IN, place] += sign * self.own[IN, node]
                self.busy[GETS, place] += sign * self.own[GETS, node]
                self.busy[SENDS, place] += sign * self.own[SENDS, node]
                self.count_in(expert, node, sign)
                continue
            self.busy[OUT, place] += sign * self.load_EN[expert, node]
            if self.costs.limits_devices:
                for i in range(self.first_N[node], self.first_N[node + 1]):
                    device = self.member_D[i]
                    self.busy[OUT, self.far_at + device] += sign * self.load_ED[expert, device]
        self.hops_E[expert] = self.own_hops if sign > 0 else 0
        self.fill_E[expert] = self.own_fill if sign > 0 else 0

    def count_in(self, expert: int, node: int, sign: float) -> None:
        """:meth:`count` for the devices of a node with holders; the leader moves experts between nodes."""
        num = self.holders_EN[expert, node]
        share = self.rest_EN[expert, node] / num
        at = self.leader_at(expert, node)
        rank = self.rank_of_first(expert, node, at)
        limits = self.costs.limits_devices
        self.is_stale_N[node] = 1
        for i in range(self.first_N[node], self.first_N[node + 1]):
            if i == at:
                rank = 0
            device = self.member_D[i]
            if not self.has_ED[expert, device]:
                self.busy[OUT, device] += sign * self.load_ED[expert, device]
                continue
            self.busy[WORK, device] += sign * (self.load_ED[expert, device] + share + self.each_far)
            self.busy[IN, device] += sign * share
            self.busy[GETS, device] += sign if rank > 0 else 0.0
            self.busy[SENDS, device] += sign * min(max(num - 1 - 2 * rank, 0), 2)
            if limits:
                self.busy[IN, self.far_at + device] += sign * self.each_far
                if rank == 0 or rank == num:
                    self.busy[GETS, self.far_at + device] += sign * self.own[GETS, node]
                    self.busy[SENDS, self.far_at + device] += sign * self.own[SENDS, node]
            rank += 1

    def put(self, expert: int, device: int, sign: int) -> None:
        """Give an expert that is out to one more device (sign 1), or take it away (sign -1)."""
        node = self.node_D[device]
        self.has_ED[expert, device] = 1 if sign > 0 else 0
        self.used_D[device] += sign
        self.holders_E[expert] += sign
        self.holders_EN[expert, node] += sign
        self.rest_EN[expert, node] -= sign * self.load_ED[expert, device]
        if self.holders_EN[expert, node] == (1 if sign > 0 else 0):
            pairs = self.unserved_E[expert] - sign * self.load_EN[expert, node]
            # Less is the rounding error of a difference.
            self.unserved_E[expert] = pairs if pairs > NO_PAIRS * self.all_pairs else 0.0

    def price(self) -> float:
        """Seconds of the layer without the experts that are out, which every placement of theirs exceeds."""
        self.hops = self.fill = 0
        for i in range(self.num_experts):
            self.hops = max(self.hops, self.hops_E[i])
            self.fill = max(self.fill, self.fill_E[i])
        for node in range(self.num_nodes):
            if self.is_stale_N[node] or self.is_smooth != self.most_is_smooth:
                self.look_at(node, node, -1)
                self.is_stale_N[node] = 0
            self.look_between(node, node, -1, False)
        self.most_is_smooth = self.is_smooth
        return self.price_with(-1, -1)

    def look_at(self, node: int, row: int, expert: int) -> None:
        """Write to a row of ``most`` what a node's devices do, with a walked expert; -1 for none."""
        tokens = pairs = moved = moved_far = share = 0.0
        is_smooth, limits = self.is_smooth, self.costs.limits_devices
        num = 0
        at = -1
        rank = 0
        if expert >= 0:
            num = self.holders_EN[expert, node]
        if num > 0:
            share = self.rest_EN[expert, node] / num
            at = self.leader_at(expert, node)
            rank = self.rank_of_first(expert, node, at)
        for i in range(self.first_N[node], self.first_N[node + 1]):
            if i == at:
                rank = 0
            device = self.member_D[i]
            has = num > 0 and self.has_ED[expert, device]
            computed, got = self.busy[WORK, device], self.busy[IN, device]
            sent = self.busy[OUT, device]
            if has:
                computed += self.load_ED[expert, device] + share + self.each_far
                got += share
            elif num > 0:
                sent += self.load_ED[expert, device]
            tokens = _join(is_smooth, tokens, _raised(is_smooth, computed))
            pairs = _join(is_smooth, pairs, _raised(is_smooth, max(got, sent)))
            got, sent = self.busy[GETS, device], self.busy[SENDS, device]
            if has:
                got += 1.0 if rank > 0 else 0.0
                sent += min(max(num - 1 - 2 * rank, 0), 2)
            moved = _join(is_smooth, moved, _raised(is_smooth, max(got, sent)))
            if limits:
                place = self.far_at + device
                got, sent = self.busy[GETS, place], self.busy[SENDS, place]
                if has and (rank == 0 or rank == num):
                    got += self.own[GETS, node]
                    sent += self.own[SENDS, node]
                moved_far = _join(is_smooth, moved_far, _raised(is_smooth, max(got, sent)))
            rank += has
        self.most[row, 0], self.most[row, 1], self.most[row, 2] = tokens, pairs, moved
        self.most[row, 3] = moved_far

    def look_between(self, node: int, row: int, expert: int, is_held: bool) -> None:
        """Write to a row of ``most`` what goes between nodes, but for the experts of single devices.

        The node holds an expert that was walked, or lacks it; -1 for none.
        """
        place = self.num_devices + node
        got, sent = self.busy[IN, place], self.busy[OUT, place]
        gets, sends = self.busy[GETS, place], self.busy[SENDS, place]
        pairs = 0.0
        is_smooth = self.is_smooth
        is_sent = expert >= 0 and not is_held
        if is_held:
            got += self.own[IN, node]
            gets, sends = gets + self.own[GETS, node], sends + self.own[SENDS, node]
        elif is_sent:
            sent += self.load_EN[expert, node]
        self.most[row, 4] = _raised(is_smooth, max(gets, sends))
        self.most[row, 5] = 0.0
        self.most[row, 6] = _raised(is_smooth, max(got, sent))
        if not self.costs.limits_devices:
            return
        for i in range(self.first_N[node], self.first_N[node + 1]):
            device = self.member_D[i]
            got, sent = self.busy[IN, self.far_at + device], self.busy[OUT, self.far_at + device]
            if is_held and self.has_ED[expert, device]:
                got += self.each_far
            elif is_sent:
                sent += self.load_ED[expert, device]
            pairs = _join(is_smooth, pairs, _raised(is_smooth, max(got, sent)))
        self.most[row, 5] = pairs

    def look_without(self, node: int, row: int, expert: int) -> None:
        """Write to a row of ``most`` what a node does while it lacks an expert that is out."""
        for column in range(4):
            self.most[row, column] = self.most[node, column]
        self.look_between(node, row, expert, False)

    def join_none(self) -> None:
        """Begin to join rows."""
        for column in range(7):
            self.all_nodes[column] = 0.0

    def join(self, row: int, first: int) -> None:
        """Join the columns of a row of ``most``, from the first one on, to ``all_nodes``."""
        if self.is_smooth:
            for column in range(first, 7):
                self.all_nodes[column] += self.most[row, column]
        else:
            for column in range(first, 7):
                self.all_nodes[column] = max(self.all_nodes[column], self.most[row, column])

    def join_holders(self, expert: int) -> None:
        """Write to ``all_nodes`` what all nodes do with an expert that is out.

        A node without it does the same wherever its holders are. One with it does more than without, but for
        the pairs that it sends to other nodes.
        """
        after = self.num_nodes + 1
        joined = after + self.num_nodes
        if self.known != self.version:
            self.known = self.version
            self.join_none()
            for node in range(self.num_nodes):
                self.look_without(node, after + node, expert)
                self.join(after + node, 0)
            for column in range(FAR_PAIRS):
                self.most[joined, column] = self.all_nodes[column]
        self.join_none()
        self.join(joined, 0)
        for node in range(self.num_nodes):
            if self.holders_EN[expert, node] == 0:
                self.join(after + node, FAR_PAIRS)
                continue
            if self.is_smooth:
                for column in range(FAR_PAIRS):
                    self.all_nodes[column] -= self.most[after + node, column]
            self.look_at(node, self.num_nodes, expert)
            self.look_between(node, self.num_nodes, expert, True)
            self.join(self.num_nodes, 0)

    def price_with(self, expert: int, beside: int) -> float:
        """Seconds with an expert that is out, and one that came in since :meth:`price`; -1 for none."""
        hops, fill, row = self.hops, self.fill, self.num_nodes
        if expert >= 0:
            self.walk(expert)
            hops, fill = max(hops, self.own_hops), max(fill, self.own_fill)
        if expert >= 0 and beside < 0:
            self.join_holders(expert)
        else:
            self.join_none()
            for node in range(self.num_nodes):
                if expert < 0:
                    self.join(node, 0)
                    continue
                if self.holders_EN[expert, node] + self.holders_EN[beside, node] > 0:
                    self.look_at(node, row, expert)
                    self.look_between(node, row, expert, self.holders_EN[expert, node] > 0)
                else:
                    self.look_without(node, row, expert)
                self.join(row, 0)
        if beside >= 0:
            hops, fill = max(hops, self.hops_E[beside]), max(fill, self.fill_E[beside])
        return self.joined_seconds(hops, fill)

    def joined_seconds(self, hops: int, fill: int) -> float:
        """Seconds by what all nodes do, and by the longest path of an expert."""
        if self.is_smooth:
            for column in range(7):
                self.all_nodes[column] = _eighth_root(self.all_nodes[column])
        tokens, near, moved_near = self.all_nodes[0], self.all_nodes[1], self.all_nodes[2]
        moved_device, moved_far = self.all_nodes[3], self.all_nodes[4]
        far_device, far = self.all_nodes[5], self.all_nodes[6]
        self.num_prices += 1
        # Less is the rounding error of a difference.
        near = near if near > NO_PAIRS * self.all_pairs else 0.0
        far = far if far > NO_PAIRS * self.all_pairs else 0.0
        return self.costs.seconds(
            tokens, near, far, far_device, moved_near, moved_far, moved_device, hops, fill
        )


def _raised(is_smooth: bool, value: float) -> float:
    """A number, or its eighth power."""
    if not is_smooth:
        return value
    fourth = value * value * value * value
    return fourth * fourth


def _join(is_smooth: bool, most: float, value: float) -> float:
    """The higher of two numbers, or the sum of two eighth powers."""
    return most + value if is_smooth else max(most, value)


def _eighth_root(number: float) -> float:
    return sqrt(sqrt(sqrt(number)))
