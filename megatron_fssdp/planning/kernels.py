# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: infer_types=True, annotation_typing=False
"""Everything of planning that loops over experts and devices: the only compiled file.

The file is Python in Cython's pure-Python mode. An installation with a C compiler makes an extension module
of it; without one, Python runs this file itself, about a hundred times slower and with equal results
(``compiled_form.py``). Arrays are in C order: int64 for whole numbers, float64 for others. Indexes are not
checked, so they are never negative here. Sums are added in a fixed order, and the compiler may not contract
``a * b + c``: all ranks, in both forms, must find the same placements.

Shape letters: E experts, D devices, N nodes, P pairs of expert and device.
"""

import cython
import numpy as np
from cython.cimports.libc.math import sqrt

# Parts of the mean load that owners keep in seeds, between 0.82 and 0.12. The low ones need many slots.
_HIGHEST_LEVEL = 0.82
_LEVEL_STEP = 0.14
_NUM_LEVELS = 6
# Experts of the busiest device, and of the busiest link, that one step of the descent looks at. More of them
# take longer and find little more.
_WIDTH = 2
# Prices of all kicks, times the number of experts: small layers need more kicks, and their prices are quick.
_KICK_PRICES = 10000
# Part of a price below which a difference is rounding.
_ROUNDING = 1e-9
# Most experts of a link whose transfers cost nothing in a descent.
_MOST_FREE = 64
# Part of all pairs below which the traffic of a link is the rounding error of a difference.
_NO_PAIRS = 1e-12
# Bits of a number of hops inside a node, which is at most the logarithm of the devices.
_HOP_BITS = 6
# Rows of what devices and nodes do.
_WORK = 0
_IN = 1
_OUT = 2
_GETS = 3
_SENDS = 4


class Trees:
    """The two-level trees along which experts travel to replicas; ``transfer_plan.py`` has the rule.

    ``nodes`` are ``Topology.arrays``. Every device has its place in its node, ``place_D``. From the place
    ``start_E`` on, the leaders of an expert in other nodes are sought. ``has_ED`` is 1 where a device has an
    expert. ``line_D`` has the holders of one expert in one node, in the order in which they get it.
    """

    def __init__(self, owner_E: object, nodes: object, present_ED: object) -> None:
        self.owner_E = memoryview(owner_E)
        self.node_D, self.member_D, self.first_N = map(memoryview, nodes)
        self.num_experts, self.num_devices = len(owner_E), len(self.node_D)
        self.num_nodes = len(self.first_N) - 1
        self.place_D, self.line_D = _ints(self.num_devices), _ints(self.num_devices)
        self.start_E = _ints(self.num_experts)
        self.has_ED = memoryview(np.array(present_ED, np.uint8))
        owned_D = _ints(self.num_devices)
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


class Price:
    """Seconds of a layer in an iteration; ``cost/layer_seconds.py`` says what they contain.

    ``costs`` has the attributes from ``dispatch`` to ``early``, in this order.

    Attributes:
        dispatch, combine: ``[3, 2]``: start-up and seconds of a pair, on links inside nodes, between nodes,
            and between nodes for a device alone, whose start-up is not used.
        moves: The same of a transfer, for an expert and for its gradient, ``[3, 3]``.
        limits_devices: Whether one device alone reaches less between nodes than all of its node together.
        of_hops: By number of hops of a gather, the seconds of a message inside nodes and between nodes, and
            the least seconds of the whole; then the same for a reduction; and both again for a transfer
            that crosses nodes; ``[hops + 1, 12]``.
        per_token: Seconds of the experts for a pair in both passes.
        times: Number of micro-batches.
        counts: Seconds between gate and dispatch in a micro-batch.
        hidden: Compute that hides a gather, and ``hidden_back`` a reduction.
        in_turn: Whether links inside nodes work after those between nodes in an exchange.
        early: Part of a gather beside the experts of the layer before.
        first: Seconds of the gather before the gate if it is not that of all replicas; otherwise -1.
        added: Seconds of the gather after the gate.
        is_far: Whether links between nodes took longest in the last exchange or transfer.
    """

    def __init__(self, costs: tuple) -> None:
        self.dispatch, self.combine, self.moves, self.of_hops = costs[:4]
        self.per_token, self.times, self.counts, self.hidden, self.hidden_back = costs[4:9]
        life, self.in_turn, self.early = costs[9:]
        self.limits_devices = self.moves[2, 1] > self.moves[1, 1]
        self.is_resident, self.is_pass = life == "RESIDENT", life == "LAYER_PASS"
        self.is_micro_batch = life == "MICRO_BATCH"
        self.first, self.added = -1.0, 0.0

    def parts(
        self,
        tokens: float,
        near: float,
        far: float,
        device: float,
        replicas: tuple,
        gather: tuple,
        addition: tuple,
    ) -> tuple:
        """Seconds of all-to-alls, of experts, and for which compute waits for gathers and for reductions.

        The numbers are the pairs of the device that computes most and those on the busiest links inside
        nodes, of a node and of a ``device`` between nodes, and three gathers: of all replicas, before the
        gate and after it. A gather has experts on the busiest links, hops, and the hops of both kinds before
        the last one of the longest path.
        """
        self.first, self.added = self.gather_of(gather), self.gather_of(addition)
        moved_near, moved_far, moved_device, hops, near_hops, far_hops = replicas
        fill = (far_hops << _HOP_BITS) + near_hops
        self.seconds(tokens, near, far, device, moved_near, moved_far, moved_device, hops, fill)
        return self.all_to_all, self.experts, self.waits, self.waits_back

    def gather_of(self, traffic: tuple) -> float:
        """Seconds of a gather, as in :meth:`parts`."""
        near, far, device, hops, near_hops, far_hops = traffic
        return self.transfer(1, near, far, device, hops, (far_hops << _HOP_BITS) + near_hops)

    def exchange(self, lines: memoryview, near: float, far: float, device: float) -> float:
        """Seconds of an all-to-all with pairs on the busiest links, as in :meth:`parts`."""
        near = lines[0, 0] + near * lines[0, 1] if near > 0.0 else 0.0
        far = lines[1, 0] + max(far * lines[1, 1], device * lines[2, 1]) if far > 0.0 else 0.0
        self.is_far = far >= near
        return near + far if self.in_turn else max(near, far)

    def transfer(self, column: int, near: float, far: float, device: float, hops: int, fill: int) -> float:
        """Seconds of a gather (column 1) or of a reduction (2); ``layer_seconds.transfer_times`` explains."""
        if hops == 0:
            return 0.0
        first = 3 * (column - 1) + (6 if far > 0.0 else 0)
        filling = (fill & ((1 << _HOP_BITS) - 1)) * self.of_hops[hops, first]
        filling += (fill >> _HOP_BITS) * self.of_hops[hops, first + 1]
        least = self.of_hops[hops, first + 2]
        if near > 0.0:
            near = self.moves[0, 0] + near * self.moves[0, column]
            near = max(near + filling, least) if near > 0.0 else 0.0
        if far > 0.0:
            far = self.moves[1, 0] + max(far * self.moves[1, column], device * self.moves[2, column])
            far = max(far + filling, least) if far > 0.0 else 0.0
        self.is_far = far >= near
        return max(near, far)

    def seconds(
        self,
        tokens: float,
        near: float,
        far: float,
        device: float,
        moved_near: float,
        moved_far: float,
        moved_device: float,
        hops: int,
        fill: int,
    ) -> float:
        """Seconds of the layer from what its busiest devices and links do; ``fill`` as in :class:`Layer`."""
        dispatch = self.exchange(self.dispatch, near, far, device)
        combine = self.exchange(self.combine, near, far, device)
        combine_is_far = self.is_far
        self.all_to_all = self.times * (self.counts + 2.0 * (dispatch + combine))
        self.experts = self.per_token * tokens
        again = self.transfer(1, moved_near, moved_far, moved_device, hops, fill)
        again_is_far = self.is_far
        gather = again if self.first < 0.0 else self.first
        reduce = self.transfer(2, moved_near, moved_far, moved_device, hops, fill)
        if self.is_resident:
            self.waits, self.waits_back = 0.0, max(0.0, 2.0 * reduce - self.hidden_back)
        else:
            self.waits = max(0.0, (1.0 - self.early) * gather - self.hidden) + self.added
            self.waits_back = max(0.0, reduce - self.hidden_back)
        if self.is_micro_batch:
            self.waits = self.times * again
            self.waits_back *= self.times
        if self.is_pass and hops > 0:
            left = max(0.0, again - max(0.0, self.hidden_back - reduce))
            if again_is_far != combine_is_far:
                left = max(0.0, left - combine)
            self.waits += (self.times - 1.0) * max(0.0, again - self.hidden) + self.times * left
            self.waits_back *= self.times
        return self.all_to_all + self.experts + self.waits + self.waits_back


