# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
# cython: infer_types=True, annotation_typing=False
"""The price of a layer whose placement changes."""

import cython
import numpy as np
from cython.cimports.libc.math import sqrt

from megatron_fssdp.planning.arrays import zero_reals
from megatron_fssdp.planning.cost.layer_costs import CostedLayer
from megatron_fssdp.planning.placement.placement import ExpertPlacement

if not cython.compiled:  # the .pxd file imports them for C
    from megatron_fssdp.planning.kernels.constants import LEAST_LEFT, NO_PAIRS, NO_PRICE, ROUNDING
    from megatron_fssdp.planning.kernels.layer_traffic import LayerTraffic


class PricedLayer(LayerTraffic):
    """One layer with a placement that changes, and its price.

    Attributes:
        is_smooth: Whether prices have norms of the eighth power in place of the highest numbers of pairs, so
            that every device and link counts a little.
        most: For each node the highest values, or sums of eighth powers, of its devices' load, pairs and
            moved experts in the node, experts between nodes; then the node's experts between nodes; then
            pairs between nodes, of its devices and of the node. One more row is of a node with the expert
            that is out, and one of all nodes that lack it. The last rows have nodes that lack it.
            ``[2 N + 2, 7]``.
        all_nodes: The columns of ``most``, joined for all nodes.
        rest_s: Seconds of the last :meth:`price` but for the experts'.
        most_work: Highest load, or sum of eighth powers, of trials that are not left out.
        known: The version of the sums for which the rows of nodes that lack an expert were written.
    """

    def __init__(self, layer: CostedLayer, placement: ExpertPlacement, slots: int) -> None:
        LayerTraffic.__init__(self, layer, placement, slots)
        self.num_prices, self.known, self.most_work = 0, -1, NO_PRICE
        self.is_smooth = self.most_is_smooth = False
        self.most, self.all_nodes = memoryview(np.zeros((2 * self.num_nodes + 2, 7))), zero_reals(7)
        self.start_s = self.price()

    def price(self) -> float:
        """Seconds of the layer without the experts that are out, which every placement of theirs exceeds."""
        self.hops = self.fill = 0
        for i in range(self.num_experts):
            self.hops = max(self.hops, self.hops_E[i])
            self.fill = max(self.fill, self.fill_E[i])
        for node in range(self.num_nodes):
            if self.is_stale_N[node] or self.is_smooth != self.most_is_smooth:
                self.look_at(node, node)
                self.is_stale_N[node] = 0
            self.look_between(node, node, -1)
        self.most_is_smooth = self.is_smooth
        seconds = self.price_with(-1, -1)
        self.rest_s = seconds - self.costs.experts
        return seconds

    def aim_below(self, seconds: float) -> None:
        """Leave out trials that cost more, because the load of one device alone does."""
        self.most_work = NO_PRICE
        if self.costs.per_token > 0.0:
            work = (seconds * (1.0 + ROUNDING) - self.rest_s) / self.costs.per_token
            self.most_work = _raised(self.is_smooth, work)

    def look_at(self, node: int, row: int) -> None:
        """Write to a row of ``most`` what a node's devices do in it, and the experts of single devices."""
        tokens = pairs = moved = moved_far = 0.0
        is_smooth = self.is_smooth
        for i in range(self.first_N[node], self.first_N[node + 1]):
            device = self.member_D[i]
            tokens = _join(is_smooth, tokens, _raised(is_smooth, self.work[device]))
            most = max(self.pairs_in[device], self.pairs_out[device])
            pairs = _join(is_smooth, pairs, _raised(is_smooth, most))
            most = max(self.moves_in[device], self.moves_out[device])
            moved = _join(is_smooth, moved, _raised(is_smooth, most))
            if self.costs.limits_devices:
                most = max(self.moves_in[self.far_at + device], self.moves_out[self.far_at + device])
                moved_far = _join(is_smooth, moved_far, _raised(is_smooth, most))
        self.most[row, 0], self.most[row, 1], self.most[row, 2] = tokens, pairs, moved
        self.most[row, 3] = moved_far

    def look_between(self, node: int, row: int, expert: int) -> None:
        """Write to a row of ``most`` what else goes between nodes; the node lacks an expert, or -1."""
        place = self.num_devices + node
        sent = self.pairs_out[place]
        is_smooth = self.is_smooth
        if expert >= 0:
            sent += self.load_EN[expert, node]
        self.most[row, 4] = _raised(is_smooth, max(self.moves_in[place], self.moves_out[place]))
        self.most[row, 6] = _raised(is_smooth, max(self.pairs_in[place], sent))
        if not self.costs.limits_devices:
            return
        pairs = 0.0
        for i in range(self.first_N[node], self.first_N[node + 1]):
            device = self.member_D[i]
            sent = self.pairs_out[self.far_at + device]
            if expert >= 0:
                sent += self.load_ED[expert, device]
            pairs = _join(
                is_smooth, pairs, _raised(is_smooth, max(self.pairs_in[self.far_at + device], sent))
            )
        self.most[row, 5] = pairs

    def add_holders(self, node: int, row: int, expert: int, without: int) -> None:
        """Write to a row of ``most`` what a node does with a walked expert; another row is without it."""
        is_smooth, limits = self.is_smooth, self.costs.limits_devices
        tokens, moved, moved_far = self.most[without, 0], self.most[without, 2], self.most[without, 3]
        far_device, pairs = self.most[without, 5], 0.0
        num = self.holders_EN[expert, node]
        share = self.rest_EN[expert, node] / num
        at = self.leader_at(expert, node)
        rank = self.rank_of_first(expert, node, at)
        for i in range(self.first_N[node], self.first_N[node + 1]):
            if i == at:
                rank = 0
            device = self.member_D[i]
            got, sent = self.pairs_in[device], self.pairs_out[device]
            if not self.has_ED[expert, device]:
                sent += self.load_ED[expert, device]
                pairs = _join(is_smooth, pairs, _raised(is_smooth, max(got, sent)))
                continue
            pairs = _join(is_smooth, pairs, _raised(is_smooth, max(got + share, sent)))
            least = self.work[device]
            tokens = _grow(
                is_smooth, tokens, least, least + (self.load_ED[expert, device] + share + self.each_far)
            )
            got, sent = self.moves_in[device], self.moves_out[device]
            least = max(got, sent)
            got += 1.0 if rank > 0 else 0.0
            sent += min(max(num - 1 - 2 * rank, 0), 2)
            moved = _grow(is_smooth, moved, least, max(got, sent))
            if limits:
                place = self.far_at + device
                if rank == 0 or rank == num:
                    got, sent = self.moves_in[place], self.moves_out[place]
                    least = max(got, sent)
                    more = max(got + self.own_in[node], sent + self.own_out[node])
                    moved_far = _grow(is_smooth, moved_far, least, more)
                got, sent = self.pairs_in[place], self.pairs_out[place]
                far_device = _grow(is_smooth, far_device, max(got, sent), max(got + self.each_far, sent))
            rank += 1
        self.most[row, 0], self.most[row, 1], self.most[row, 2] = tokens, pairs, moved
        self.most[row, 3], self.most[row, 5] = moved_far, far_device
        place = self.num_devices + node
        got, sent = self.moves_in[place] + self.own_in[node], self.moves_out[place] + self.own_out[node]
        self.most[row, 4] = _raised(is_smooth, max(got, sent))
        got = self.pairs_in[place] + self.each_far * num
        self.most[row, 6] = _raised(is_smooth, max(got, self.pairs_out[place]))

    def join(self, row: int, first: int, last: int) -> None:
        """Join the columns of a row of ``most`` from the first one to before the last to ``all_nodes``."""
        if self.is_smooth:
            for column in range(first, last):
                self.all_nodes[column] += self.most[row, column]
        else:
            for column in range(first, last):
                self.all_nodes[column] = max(self.all_nodes[column], self.most[row, column])

    def join_holders(self, expert: int) -> bool:
        """Write to ``all_nodes`` what all nodes do with an expert that is out; False to leave it out.

        A node without it does the same wherever its holders are. One with it does more than without, but for
        the pairs that it sends to other nodes.
        """
        row = self.num_nodes
        without = row + 1
        lacking = row + 2
        is_smooth = self.is_smooth
        if self.known != self.version:
            self.known = self.version
            for node in range(self.num_nodes):
                self.look_between(node, lacking + node, expert)
                for column in range(4):
                    self.most[lacking + node, column] = self.most[node, column]
            self.join_all(lacking)
            for column in range(7):
                self.most[without, column] = self.all_nodes[column]
        for column in range(7):
            self.all_nodes[column] = self.most[without, column]
        is_lost = not is_smooth
        if is_smooth:
            for i in range(self.num_held):
                for column in range(7):
                    self.all_nodes[column] -= self.most[lacking + self.held_N[i], column]
            # Of pairs between nodes, so little may be left that it is the rounding error of the difference.
            is_lost = (
                self.all_nodes[5] < LEAST_LEFT * self.most[without, 5]
                or self.all_nodes[6] < LEAST_LEFT * self.most[without, 6]
            )
        if is_lost:
            self.all_nodes[5] = self.all_nodes[6] = 0.0
            for node in range(self.num_nodes):
                if self.holders_EN[expert, node] == 0:
                    self.join(lacking + node, 5, 7)
        for i in range(self.num_held):
            node = self.held_N[i]
            self.add_holders(node, row, expert, node)
            self.join(row, 0, 1)
            if self.all_nodes[0] > self.most_work:
                return False
            self.join(row, 1, 7)
        return True

    def join_all(self, first: int) -> None:
        """Write the rows of all nodes, the first of which is given, joined to ``all_nodes``."""
        for column in range(7):
            self.all_nodes[column] = 0.0
        for node in range(self.num_nodes):
            self.join(first + node, 0, 7)

    def join_beside(self, expert: int, beside: int) -> None:
        """:meth:`join_holders` with another expert that came in since :meth:`price`."""
        row = self.num_nodes
        for column in range(7):
            self.all_nodes[column] = 0.0
        for node in range(self.num_nodes):
            is_held = self.holders_EN[expert, node] > 0
            self.look_between(node, row, -1 if is_held else expert)
            if self.holders_EN[beside, node] > 0:
                self.look_at(node, row)
            else:
                for column in range(4):
                    self.most[row, column] = self.most[node, column]
            if is_held:
                self.add_holders(node, row, expert, row)
            self.join(row, 0, 7)

    def price_with(self, expert: int, beside: int) -> float:
        """Seconds with an expert that is out, and one that came in since :meth:`price`; -1 for none."""
        hops, fill = self.hops, self.fill
        self.num_prices += 1
        if expert < 0:
            self.join_all(0)
            return self.joined_seconds(hops, fill)
        self.walk(expert)
        hops, fill = max(hops, self.own_hops), max(fill, self.own_fill)
        if beside >= 0:
            self.join_beside(expert, beside)
            hops, fill = max(hops, self.hops_E[beside]), max(fill, self.fill_E[beside])
        elif not self.join_holders(expert):
            return NO_PRICE
        return self.joined_seconds(hops, fill)

    def joined_seconds(self, hops: int, fill: int) -> float:
        """Seconds by what all nodes do, and by the longest path of an expert."""
        if self.is_smooth:
            for column in range(7):
                self.all_nodes[column] = _eighth_root(self.all_nodes[column])
        tokens, near, moved_near = self.all_nodes[0], self.all_nodes[1], self.all_nodes[2]
        moved_device, moved_far = self.all_nodes[3], self.all_nodes[4]
        far_device, far = self.all_nodes[5], self.all_nodes[6]
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


def _grow(is_smooth: bool, most: float, before: float, after: float) -> float:
    """:func:`_join` where one of the joined numbers becomes higher."""
    return most + (_raised(is_smooth, after) - _raised(is_smooth, before)) if is_smooth else max(most, after)


def _eighth_root(number: float) -> float:
    return sqrt(sqrt(sqrt(number)))
