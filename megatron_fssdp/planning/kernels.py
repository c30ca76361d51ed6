# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: infer_types=True, annotation_typing=False
"""Everything of planning that loops over experts and devices: the only compiled file.

The file is Python in Cython's pure-Python mode. An installation with a C compiler makes an extension module
of it, which Python then imports in its place; without one, Python runs this file itself, about a hundred
times slower and with equal results (``compiled_form.py``). One language was chosen over a C++ extension
because a second implementation for machines without a compiler would have to be kept equal to the first one.

Callers pass memoryviews of numpy arrays in C order: int64 for whole numbers, float64 for others. The compiler
is told not to check indexes, so indexes are never negative here. Sums are added in a fixed order, and the
compiler may not contract ``a * b + c``: all ranks, in both forms, must find the same placements.

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
_KICK_PRICES = 6000
# Part of a price below which a difference is rounding.
_ROUNDING = 1e-9
# Most experts of a link whose transfers cost nothing in a descent.
_MOST_FREE = 64
# Part of all pairs below which the traffic of a link is the rounding error of a difference.
_NO_PAIRS = 1e-12
# Bits of a number of hops inside a node, which is at most the logarithm of the devices.
_HOP_BITS = 6
# Columns of what devices and nodes do.
_WORK = 0
_IN = 1
_OUT = 2
_GETS = 3
_SENDS = 4


class Trees:
    """The two-level trees along which experts travel to replicas; ``transfer_plan.py`` has the rule.

    Attributes:
        owner_E: Owner of each expert.
        node_D: Node of each device.
        first_N: Position of each node's first device in ``member_D``, and at the end the number of devices.
        member_D: Devices by node, then number.
        place_D: Place of each device in its node.
        start_E: Place from which on the leaders of an expert in other nodes are sought.
        has_ED: 1 where a device has an expert.
        line_D: Holders of one expert in one node, in the order in which they get it.
    """

    def __init__(self, owner_E: object, nodes: object, present_ED: object) -> None:
        """Begin with a placement.

        Args:
            owner_E: Owner of each expert.
            nodes: ``node_D``, ``member_D`` and ``first_N``.
            present_ED: Bytes, 1 where a device has an expert besides its owner; not changed.
        """
        self.owner_E = owner_E
        self.node_D, self.member_D, self.first_N = nodes
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

    def write_edges(self, edges: memoryview) -> int:
        """Write a row for each edge, and return their number; see :func:`two_level_edges`."""
        row = 0
        for expert in range(self.num_experts):
            node = self.node_D[self.owner_E[expert]]
            leader = self.owner_E[expert]
            hops = 0
            for _ in range(self.num_nodes):
                num = self.line_up(expert, node)
                node = node + 1 if node + 1 < self.num_nodes else 0
                if num == 0:
                    continue
                if hops > 0:
                    self.write_edge(edges, row, expert, leader, self.line_D[0], 2 * (hops - 1))
                    row += 1
                leader = self.line_D[0]
                depth = hops - 1
                level_end = 1  # the first position whose depth is higher
                for i in range(1, num):
                    if i == level_end:
                        depth += 1
                        level_end = 2 * level_end + 1
                    self.write_edge(
                        edges, row, expert, self.line_D[(i - 1) // 2], self.line_D[i], 2 * depth + 1
                    )
                    row += 1
                hops += 1
        return row

    def write_edge(self, edges: memoryview, row: int, expert: int, source: int, to: int, depth: int) -> None:
        """Write one edge."""
        edges[row, 0] = expert
        edges[row, 1] = source
        edges[row, 2] = to
        edges[row, 3] = depth


def two_level_edges(owner_E: object, nodes: object, present_ED: object, edges: object) -> int:
    """The edges by which each expert crosses to each node once, and then spreads inside the node.

    Args:
        owner_E: Owner of each expert, int64 ``[E]``.
        nodes: Node of each device, devices by node, first device of each node: three int64 arrays.
        present_ED: Bytes ``[E, D]``, 1 where a device has an expert.
        edges: Gets expert, source, destination and depth of each edge, int64 ``[P, 4]``. The depth is twice
            the number of hops before the edge, plus 1 inside a node.

    Returns:
        The number of edges.
    """
    trees = Trees(owner_E, nodes, present_ED)
    return trees.write_edges(edges)


class Layer(Trees):
    """One layer with a placement that changes, the traffic of the placement, and its price.

    The sums count all experts that are not *out*. Near traffic stays in a node, far traffic crosses nodes. An
    expert's tokens stay on a device that has it; those of other devices go in equal parts to the holders in
    their node, or to all holders if the node has none.

    Attributes:
        load_ED: (token, k) pairs by expert and source device, and ``load_EN`` by source node.
        total_E: Pairs of each expert, and ``all_pairs`` of all.
        slots: Most replicas that a device may hold.
        used_D: Replicas of each device.
        holders_E: Number of holders of each expert, and ``holders_EN`` in each node.
        busy: What each device does, and then each node; ``[D + N, 5]``. Columns: pairs that one computes,
            gets from its node and sends there; experts that it gets from its node and sends there. A node
            gets and sends between nodes.
        own: What the expert that was last walked adds to ``busy``.
        hops_E: Hops of each expert's longest path; 0 while it is out.
        fill_E: Hops before the last one of that path: those between nodes, shifted, plus those inside.
        costs: What a pair, an expert and a hop cost; see ``SearchCosts``.
        num_prices: Prices so far.
        is_smooth: Whether prices have norms of the eighth power in place of the highest numbers of pairs.
            Every device and link then counts a little, and not only the busiest one.
        most: For each node, load, pairs and moved experts of its devices: highest values, or sums of eighth
            powers; and at last the same of one node with the expert that is out. ``[N + 1, 3]``.
    """

    def __init__(
        self,
        load_ED: object,
        load_EN: object,
        owner_E: object,
        nodes: object,
        costs: object,
        slots: int,
        present_ED: object,
    ) -> None:
        """Begin with a placement whose experts are all counted.

        Args:
            load_ED: Pairs by expert and source device, float64 ``[E, D]``.
            load_EN: Pairs by expert and source node, float64 ``[E, N]``.
            owner_E: As in :class:`Trees`, and so are ``nodes`` and ``present_ED``.
            nodes: Nodes.
            costs: The layer's ``SearchCosts``.
            slots: Most replicas that a device may hold.
            present_ED: Replicas.
        """
        Trees.__init__(self, owner_E, nodes, present_ED)
        self.load_ED, self.load_EN, self.slots = load_ED, load_EN, slots
        self.dispatch_near, self.dispatch_far = costs.dispatch_near, costs.dispatch_far
        self.combine_near, self.combine_far = costs.combine_near, costs.combine_far
        self.per_token, self.times = costs.per_token, costs.times
        self.start, self.gather, self.reduce = costs.start, costs.gather, costs.reduce
        self.hidden, self.hidden_back = costs.hidden, costs.hidden_back
        self.each_pass, self.of_hops = costs.each_pass, costs.of_hops
        devices, num_nodes, experts = self.num_devices, self.num_nodes, self.num_experts
        self.total_E, self.all_pairs, self.num_prices = _reals(experts), 0.0, 0
        self.is_smooth = False
        self.holders_E, self.used_D = _ints(experts), _ints(devices)
        self.hops_E, self.fill_E = _ints(experts), _ints(experts)
        self.holders_EN = memoryview(np.zeros((experts, num_nodes), np.int64))
        self.rest_EN = memoryview(np.array(load_EN))
        self.busy = memoryview(np.zeros((devices + num_nodes, 5)))
        self.own = memoryview(np.zeros((devices + num_nodes, 5)))
        self.most = memoryview(np.zeros((num_nodes + 1, 3)))
        self.count_all()

    def count_all(self) -> None:
        """Count the experts and their replicas."""
        for expert in range(self.num_experts):
            for i in range(self.num_nodes):
                self.total_E[expert] += self.load_EN[expert, i]
            self.all_pairs += self.total_E[expert]
            for i in range(self.num_devices):
                if self.has_ED[expert, i]:
                    self.put(expert, i, 1)
            self.used_D[self.owner_E[expert]] -= 1
            self.count(expert, 1)

    def unserved(self, expert: int) -> float:
        """Pairs of an expert from nodes without a holder."""
        pairs = 0.0
        for node in range(self.num_nodes):
            if self.holders_EN[expert, node] == 0:
                pairs += self.load_EN[expert, node]
        return pairs

    def walk(self, expert: int) -> None:
        """Find what an expert with its holders adds to ``busy``; not in nodes without one."""
        each_far = self.unserved(expert) / self.holders_E[expert]
        left = self.holders_E[expert]
        position = 0  # place of the node in the chain between nodes
        node = self.node_D[self.owner_E[expert]]
        self.own_hops = 0
        self.own_fill = 0
        for _ in range(self.num_nodes):
            num = self.holders_EN[expert, node]
            left -= num
            place = self.num_devices + node
            self.own[place, _IN] = each_far * num
            self.own[place, _OUT] = 0.0 if num > 0 else self.load_EN[expert, node]
            self.own[place, _GETS] = 1.0 if num > 0 and position > 0 else 0.0
            self.own[place, _SENDS] = 1.0 if num > 0 and left > 0 else 0.0
            if num > 0:
                self.walk_node(expert, node, each_far)
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

    def walk_node(self, expert: int, node: int, each_far: float) -> None:
        """:meth:`walk` in a node with holders, which also compute ``each_far`` pairs of other nodes each."""
        first = self.first_N[node]
        end = self.first_N[node + 1]
        num = self.holders_EN[expert, node]
        share = self.rest_EN[expert, node] / num
        rank = 0  # of a holder in the tree
        at = self.leader_at(expert, node)
        for _ in range(end - first):
            device = self.member_D[at]
            load = self.load_ED[expert, device]
            if self.has_ED[expert, device]:
                self.own[device, _WORK] = load + share + each_far
                self.own[device, _IN] = share
                self.own[device, _OUT] = 0.0
                self.own[device, _GETS] = 1.0 if rank > 0 else 0.0
                self.own[device, _SENDS] = min(max(num - 1 - 2 * rank, 0), 2)
                rank += 1
            else:
                self.own[device, _WORK] = self.own[device, _IN] = 0.0
                self.own[device, _OUT] = load
                self.own[device, _GETS] = self.own[device, _SENDS] = 0.0
            at = at + 1 if at + 1 < end else first

    def count(self, expert: int, sign: int) -> None:
        """Add an expert to the sums (sign 1), or take it out (sign -1)."""
        self.walk(expert)
        for node in range(self.num_nodes):
            self.add(self.num_devices + node, sign)
            if self.holders_EN[expert, node] > 0:
                for i in range(self.first_N[node], self.first_N[node + 1]):
                    self.add(self.member_D[i], sign)
        self.hops_E[expert] = self.own_hops if sign > 0 else 0
        self.fill_E[expert] = self.own_fill if sign > 0 else 0

    def add(self, place: int, sign: int) -> None:
        """Add one row of ``own`` to the sums."""
        for column in range(5):
            self.busy[place, column] += sign * self.own[place, column]

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
            self.look_at(node, node, 0.0)
        return self.price_with(-1, -1)

    def look_at(self, node: int, row: int, weight: float) -> None:
        """Write to a row of ``most`` what a node's devices do, ``own`` included with a weight."""
        tokens = pairs = moved = 0.0
        is_smooth = self.is_smooth
        for i in range(self.first_N[node], self.first_N[node + 1]):
            device = self.member_D[i]
            computed = self.busy[device, _WORK] + weight * self.own[device, _WORK]
            got = self.busy[device, _IN] + weight * self.own[device, _IN]
            sent = self.busy[device, _OUT] + weight * self.own[device, _OUT]
            tokens = _join(is_smooth, tokens, _raised(is_smooth, computed))
            pairs = _join(is_smooth, pairs, _raised(is_smooth, max(got, sent)))
            got = self.busy[device, _GETS] + weight * self.own[device, _GETS]
            sent = self.busy[device, _SENDS] + weight * self.own[device, _SENDS]
            moved = _join(is_smooth, moved, _raised(is_smooth, max(got, sent)))
        self.most[row, 0] = tokens
        self.most[row, 1] = pairs
        self.most[row, 2] = moved

    def price_with(self, expert: int, beside: int) -> float:
        """Seconds of the layer with experts that were out when :meth:`price` was last called.

        Args:
            expert: An expert that is out, with its present holders; -1 for none.
            beside: An expert that has come in since; -1 for none.
        """
        tokens = near = far = moved_near = moved_far = weight = 0.0
        hops, fill, is_smooth = self.hops, self.fill, self.is_smooth
        if expert >= 0:
            weight = 1.0
            self.walk(expert)
            hops, fill = max(hops, self.own_hops), max(fill, self.own_fill)
        if beside >= 0:
            hops, fill = max(hops, self.hops_E[beside]), max(fill, self.fill_E[beside])
        for node in range(self.num_nodes):
            place = self.num_devices + node
            got = self.busy[place, _IN] + weight * self.own[place, _IN]
            sent = self.busy[place, _OUT] + weight * self.own[place, _OUT]
            far = _join(is_smooth, far, _raised(is_smooth, max(got, sent)))
            got = self.busy[place, _GETS] + weight * self.own[place, _GETS]
            sent = self.busy[place, _SENDS] + weight * self.own[place, _SENDS]
            moved_far = _join(is_smooth, moved_far, _raised(is_smooth, max(got, sent)))
            is_held = expert >= 0 and self.holders_EN[expert, node] > 0
            row = node
            if is_held or (beside >= 0 and self.holders_EN[beside, node] > 0):
                row = self.num_nodes
                self.look_at(node, row, 1.0 if is_held else 0.0)
            tokens = _join(is_smooth, tokens, self.most[row, 0])
            near = _join(is_smooth, near, self.most[row, 1])
            moved_near = _join(is_smooth, moved_near, self.most[row, 2])
        if is_smooth:
            tokens, near, far = _eighth_root(tokens), _eighth_root(near), _eighth_root(far)
            moved_near, moved_far = _eighth_root(moved_near), _eighth_root(moved_far)
        return self.seconds(tokens, near, far, moved_near, moved_far, hops, fill)

    def on_link(self, line: memoryview, pairs: float) -> float:
        """Seconds of an all-to-all on one kind of link: start-up, then seconds for each pair."""
        return 0.0 if pairs <= _NO_PAIRS * self.all_pairs else line[0] + pairs * line[1]

    def moving(
        self, is_far: int, experts: int, fill: int, hops: int, first: int, per_expert: memoryview
    ) -> float:
        """Seconds of a transfer on one kind of link; ``layer_seconds.transfer_times`` has the formula."""
        if experts == 0:
            return 0.0
        near_hops = fill & ((1 << _HOP_BITS) - 1)
        far_hops = fill >> _HOP_BITS
        filling = near_hops * self.of_hops[hops, first] + far_hops * self.of_hops[hops, first + 1]
        seconds = self.start[is_far] + filling + experts * per_expert[is_far]
        return max(seconds, self.of_hops[hops, first + 2]) if seconds > 0.0 else 0.0

    def seconds(
        self, tokens: float, near: float, far: float, moved_near: int, moved_far: int, hops: int, fill: int
    ) -> float:
        """The price of ``layer_seconds`` from the highest values, without router counts."""
        self.num_prices += 1
        dispatch = max(self.on_link(self.dispatch_near, near), self.on_link(self.dispatch_far, far))
        combine_near = self.on_link(self.combine_near, near)
        combine_far = self.on_link(self.combine_far, far)
        combine = max(combine_near, combine_far)
        seconds = self.times * 2.0 * (dispatch + combine) + self.per_token * tokens
        if hops == 0:
            return seconds
        gather_near = self.moving(0, moved_near, fill, hops, 0, self.gather)
        gather_far = self.moving(1, moved_far, fill, hops, 0, self.gather)
        gather = max(gather_near, gather_far)
        reduce = self.moving(0, moved_near, fill, hops, 3, self.reduce)
        reduce = max(reduce, self.moving(1, moved_far, fill, hops, 3, self.reduce))
        waits = max(0.0, gather - self.hidden)
        waits_back = max(0.0, reduce - self.hidden_back)
        if not self.each_pass:
            return seconds + waits + waits_back
        left = max(0.0, gather - max(0.0, self.hidden_back - reduce))
        if (gather_far >= gather_near) != (combine_far >= combine_near):
            left = max(0.0, left - combine)
        return seconds + self.times * (waits + waits_back + left)