class Layer(Trees):
    """One layer with a placement that changes, the traffic of the placement, and its price.

    The sums count all experts that are not *out*. Near traffic stays in a node, far traffic crosses nodes. An
    expert's tokens stay on a device that has it; those of other devices go in equal parts to the holders in
    their node, or to all holders if the node has none.

    Attributes:
        load_ED: (token, k) pairs by expert and source device, and ``load_EN`` by source node; ``rest_EN`` are
            those of devices that lack the expert.
        slots: Most replicas that a device may hold, and ``used_D`` those that it holds.
        holders_E: Number of holders of each expert, and ``holders_EN`` in each node.
        busy: What each device does in its node, then each node, and from the place ``far_at`` on each device
            between nodes, if its NIC limits it; ``[5, 2 D + N]``. Rows: pairs that one computes, gets and
            sends; experts that it gets and sends. A node gets and sends between nodes.
        own: What the expert that was last walked adds to the places of nodes, ``[5, N]``; each of its
            holders computes ``each_far`` pairs of nodes without one.
        hops_E: Hops of each expert's longest path; 0 while it is out.
        fill_E: Hops before the last one of that path: those between nodes, shifted, plus those inside.
        is_smooth: Whether prices have norms of the eighth power in place of the highest numbers of pairs, so
            that every device and link counts a little.
        most: For each node, load, pairs and moved experts of its devices, then pairs and experts of its
            devices between nodes: highest values, or sums of eighth powers; then pairs and experts of the
            node. One more row is of a node with the expert that is out. Then come the rows of all nodes if
            they lack it. ``[2 N + 1, 7]``.
        is_stale_N: 1 for nodes whose devices changed in the node since :meth:`price`.
        version: Rises with each change of ``busy``. In ``known_N``, the last rows of ``most`` were written.
    """

    def __init__(self, layer: tuple) -> None:
        load_ED, load_EN, owner_E, nodes, costs, slots, present_ED = layer
        Trees.__init__(self, owner_E, nodes, present_ED)
        self.load_ED, self.load_EN, self.slots = memoryview(load_ED), memoryview(load_EN), slots
        self.costs = Price(costs)
        devices, num_nodes, experts = self.num_devices, self.num_nodes, self.num_experts
        self.total_E, self.all_pairs, self.num_prices = _reals(experts), 0.0, 0
        self.is_smooth = False
        self.holders_E, self.used_D = _ints(experts), _ints(devices)
        self.hops_E, self.fill_E = _ints(experts), _ints(experts)
        self.holders_EN = memoryview(np.zeros((experts, num_nodes), np.int64))
        self.rest_EN = memoryview(np.array(load_EN))
        self.far_at = devices + num_nodes
        self.busy = memoryview(np.zeros((5, self.far_at + devices)))
        self.own = memoryview(np.zeros((5, num_nodes)))
        self.most = memoryview(np.zeros((2 * num_nodes + 1, 7)))
        self.is_stale_N, self.most_is_smooth = memoryview(np.ones(num_nodes, np.int64)), False
        self.known_N, self.version = _ints(num_nodes), 0
        for expert in range(experts):
            for i in range(num_nodes):
                self.total_E[expert] += self.load_EN[expert, i]
            self.all_pairs += self.total_E[expert]
            for i in range(devices):
                if self.has_ED[expert, i]:
                    self.put(expert, i, 1)
            self.used_D[self.owner_E[expert]] -= 1
            self.count(expert, 1)
        self.start_s = self.price()

    def unserved(self, expert: int) -> float:
        """Pairs of an expert from nodes without a holder."""
        pairs = 0.0
        for node in range(self.num_nodes):
            if self.holders_EN[expert, node] == 0:
                pairs += self.load_EN[expert, node]
        return pairs

    def walk(self, expert: int) -> None:
        """Find what an expert with its holders adds to the places of nodes, and its longest path."""
        self.each_far = self.unserved(expert) / self.holders_E[expert]
        left = self.holders_E[expert]
        position = 0  # place of the node in the chain between nodes
        node = self.node_D[self.owner_E[expert]]
        self.own_hops = 0
        self.own_fill = 0
        for _ in range(self.num_nodes):
            num = self.holders_EN[expert, node]
            left -= num
            self.own[_IN, node] = self.each_far * num
            self.own[_OUT, node] = 0.0 if num > 0 else self.load_EN[expert, node]
            self.own[_GETS, node] = 1.0 if num > 0 and position > 0 else 0.0
            self.own[_SENDS, node] = 1.0 if num > 0 and left > 0 else 0.0
            if num > 0:
                depth = 0
                while num >> (depth + 1):
                    depth += 1
                self.own_hops = max(self.own_hops, position + depth)
                if num > 1:
                    self.own_fill = max(self.own_fill, (position << _HOP_BITS) + depth - 1)
                elif left > 0:
                    self.own_fill = max(self.own_fill, position << _HOP_BITS)
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
                self.busy[_IN, place] += sign * self.own[_IN, node]
                self.busy[_GETS, place] += sign * self.own[_GETS, node]
                self.busy[_SENDS, place] += sign * self.own[_SENDS, node]
                self.count_in(expert, node, sign)
                continue
            self.busy[_OUT, place] += sign * self.own[_OUT, node]
            if self.costs.limits_devices:
                for i in range(self.first_N[node], self.first_N[node + 1]):
                    device = self.member_D[i]
                    self.busy[_OUT, self.far_at + device] += sign * self.load_ED[expert, device]
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
                self.busy[_OUT, device] += sign * self.load_ED[expert, device]
                continue
            self.busy[_WORK, device] += sign * (self.load_ED[expert, device] + share + self.each_far)
            self.busy[_IN, device] += sign * share
            self.busy[_GETS, device] += sign if rank > 0 else 0.0
            self.busy[_SENDS, device] += sign * min(max(num - 1 - 2 * rank, 0), 2)
            if limits:
                self.busy[_IN, self.far_at + device] += sign * self.each_far
                if rank == 0 or rank == num:
                    self.busy[_GETS, self.far_at + device] += sign * self.own[_GETS, node]
                    self.busy[_SENDS, self.far_at + device] += sign * self.own[_SENDS, node]
            rank += 1

    def put(self, expert: int, device: int, sign: int) -> None:
        """Give an expert that is out to one more device (sign 1), or take it away (sign -1)."""
        self.has_ED[expert, device] = 1 if sign > 0 else 0
        self.used_D[device] += sign
        self.holders_E[expert] += sign
        self.holders_EN[expert, self.node_D[device]] += sign
        self.rest_EN[expert, self.node_D[device]] -= sign * self.load_ED[expert, device]

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
            self.look_between(node, node, -1)
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
            computed, got = self.busy[_WORK, device], self.busy[_IN, device]
            sent = self.busy[_OUT, device]
            if has:
                computed += self.load_ED[expert, device] + share + self.each_far
                got += share
            elif num > 0:
                sent += self.load_ED[expert, device]
            tokens = _join(is_smooth, tokens, _raised(is_smooth, computed))
            pairs = _join(is_smooth, pairs, _raised(is_smooth, max(got, sent)))
            got, sent = self.busy[_GETS, device], self.busy[_SENDS, device]
            if has:
                got += 1.0 if rank > 0 else 0.0
                sent += min(max(num - 1 - 2 * rank, 0), 2)
            moved = _join(is_smooth, moved, _raised(is_smooth, max(got, sent)))
            if limits:
                place = self.far_at + device
                got, sent = self.busy[_GETS, place], self.busy[_SENDS, place]
                if has and (rank == 0 or rank == num):
                    got += self.own[_GETS, node]
                    sent += self.own[_SENDS, node]
                moved_far = _join(is_smooth, moved_far, _raised(is_smooth, max(got, sent)))
            rank += has
        self.most[row, 0], self.most[row, 1], self.most[row, 2] = tokens, pairs, moved
        self.most[row, 4] = moved_far

    def look_between(self, node: int, row: int, expert: int) -> None:
        """Write to a row of ``most`` what goes between nodes, but for the experts of single devices."""
        place = self.num_devices + node
        got, sent = self.busy[_IN, place], self.busy[_OUT, place]
        gets, sends = self.busy[_GETS, place], self.busy[_SENDS, place]
        pairs = 0.0
        is_smooth = self.is_smooth
        is_held = expert >= 0 and self.holders_EN[expert, node] > 0
        is_sent = expert >= 0 and not is_held
        if expert >= 0:
            got, sent = got + self.own[_IN, node], sent + self.own[_OUT, node]
            gets, sends = gets + self.own[_GETS, node], sends + self.own[_SENDS, node]
        self.most[row, 5] = _raised(is_smooth, max(got, sent))
        self.most[row, 6] = _raised(is_smooth, max(gets, sends))
        if not self.costs.limits_devices:
            return
        for i in range(self.first_N[node], self.first_N[node + 1]):
            device = self.member_D[i]
            got, sent = self.busy[_IN, self.far_at + device], self.busy[_OUT, self.far_at + device]
            if is_held and self.has_ED[expert, device]:
                got += self.each_far
            elif is_sent:
                sent += self.load_ED[expert, device]
            pairs = _join(is_smooth, pairs, _raised(is_smooth, max(got, sent)))
        self.most[row, 3] = pairs

    def look_without(self, node: int, row: int, expert: int) -> None:
        """Write to a row of ``most`` what a node does while it lacks an expert that was walked."""
        for column in range(5):
            self.most[row, column] = self.most[node, column]
        self.look_between(node, row, expert)

    def price_with(self, expert: int, beside: int) -> float:
        """Seconds with an expert that is out, and one that came in since :meth:`price`; -1 for none."""
        tokens = near = far = far_device = moved_near = moved_far = moved_device = 0.0
        hops, fill, is_smooth = self.hops, self.fill, self.is_smooth
        if expert >= 0:
            self.walk(expert)
            hops, fill = max(hops, self.own_hops), max(fill, self.own_fill)
        if beside >= 0:
            hops, fill = max(hops, self.hops_E[beside]), max(fill, self.fill_E[beside])
        for node in range(self.num_nodes):
            row = node
            if expert >= 0:
                row = self.num_nodes
                is_held = self.holders_EN[expert, node] > 0
                if is_held or (beside >= 0 and self.holders_EN[beside, node] > 0):
                    self.look_at(node, row, expert)
                    self.look_between(node, row, expert)
                elif beside >= 0:
                    self.look_without(node, row, expert)
                else:
                    row += 1 + node
                    if self.known_N[node] != self.version:
                        # The row is the same for all holders of the expert in other nodes.
                        self.look_without(node, row, expert)
                        self.known_N[node] = self.version
            tokens = _join(is_smooth, tokens, self.most[row, 0])
            near = _join(is_smooth, near, self.most[row, 1])
            moved_near = _join(is_smooth, moved_near, self.most[row, 2])
            far_device = _join(is_smooth, far_device, self.most[row, 3])
            moved_device = _join(is_smooth, moved_device, self.most[row, 4])
            far = _join(is_smooth, far, self.most[row, 5])
            moved_far = _join(is_smooth, moved_far, self.most[row, 6])
        if is_smooth:
            tokens, near, far = _eighth_root(tokens), _eighth_root(near), _eighth_root(far)
            far_device, moved_device = _eighth_root(far_device), _eighth_root(moved_device)
            moved_near, moved_far = _eighth_root(moved_near), _eighth_root(moved_far)
        self.num_prices += 1
        # Less is the rounding error of a difference.
        near = near if near > _NO_PAIRS * self.all_pairs else 0.0
        far = far if far > _NO_PAIRS * self.all_pairs else 0.0
        return self.costs.seconds(
            tokens, near, far, far_device, moved_near, moved_far, moved_device, hops, fill
        )