class Search(Layer):
    """The search for the placement with the fewest seconds; ``search.py`` says what it tries and why.

    Attributes:
        best: Seconds of the present placement during a descent.
        kept_s: Seconds of the best placement so far.
        kept_ED: That placement; ``owners_ED`` is the one without replicas, ``start_ED`` a given seed.
        most_replicated: Most experts that may have replicas.
        most_prices: Number of prices after which a descent ends.
        part_E: Parts of the experts in what :meth:`rank` looks at.
        ranked: The experts with the largest parts.
        hottest_E: The experts by their pairs, descending.
        tried_D: Holders of an expert before :meth:`improve`, and in its best trial of ``trial_s`` seconds.
        is_tired_E: 1 for the experts that saved nothing during the present descent.
        want_E: Holders that water filling wants for each expert, and ``plan_D`` the loads of devices then.
    """

    def __init__(self, layer: tuple, most_replicated: int, most_prices: int, start_ED: object) -> None:
        """Prepare a search; :func:`search_replicas` says what the arguments are."""
        Layer.__init__(self, *layer)
        experts, devices = self.num_experts, self.num_devices
        self.most_replicated, self.most_prices = most_replicated, most_prices
        self.owners_ED, self.start_ED = memoryview(np.array(self.has_ED)), start_ED
        self.kept_ED = memoryview(np.array(self.has_ED))
        self.part_E, self.ranked, self.want_E = _reals(experts), _ints(_WIDTH), _ints(experts)
        self.hottest_E = memoryview(np.argsort(-np.asarray(self.total_E), kind="stable"))
        self.tried_D = memoryview(np.zeros((2, devices), np.uint8))
        self.is_tired_E = _ints(experts)
        self.plan_D = _reals(devices)
        # The experts by owner, and where those of each device begin.
        self.by_owner_E = memoryview(np.argsort(np.asarray(self.owner_E), kind="stable"))
        owned_D = np.bincount(np.asarray(self.owner_E), minlength=devices)
        self.first_D = memoryview(np.concatenate([[0], np.cumsum(owned_D)]))

    def keep(self, seconds: float) -> None:
        """Keep the present placement if it is the best so far."""
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
        """Change the replicas of an expert that is out.

        Args:
            expert: The expert.
            kind: 0: it loses all. 1: it gets one in every node without it. 2: it gets one more in every node.
                3: it gets one on every device with a free slot.
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

    def rank(self, of_links: bool) -> int:
        """Find the experts with the largest parts of the busiest device, or of the busiest link.

        Args:
            of_links: Whether to look at links: those whose pairs take longest.

        Returns:
            The number of experts in ``ranked``.
        """
        at = 0
        column = _WORK
        most = -1.0
        near_s = self.dispatch_near[1] + self.combine_near[1]
        far_s = self.dispatch_far[1] + self.combine_far[1]
        for place in range(self.num_devices + (self.num_nodes if of_links else 0)):
            if not of_links:
                if self.busy[place, _WORK] > most:
                    most, at = self.busy[place, _WORK], place
                continue
            seconds = near_s if place < self.num_devices else far_s
            for side in range(_IN, _OUT + 1):
                if seconds * self.busy[place, side] > most:
                    most, at, column = seconds * self.busy[place, side], place, side
        for expert in range(self.num_experts):
            self.part_E[expert] = 0.0 if self.is_tired_E[expert] else self.part_of(expert, at, column)
        num = 0
        while num < _WIDTH:
            largest = self.largest_part()
            if self.part_E[largest] <= 0.0:
                break
            self.part_E[largest] = 0.0
            self.ranked[num] = largest
            num += 1
        return num

    def part_of(self, expert: int, place: int, column: int) -> float:
        """The part of an expert in one number of ``busy``."""
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
            if found < 0 or self.busy[device, _WORK] < self.busy[found, _WORK]:
                found = device
        return found

    def note(self, expert: int) -> float:
        """Price the present holders of an expert that is out; remember them if they are the best trial."""
        seconds = self.price_with(expert, -1)
        if seconds < self.trial_s * (1.0 - _ROUNDING):
            self.trial_s = seconds
            for device in range(self.num_devices):
                self.tried_D[1, device] = self.has_ED[expert, device]
        return seconds

    def try_put(self, expert: int, device: int, sign: int) -> None:
        """Note one more replica (sign 1), or one less, of an expert that is out; nothing is changed."""
        self.put(expert, device, sign)
        self.note(expert)
        self.put(expert, device, -sign)

    def improve(self, expert: int) -> bool:
        """Try changes of one expert's holders, and make the best one; say whether there was one.

        The changes are: one replica more, one less, one elsewhere, one in every node, everywhere, none. Of
        the ways to move a replica, those are tried that drop the best one to drop or add the best one to add.
        """
        self.count(expert, -1)
        if self.price() >= self.best * (1.0 - _ROUNDING):  # other experts decide the price
            self.count(expert, 1)
            return False
        owner = self.owner_E[expert]
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
                if self.tried_D[0, device] and device != owner:
                    self.try_put(expert, device, -1)
            if may_grow:
                self.spread(expert, 3)
                self.note(expert)
            self.spread(expert, 0)
            self.note(expert)
        gained = self.trial_s < self.best
        self.hold(expert, self.tried_D, 1 if gained else 0)
        self.count(expert, 1)
        if gained:
            self.best = self.trial_s
        return gained

    def swap(self, expert: int) -> bool:
        """Let an expert take the place of the replica that does least on a full device of each node.

        That other expert loses the replica, or gets one where this expert gives one up. The best of these
        changes is made; says whether there was one.
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
                seconds = self.price_exchange(expert, other, device, -1)
                if seconds < least * (1.0 - _ROUNDING):
                    least, to, instead, given = seconds, device, other, -1
                for back in range(self.num_devices if to < 0 else 0):
                    if (
                        self.has_ED[expert, back]
                        and back != self.owner_E[expert]
                        and not self.has_ED[other, back]
                    ):
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

        Args:
            is_smooth: Whether the smooth price falls, or the exact one, by which the result is kept.
            num_free: Experts that each link carries in addition to those that compute hides, and that cost
                nothing during the descent.
        """
        hidden, hidden_back = self.hidden, self.hidden_back
        if num_free > 0:
            self.hidden += self.start[1] + num_free * max(self.gather[0], self.gather[1])
            self.hidden_back += self.start[1] + num_free * max(self.reduce[0], self.reduce[1])
        for expert in range(self.num_experts):
            self.is_tired_E[expert] = 0
        last = self.num_prices + self.most_prices
        self.is_smooth = is_smooth
        self.best = self.price()
        while self.step() and self.num_prices < last:
            pass
        self.is_smooth = False
        self.hidden, self.hidden_back = hidden, hidden_back
        self.keep(self.price())

    def step(self) -> bool:
        """Change one expert of the busiest device or link; False if nothing saves seconds."""
        for of_links in range(2):
            num = self.rank(of_links == 1)
            for i in range(num):
                expert = self.ranked[i]
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
        """Water filling: raise ``want_E`` until no owner keeps more than a part of the mean load.

        The owner with the highest load goes first, and of its experts the one whose next replica takes most
        from it.

        Args:
            in_all_nodes: Whether an expert gets as many replicas at once as there are nodes.
            level: The part of the mean load.
            room: Replicas for which there is room.

        Returns:
            The room that is left; 0 if nothing more can be done.
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
            for _ in range(self.want_E[picked] - 1):
                to = -1
                for device in range(self.num_devices):
                    if self.has_ED[picked, device] or self.used_D[device] >= self.slots:
                        continue
                    if self.holders_EN[picked, self.node_D[device]] < most and (
                        to < 0 or self.plan_D[device] < self.plan_D[to]
                    ):
                        to = device
                if to < 0:
                    break
                self.put(picked, to, 1)
                self.plan_D[to] += part
            self.count(picked, 1)

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
                    self.keep(self.price())

    def seed_everywhere(self) -> None:
        """Keep the best of the placements with the hottest 1, 2, … experts on all devices (FasterMoE)."""
        for i in range(min(self.num_experts, self.most_replicated)):
            self.count(self.hottest_E[i], -1)
            self.spread(self.hottest_E[i], 3)
            self.count(self.hottest_E[i], 1)
            self.keep(self.price())

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
        self.plain_s = self.kept_s = self.price()
        self.seed_everywhere()
        self.seed_by_levels()
        self.become(self.start_ED)
        self.keep(self.price())
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
    """Find a placement with few modelled seconds.

    Args:
        layer: The arguments of :class:`Layer`, with a placement without replicas.
        most_replicated: Most experts that may have replicas.
        most_prices: Number of prices after which the descent ends.
        start_ED: Bytes ``[E, D]``: a placement within the limits that serves as one more seed.

    Returns:
        Seconds of the layer without replicas and with those of the placement that was found, both without
        router counts; and the placement, bytes ``[E, D]``.
    """
    search = Search(layer, most_replicated, most_prices, start_ED)
    with cython.nogil:
        search.run()
    return search.plain_s, search.kept_s, np.asarray(search.kept_ED)