class Search(Layer):
    """The search for the placement with the fewest seconds; ``search.py`` says what it tries and why.

    Attributes:
        best: Seconds of the present placement during a descent.
        kept_s: Seconds of the best placement so far, ``kept_ED``.
        part_E: Parts of the experts in what :meth:`rank` looks at.
        tried_D: Holders of an expert before :meth:`improve`, and in its best trial of ``trial_s`` seconds.
        is_tired_E: 1 for the experts that saved nothing during the present descent.
        want_E: Holders that water filling wants for each expert, and ``plan_D`` the loads of devices then.
            ``order_D`` has the devices in the order of these, and ``taken_D`` those that get an expert.
    """

    def __init__(self, layer: tuple, most_replicated: int, most_prices: int, start_ED: object) -> None:
        Layer.__init__(self, layer)
        experts, devices = self.num_experts, self.num_devices
        self.most_replicated, self.most_prices = most_replicated, most_prices
        self.owners_ED = memoryview(np.array(self.has_ED))
        self.start_ED = memoryview(np.array(start_ED, np.uint8))
        self.kept_ED = memoryview(np.array(self.has_ED))
        self.part_E, self.want_E = _reals(experts), _ints(experts)
        self.hottest_E = memoryview(np.argsort(-np.asarray(self.total_E), kind="stable"))
        self.tried_D = memoryview(np.zeros((2, devices), np.uint8))
        self.is_tired_E = _ints(experts)
        self.plan_D, self.order_D = _reals(devices), memoryview(np.arange(devices))
        self.taken_D = _ints(devices)
        # The same loads, of which a device reads one row.
        self.load_DE = memoryview(np.array(np.asarray(self.load_ED).T, order="C"))
        self.load_NE = memoryview(np.array(np.asarray(self.load_EN).T, order="C"))
        # The experts by owner, and where those of each device begin.
        self.by_owner_E = memoryview(np.argsort(np.asarray(self.owner_E), kind="stable"))
        owned_D = np.bincount(np.asarray(self.owner_E), minlength=devices)
        self.first_D = memoryview(np.concatenate([[0], np.cumsum(owned_D)]))

    def keep(self) -> None:
        """Keep the present placement if it is the best so far."""
        seconds = self.price()
        if seconds < self.kept_s * (1.0 - _ROUNDING):
            self.kept_s = seconds
            _copy(self.has_ED, self.kept_ED)

    def become(self, to_ED: memoryview) -> None:
        """Go to another placement."""
        for expert in range(self.num_experts):
            for device in range(self.num_devices):
                if self.has_ED[expert, device] != to_ED[expert, device]:
                    self.count(expert, -1)
                    self.hold(expert, to_ED, expert)
                    self.count(expert, 1)
                    break

    def hold(self, expert: int, table: memoryview, row: int) -> None:
        """Give an expert that is out the holders of a row of a table."""
        for device in range(self.num_devices):
            if self.has_ED[expert, device] != table[row, device]:
                self.put(expert, device, 1 if table[row, device] else -1)

    def spread(self, expert: int, kind: int) -> None:
        """Take all replicas of an expert that is out (kind 0), or give it more.

        That is one in every node without it (1), one more in every node (2), or one on every device with a
        free slot (3).
        """
        for node in range(self.num_nodes):
            if kind == 2 or (kind == 1 and self.holders_EN[expert, node] == 0):
                device = self.least_loaded(expert, node, False)
                if device >= 0:
                    self.put(expert, device, 1)
        for device in range(self.num_devices):
            if kind == 0 and self.has_ED[expert, device] and device != self.owner_E[expert]:
                self.put(expert, device, -1)
            elif kind == 3 and not self.has_ED[expert, device] and self.used_D[device] < self.slots:
                self.put(expert, device, 1)

    def may_grow(self, expert: int) -> bool:
        """Whether an expert may get replicas."""
        if self.most_replicated >= self.num_experts:
            return True
        num = 0
        for other in range(self.num_experts):
            num += self.holders_E[other] > 1
        return self.holders_E[expert] > 1 or num < self.most_replicated

    def rank(self, of_links: bool) -> None:
        """Write to ``part_E`` the parts of the busiest device, or of the link whose pairs take longest."""
        at = 0
        column = _WORK
        most = -1.0
        first = _IN if of_links else _WORK
        last = _OUT if of_links else _WORK
        for place in range(self.far_at + self.num_devices if of_links else self.num_devices):
            kind = 0 if place < self.num_devices else 1 if place < self.far_at else 2
            seconds = self.costs.dispatch[kind, 1] + self.costs.combine[kind, 1] if of_links else 1.0
            for side in range(first, last + 1):
                if seconds * self.busy[side, place] > most:
                    most, at, column = seconds * self.busy[side, place], place, side
        for expert in range(self.num_experts):
            self.part_E[expert] = 0.0 if self.is_tired_E[expert] else self.part_of(expert, at, column)

    def part_of(self, expert: int, place: int, column: int) -> float:
        """The part of an expert in one number of ``busy``."""
        if place >= self.far_at:
            device = place - self.far_at
            if column == _OUT:
                is_sent = self.holders_EN[expert, self.node_D[device]] == 0
                return self.load_ED[expert, device] if is_sent else 0.0
            return self.unserved(expert) / self.holders_E[expert] if self.has_ED[expert, device] else 0.0
        is_device = place < self.num_devices
        node = self.node_D[place] if is_device else place - self.num_devices
        num = self.holders_EN[expert, node]
        if column == _OUT:
            if is_device:
                return self.load_ED[expert, place] if num > 0 and not self.has_ED[expert, place] else 0.0
            return self.load_EN[expert, node] if num == 0 else 0.0
        if num == 0 or (is_device and not self.has_ED[expert, place]):
            return 0.0
        near = self.rest_EN[expert, node] / num
        if is_device and column == _IN:
            return near
        each_far = self.unserved(expert) / self.holders_E[expert]
        return self.load_ED[expert, place] + near + each_far if is_device else each_far * num

    def largest_part(self) -> int:
        """The expert with the highest ``part_E``; of equal ones the first."""
        largest = 0
        for expert in range(self.num_experts):
            if self.part_E[expert] > self.part_E[largest]:
                largest = expert
        return largest

    def least_loaded(self, expert: int, node: int, is_full: bool) -> int:
        """The least loaded device of a node without the expert and with a free slot, or full; -1 if none."""
        found = -1
        for i in range(self.first_N[node], self.first_N[node + 1]):
            device = self.member_D[i]
            if self.has_ED[expert, device] or (self.used_D[device] >= self.slots) != is_full:
                continue
            if found < 0 or self.busy[_WORK, device] < self.busy[_WORK, found]:
                found = device
        return found

    def note(self, expert: int) -> None:
        """Price the present holders of an expert that is out; remember them if they are the best trial."""
        seconds = self.price_with(expert, -1)
        if seconds < self.trial_s * (1.0 - _ROUNDING):
            self.trial_s = seconds
            for device in range(self.num_devices):
                self.tried_D[1, device] = self.has_ED[expert, device]

    def try_put(self, expert: int, device: int, sign: int) -> None:
        """Note one more replica (sign 1), or one less, of an expert that is out; nothing is changed."""
        self.put(expert, device, sign)
        self.note(expert)
        self.put(expert, device, -sign)

    def improve(self, expert: int) -> bool:
        """Make the best change of one expert's holders; say whether there was one."""
        self.count(expert, -1)
        if self.price() >= self.best * (1.0 - _ROUNDING):  # other experts decide the price
            self.count(expert, 1)
            return False
        may_grow = self.may_grow(expert)
        for device in range(self.num_devices):
            self.tried_D[0, device] = self.has_ED[expert, device]
        self.trial_s = self.best
        for node in range(self.num_nodes):
            free = self.least_loaded(expert, node, False) if may_grow else -1
            if free >= 0:
                self.try_put(expert, free, 1)
        if may_grow:
            self.spread(expert, 1)
            self.note(expert)
            self.hold(expert, self.tried_D, 0)
        if self.trial_s == self.best:
            for device in range(self.num_devices):
                if self.tried_D[0, device] and device != self.owner_E[expert]:
                    self.try_put(expert, device, -1)
            if may_grow:
                self.spread(expert, 3)
                self.note(expert)
            self.spread(expert, 0)
            self.note(expert)
        gained = self.trial_s < self.best
        self.hold(expert, self.tried_D, 1 if gained else 0)
        self.count(expert, 1)
        self.best = self.trial_s
        return gained

    def swap(self, expert: int) -> bool:
        """Let an expert take the place of the least useful replica of a full device, if this gains; say so.

        The other expert loses the replica, or gets one where this expert gives one up.
        """
        to = -1
        instead = -1
        given = -1
        least = self.best
        if not self.may_grow(expert):
            return False
        self.count(expert, -1)
        for node in range(self.num_nodes):
            device = self.least_loaded(expert, node, True)
            other = -1 if device < 0 else self.least_useful(device)
            if other < 0:
                continue
            self.count(other, -1)
            if self.price() < least * (1.0 - _ROUNDING):
                # The other expert loses the replica, or gets the one of this expert on a device `back`.
                for back in range(-1, self.num_devices):
                    if back == 0 and to >= 0:
                        break
                    if back >= 0 and (
                        not self.has_ED[expert, back]
                        or back == self.owner_E[expert]
                        or self.has_ED[other, back]
                    ):
                        continue
                    seconds = self.price_exchange(expert, other, device, back)
                    if seconds < least * (1.0 - _ROUNDING):
                        least, to, instead, given = seconds, device, other, back
            self.count(other, 1)
        if to >= 0:
            self.count(instead, -1)
            self.exchange(expert, instead, to, given)
            self.count(instead, 1)
            self.best = least
        self.count(expert, 1)
        return to >= 0

    def price_exchange(self, expert: int, other: int, device: int, back: int) -> float:
        """Seconds after an :meth:`exchange` of two experts that are out; nothing is changed."""
        self.exchange(expert, other, device, back)
        self.count(other, 1)
        seconds = self.price_with(expert, other)
        self.count(other, -1)
        self.exchange(other, expert, device, back)
        return seconds

    def exchange(self, comes: int, goes: int, device: int, back: int) -> None:
        """Let one expert take another's place on a device, and the other way round on ``back``, unless -1."""
        self.put(goes, device, -1)
        self.put(comes, device, 1)
        if back >= 0:
            moves = -1 if self.has_ED[comes, back] else 1
            self.put(comes, back, moves)
            self.put(goes, back, -moves)

    def least_useful(self, device: int) -> int:
        """The expert whose replica on a device has the smallest part of its tokens; -1 if there is none."""
        found = -1
        least = 0.0
        for expert in range(self.num_experts):
            if self.has_ED[expert, device] and self.owner_E[expert] != device:
                part = self.total_E[expert] / self.holders_E[expert]
                if found < 0 or part < least:
                    found, least = expert, part
        return found

    def descend(self, is_smooth: bool, num_free: int) -> None:
        """Change experts of the busiest device and of the busiest link while this saves seconds.

        The result is kept by the exact price. Meanwhile, ``num_free`` more experts on each link cost nothing.
        """
        hidden, hidden_back = self.costs.hidden, self.costs.hidden_back
        if num_free > 0:
            start = self.costs.moves[1, 0]
            expert_s = max(self.costs.moves[0, 1], self.costs.moves[1, 1], self.costs.moves[2, 1])
            self.costs.hidden += start + num_free * expert_s
            expert_s = max(self.costs.moves[0, 2], self.costs.moves[1, 2], self.costs.moves[2, 2])
            self.costs.hidden_back += start + num_free * expert_s
        for expert in range(self.num_experts):
            self.is_tired_E[expert] = 0
        last = self.num_prices + self.most_prices
        self.is_smooth = is_smooth
        self.best = self.price()
        while self.step() and self.num_prices < last:
            pass
        self.is_smooth = False
        self.costs.hidden, self.costs.hidden_back = hidden, hidden_back
        self.keep()

    def step(self) -> bool:
        """Change one expert of the busiest device or link; False if nothing saves seconds."""
        for of_links in range(2):
            self.rank(of_links == 1)
            for _ in range(_WIDTH):
                expert = self.largest_part()
                if self.part_E[expert] <= 0.0:
                    break
                self.part_E[expert] = 0.0
                # Swaps take most of the time and gain only where the exact price counts.
                if self.improve(expert) or (not self.is_smooth and self.swap(expert)):
                    return True
                self.is_tired_E[expert] = 1
        return False

    def climb(self) -> None:
        """Descend by the smooth price while more and more transfers cost nothing.

        One replica that crosses a link makes a whole transfer longer, and the next ones over other links are
        then free. So a single replica rarely pays, although several together do.
        """
        self.become(self.owners_ED)
        self.descend(True, 0)
        num_free = 1
        gained = True
        while num_free <= _MOST_FREE and gained:
            before = self.kept_s
            self.descend(True, num_free)
            gained = num_free == 1 or self.kept_s < before
            num_free *= 2

    def give_away(self, in_all_nodes: bool, level: float, room: int) -> int:
        """Water filling: raise ``want_E`` until no owner keeps more than ``level`` times the mean load.

        The owner with the highest load goes first, and of its experts the one whose next replica takes most
        from it; ``in_all_nodes``, it gets as many at once as there are nodes. The result is the number of
        replicas for which there is still room; 0 if nothing more can be done.
        """
        while room > 0:
            owner = 0
            for device in range(self.num_devices):
                if self.plan_D[device] > self.plan_D[owner]:
                    owner = device
            if self.plan_D[owner] <= level * self.all_pairs / self.num_devices:
                return room
            picked = -1
            wanted = 0
            most = 0.0
            for i in range(self.first_D[owner], self.first_D[owner + 1]):
                expert = self.by_owner_E[i]
                have = self.want_E[expert]
                more = have + 1
                if in_all_nodes:
                    more = self.num_nodes if have == 1 else have + self.num_nodes
                more = min(more, self.num_devices)
                if more <= have:
                    continue
                gain = self.total_E[expert] * (1.0 / have - 1.0 / more) / (more - have)
                if gain > most:
                    picked, wanted, most = expert, more, gain
            if picked < 0:
                return 0
            self.plan_D[owner] -= most * (wanted - self.want_E[picked])
            room -= wanted - self.want_E[picked]
            self.want_E[picked] = wanted
        return 0

    def place_wanted(self) -> None:
        """Put the replicas of ``want_E`` on the devices that then have least, spread over the nodes."""
        num_placed = 0
        self.sort(self.order_D, self.num_devices)
        for expert in range(self.num_experts):
            self.part_E[expert] = (
                self.total_E[expert] / self.want_E[expert] if self.want_E[expert] > 1 else 0.0
            )
        while num_placed < self.most_replicated:
            picked = self.largest_part()
            part = self.part_E[picked]
            if part <= 0.0:
                return
            self.part_E[picked] = 0.0
            num_placed += 1
            most = (self.want_E[picked] + self.num_nodes - 1) // self.num_nodes
            self.count(picked, -1)
            self.place(picked, part, most)
            self.count(picked, 1)

    def place(self, expert: int, part: float, most: int) -> None:
        """Put the replicas of ``want_E`` of an expert that is out, at most so many holders in a node.

        ``order_D`` stays in order, although devices with a new replica move back in it.
        """
        num_taken = 0
        num_left = 0
        for i in range(self.num_devices):
            device = self.order_D[i]
            is_free = not self.has_ED[expert, device] and self.used_D[device] < self.slots
            if (
                is_free
                and num_taken < self.want_E[expert] - 1
                and self.holders_EN[expert, self.node_D[device]] < most
            ):
                self.put(expert, device, 1)
                self.plan_D[device] += part
                self.taken_D[num_taken] = device
                num_taken += 1
            else:
                self.order_D[num_left] = device
                num_left += 1
        self.sort(self.taken_D, num_taken)
        at = self.num_devices
        while num_taken > 0:
            at -= 1
            if num_left > 0 and self.has_less(self.taken_D[num_taken - 1], self.order_D[num_left - 1]):
                num_left -= 1
                self.order_D[at] = self.order_D[num_left]
            else:
                num_taken -= 1
                self.order_D[at] = self.taken_D[num_taken]

    def sort(self, devices: memoryview, num: int) -> None:
        """Sort the first ``num`` of these devices by ``plan_D``, equal ones by number; most are in order."""
        for i in range(1, num):
            device = devices[i]
            at = i
            while at > 0 and self.has_less(device, devices[at - 1]):
                devices[at] = devices[at - 1]
                at -= 1
            devices[at] = device

    def has_less(self, one: int, other: int) -> bool:
        """Whether the first of two devices has the lower ``plan_D``, or an equal one and the lower number."""
        if self.plan_D[one] == self.plan_D[other]:
            return one < other
        return self.plan_D[one] < self.plan_D[other]

    def seed_by_levels(self) -> None:
        """Keep the best placement in which owners give load away until they keep a part of the mean."""
        for kind in range(2 if self.num_nodes > 1 else 1):
            room = self.slots * self.num_devices
            for i in range(self.num_experts):
                self.want_E[i] = 1
            for level in range(_NUM_LEVELS):
                if room == 0:  # the last level already used all slots
                    break
                # Replicas change plan_D while they are placed, so it is computed anew at each level.
                for i in range(self.num_devices):
                    self.plan_D[i] = 0.0
                for i in range(self.num_experts):
                    self.plan_D[self.owner_E[i]] += self.total_E[i] / self.want_E[i]
                before = room
                room = self.give_away(kind == 1, _HIGHEST_LEVEL - level * _LEVEL_STEP, room)
                if room != before:
                    self.become(self.owners_ED)
                    self.place_wanted()
                    self.keep()

    def seed_by_sources(self) -> None:
        """Keep the best placement in which devices, or nodes, have the one or two experts they use most."""
        for kind in range(4 if self.num_nodes > 1 else 2):
            self.become(self.owners_ED)
            num_replicated = 0
            for turn in range(min(self.slots, 1 + kind % 2) * self.num_devices):
                num_replicated += self.fetch(turn % self.num_devices, kind > 1, num_replicated)
            for expert in range(self.num_experts):
                if self.holders_E[expert] > 1:
                    self.count(expert, 1)
            self.keep()

    def fetch(self, device: int, for_node: bool, num: int) -> int:
        """Give a device the missing expert to which it, or its node, sends most; 1 if it was counted."""
        node = self.node_D[device]
        found = -1
        most = 0.0
        for expert in range(self.num_experts):
            load = self.load_NE[node, expert] if for_node else self.load_DE[device, expert]
            if load > most and (num < self.most_replicated or self.holders_E[expert] > 1):
                has = self.holders_EN[expert, node] > 0 if for_node else self.has_ED[expert, device]
                if not has:
                    found, most = expert, load
        is_first = found >= 0 and self.holders_E[found] == 1
        if is_first:
            self.count(found, -1)  # out until all replicas are placed
        if found >= 0:
            self.put(found, device, 1)
        return 1 if is_first else 0

    def prune(self) -> None:
        """Drop the replicas without which the kept placement costs no more."""
        self.become(self.kept_ED)
        for expert in range(self.num_experts):
            if self.holders_E[expert] == 1:
                continue
            self.count(expert, -1)
            self.price()
            for device in range(self.num_devices):
                if self.has_ED[expert, device] and device != self.owner_E[expert]:
                    self.put(expert, device, -1)
                    seconds = self.price_with(expert, -1)
                    if seconds <= self.kept_s:
                        self.kept_s = seconds
                    else:
                        self.put(expert, device, 1)
            self.count(expert, 1)
        _copy(self.has_ED, self.kept_ED)

    def kick(self) -> None:
        """Change all replicas of one expert at once and descend; keep what gains, otherwise go back."""
        self.most_prices = _KICK_PRICES // self.num_experts
        last = self.num_prices + self.most_prices
        turn = 0
        missed = 0
        while missed < 3 * self.num_experts and self.num_prices < last:
            expert = self.hottest_E[turn // 3 % self.num_experts]
            before = self.kept_s
            self.become(self.kept_ED)
            if turn % 3 == 0 or self.may_grow(expert):
                self.count(expert, -1)
                self.spread(expert, turn % 3)
                self.count(expert, 1)
                self.descend(False, 0)
            turn += 1
            missed = 0 if self.kept_s < before else missed + 1

    def run(self) -> None:
        """Search; the result is ``kept_ED`` and ``kept_s``."""
        self.kept_s = self.start_s
        self.seed_by_sources()
        self.seed_by_levels()
        self.become(self.start_ED)
        self.keep()
        self.climb()
        self.become(self.kept_ED)
        self.descend(False, 0)
        # Several devices or links are equally busy now, so no single change lowers the exact price.
        self.descend(True, 0)
        self.descend(False, 0)
        self.kick()
        self.prune()


def search_replicas(
    layer: tuple, most_replicated: int, most_prices: int, start_ED: object
) -> tuple[float, float, np.ndarray]:
    """Seconds of a layer without replicas and with those that are found; the placement, bytes ``[E, D]``.

    ``layer`` has the arguments of :class:`Layer`, with a placement without replicas, and ``start_ED`` is one
    more seed.
    """
    search = Search(layer, most_replicated, most_prices, start_ED)
    with cython.nogil:
        search.run()
    return search.start_s, search.kept_s, np.asarray(search.kept_ED)


def spill_below(
    load_E: memoryview,
    by_owner_E: memoryview,
    first_D: memoryview,
    busiest_first_D: memoryview,
    nearest_ED: memoryview,
    room_D: memoryview,
    left_D: memoryview,
    spilled: memoryview,
) -> int:
    """Spill the tokens of devices above a ceiling to the nearest devices with room.

    ``by_owner_E`` has the experts by owner, then by tokens, descending; those of a device begin at
    ``first_D``. Devices come by load, descending (``busiest_first_D``), and for each expert in the order in
    which its tokens spill to them. A device may still take ``room_D`` tokens, negative above the ceiling, and
    ``left_D`` experts.

    The result is the number of rows of ``spilled``, each an expert, a device and a number of tokens; or -1 if
    tokens find no room.
    """
    num = 0
    for i in range(room_D.shape[0]):
        busy = busiest_first_D[i]
        over = -room_D[busy]
        if over <= 0:
            break
        for j in range(first_D[busy], first_D[busy + 1]):
            expert = by_owner_E[j]
            left = min(over, load_E[expert])
            over -= left
            for k in range(room_D.shape[0]):
                if left == 0:
                    break
                device = nearest_ED[expert, k]
                taken = min(left, room_D[device])
                if taken > 0 and left_D[device] > 0:
                    spilled[num, 0] = expert
                    spilled[num, 1] = device
                    spilled[num, 2] = taken
                    num += 1
                    room_D[device] -= taken
                    left_D[device] -= 1
                    left -= taken
            over += left
        if over > 0:
            return -1
    return num


def greedy_steps(
    owner_E: memoryview,
    load_E: memoryview,
    inputs_ED: memoryview,
    fewest_first_ED: memoryview,
    computed_D: memoryview,
    received_D: memoryview,
    left_D: memoryview,
    is_selected_E: memoryview,
    replicas: memoryview,
    after: memoryview,
    tolerance: float,
    num_left_out: int,
) -> int:
    """Pro-Prophet's greedy search (Alg. 1) for one number of left-out devices; the result counts its steps.

    An expert has ``load_E`` inputs, ``inputs_ED`` by source device; ``fewest_first_ED`` has the devices in
    the order of these. Devices compute ``computed_D`` inputs, receive ``received_D`` and may still get
    ``left_D`` replicas. A selected expert is not sent to the ``num_left_out`` devices with the fewest inputs
    for it. The load is balanced if the loads of devices differ by less than ``tolerance``.

    ``replicas`` gets expert and device of each replica, and ``after`` a row for each step: replicas so far,
    the most inputs that a device receives and the most that one computes.
    """
    num_replicas = 0
    for step in range(after.shape[0]):
        owner = 0
        lowest = 0
        for device in range(computed_D.shape[0]):
            if computed_D[device] > computed_D[owner]:
                owner = device
            if computed_D[device] < computed_D[lowest]:
                lowest = device
        if computed_D[owner] - computed_D[lowest] < tolerance:
            return step
        selected = -1
        for expert in range(owner_E.shape[0]):
            if owner_E[expert] != owner or is_selected_E[expert] or load_E[expert] == 0:
                continue
            if selected < 0 or load_E[expert] > load_E[selected]:
                selected = expert
        if selected < 0:
            return step
        is_selected_E[selected] = 1
        num_passed = 0
        before = num_replicas
        for i in range(computed_D.shape[0]):
            device = fewest_first_ED[selected, i]
            if device == owner:
                continue
            num_passed += 1
            if num_passed > num_left_out and left_D[device] > 0:
                computed_D[device] += inputs_ED[selected, device]
                computed_D[owner] -= inputs_ED[selected, device]
                received_D[owner] -= inputs_ED[selected, device]
                left_D[device] -= 1
                replicas[num_replicas, 0] = selected
                replicas[num_replicas, 1] = device
                num_replicas += 1
        # Without room, further steps would change nothing but the number of selected experts.
        has_room = num_replicas > before
        for device in range(computed_D.shape[0]):
            has_room = has_room or left_D[device] > 0
            after[step, 1] = max(after[step, 1], received_D[device])
            after[step, 2] = max(after[step, 2], computed_D[device])
        if not has_room:
            return step
        after[step, 0] = num_replicas
    return after.shape[0]


def _copy(source_ED: memoryview, to_ED: memoryview) -> None:
    for expert in range(source_ED.shape[0]):
        for device in range(source_ED.shape[1]):
            to_ED[expert, device] = source_ED[expert, device]


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


def _ints(size: int) -> memoryview:
    return memoryview(np.zeros(size, np.int64))


def _reals(size: int) -> memoryview:
    return memoryview(np.zeros(size, np.float64))