def price_replicas(layer: tuple) -> float:
    """Seconds of a layer with the placement of its arguments (:class:`Layer`), without router counts."""
    found = Layer(*layer)
    return found.price()


class Spilling:
    """Which tokens spill from owners to which devices, so that no device computes more than a ceiling.

    Attributes:
        load_E: Tokens of each expert.
        load_D: Tokens of each device if nothing spills.
        by_owner_E: The experts by owner, then by tokens, descending; those of a device begin at ``first_D``.
        busiest_first_D: The devices by load, descending.
        nearest_ED: The devices in the order in which an expert's tokens spill to them.
        slots: Most experts of other owners that a device may compute.
        tolerance: Precision of the ceiling, in tokens.
        total: Tokens of all experts.
        room_D: Tokens that each device may still take, and ``left_D`` experts.
        spilled: Expert, device and number of the tokens that spill; a row for each, ``num_spilled`` in all.
    """

    def __init__(
        self,
        load_E: object,
        load_D: object,
        by_owner_E: object,
        first_D: object,
        busiest_first_D: object,
        nearest_ED: object,
        slots: int,
        tolerance: float,
    ) -> None:
        """Prepare; the arguments are the attributes."""
        self.load_E, self.load_D, self.by_owner_E, self.first_D = load_E, load_D, by_owner_E, first_D
        self.busiest_first_D, self.nearest_ED, self.slots = busiest_first_D, nearest_ED, slots
        num_devices = len(self.load_D)
        self.total, self.tolerance = sum(load_E), tolerance
        self.room_D, self.left_D = _ints(num_devices), _ints(num_devices)
        rows = max(num_devices * min(slots, len(self.load_E)), 1)
        self.spilled = memoryview(np.zeros((rows, 3), np.int64))
        self.num_spilled = 0

    def fits_below(self, ceiling: int) -> bool:
        """Spill all tokens above a ceiling; False if they find no room."""
        self.num_spilled = 0
        for i in range(self.load_D.shape[0]):
            self.room_D[i] = ceiling - self.load_D[i]
            self.left_D[i] = self.slots
        for i in range(self.load_D.shape[0]):
            busy = self.busiest_first_D[i]
            over = -self.room_D[busy]
            if over <= 0:
                break
            for j in range(self.first_D[busy], self.first_D[busy + 1]):
                if over == 0:
                    break
                over -= self.spill_expert(self.by_owner_E[j], over)
            if over > 0:
                return False
        return True

    def spill_expert(self, expert: int, over: int) -> int:
        """Spill up to ``over`` tokens of an expert to the nearest devices with room; return how many."""
        wanted = min(over, self.load_E[expert])
        left = wanted
        for i in range(self.load_D.shape[0]):
            if left == 0:
                break
            device = self.nearest_ED[expert, i]
            taken = min(left, self.room_D[device])
            if taken > 0 and self.left_D[device] > 0:
                self.spilled[self.num_spilled, 0] = expert
                self.spilled[self.num_spilled, 1] = device
                self.spilled[self.num_spilled, 2] = taken
                self.num_spilled += 1
                self.room_D[device] -= taken
                self.left_D[device] -= 1
                left -= taken
        return wanted - left

    def run(self) -> None:
        """Spill under the lowest ceiling that is possible, found by a binary search."""
        num_devices = self.load_D.shape[0]
        low = (self.total + num_devices - 1) // num_devices
        high = self.load_D[self.busiest_first_D[0]]
        ceiling = low
        while low < high:
            if self.fits_below(ceiling):
                high = ceiling
            else:
                low = ceiling + 1
            if high - low <= self.tolerance:
                break
            ceiling = (low + high) // 2
        self.fits_below(high)


def spill(*arguments: object) -> np.ndarray:
    """Spill tokens from their owners to other devices, so that the highest load of a device becomes lowest.

    Args:
        arguments: The arguments of :class:`Spilling`.

    Returns:
        Expert, device and number of the tokens that spill, int64 ``[P, 3]``.
    """
    search = Spilling(*arguments)
    with cython.nogil:
        search.run()
    return np.asarray(search.spilled)[: search.num_spilled]


class GreedySteps:
    """The steps of Pro-Prophet's greedy search for one number of devices that are left out (Alg. 1).

    Attributes:
        owner_E: Owner of each expert.
        load_E: Inputs of each expert.
        inputs_ED: Inputs by expert and source device.
        fewest_first_ED: The devices in the order of their inputs for an expert, ascending.
        computed_D: Inputs that each device computes, and ``received_D`` those from other devices.
        left_D: Replicas for which each device has room.
        is_selected_E: 1 for experts that were selected.
        replicas: Expert and device of each replica, in the order of the steps.
        after: For each step the number of replicas so far, most inputs received, most inputs computed.
    """

    def __init__(self, owner_E: object, load_E: object, inputs_ED: object, fewest_first_ED: object) -> None:
        """Prepare; the arguments are the attributes of these names."""
        self.owner_E, self.load_E = owner_E, load_E
        self.inputs_ED, self.fewest_first_ED = inputs_ED, fewest_first_ED

    def run(self) -> int:
        """Send experts until the load is balanced; return the number of steps."""
        num_devices = self.computed_D.shape[0]
        for step in range(self.most_steps):
            owner = 0
            lowest = 0
            for device in range(num_devices):
                if self.computed_D[device] > self.computed_D[owner]:
                    owner = device
                if self.computed_D[device] < self.computed_D[lowest]:
                    lowest = device
            if self.computed_D[owner] - self.computed_D[lowest] < self.tolerance:
                return step
            selected = -1
            for expert in range(self.owner_E.shape[0]):
                if self.owner_E[expert] != owner or self.is_selected_E[expert] or self.load_E[expert] == 0:
                    continue
                if selected < 0 or self.load_E[expert] > self.load_E[selected]:
                    selected = expert
            if selected < 0:
                return step
            self.is_selected_E[selected] = 1
            num_passed = 0
            before = self.num_replicas
            for i in range(num_devices):
                device = self.fewest_first_ED[selected, i]
                if device == owner:
                    continue
                num_passed += 1
                if num_passed > self.num_left_out and self.left_D[device] > 0:
                    tokens = self.inputs_ED[selected, device]
                    self.computed_D[device] += tokens
                    self.computed_D[owner] -= tokens
                    self.received_D[owner] -= tokens
                    self.left_D[device] -= 1
                    self.replicas[self.num_replicas, 0] = selected
                    self.replicas[self.num_replicas, 1] = device
                    self.num_replicas += 1
            # Without room, further steps would change nothing but the number of selected experts.
            has_room = self.num_replicas > before
            for device in range(num_devices):
                has_room = has_room or self.left_D[device] > 0
            if not has_room:
                return step
            self.after[step, 0] = self.num_replicas
            for device in range(num_devices):
                self.after[step, 1] = max(self.after[step, 1], self.received_D[device])
                self.after[step, 2] = max(self.after[step, 2], self.computed_D[device])
        return self.most_steps


def greedy_steps(
    layer: tuple,
    computed_D: np.ndarray,
    received_D: np.ndarray,
    *,
    tolerance: float,
    num_left_out: int,
    slots: int,
    most_steps: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Send the most loaded experts of the most loaded devices to others, until the load is balanced.

    Args:
        layer: The arguments of :class:`GreedySteps`.
        computed_D: Inputs that each device computes before the first step, int64 ``[D]``.
        received_D: Inputs that each device receives before the first step, int64 ``[D]``.
        tolerance: The load is balanced if the highest and the lowest load of a device differ by less.
        num_left_out: Devices to which a selected expert is not sent: those with the fewest inputs for it.
        slots: Most replicas on a device.
        most_steps: Most steps.

    Returns:
        For each step the number of replicas so far, the most inputs that a device receives and the most that
        one computes, int64 ``[S, 3]``; and expert and device of each replica in that order, int64 ``[P, 2]``.
    """
    search = GreedySteps(*layer)
    num_devices = len(computed_D)
    search.computed_D, search.received_D = memoryview(computed_D.copy()), memoryview(received_D.copy())
    search.tolerance, search.num_left_out = tolerance, num_left_out
    search.most_steps = most_steps if slots > 0 else 0
    search.left_D = memoryview(np.full(num_devices, slots, np.int64))
    search.is_selected_E = _ints(len(search.owner_E))
    room = max(min(slots * num_devices, most_steps * (num_devices - 1)), 1)
    search.replicas = memoryview(np.zeros((room, 2), np.int64))
    search.after = memoryview(np.zeros((max(most_steps, 1), 3), np.int64))
    search.num_replicas = 0
    with cython.nogil:
        search.num_steps = search.run()
    return np.asarray(search.after)[: search.num_steps], np.asarray(search.replicas)[: search.num_replicas]


def _copy(source_ED: memoryview, to_ED: memoryview) -> None:
    """Copy a placement."""
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
    """Zeros, int64 ``[size]``."""
    return memoryview(np.zeros(size, np.int64))


def _reals(size: int) -> memoryview:
    """Zeros, float64 ``[size]``."""
    return memoryview(np.zeros(size, np.float64))
