"""The price of one layer while replicas come and go: part of the kernel of the replica search.

The formula is that of ``planning/cost/layer_seconds.py`` without router counts; a test compares the two. The
costs come from ``planning/balanced/search_costs.py`` in the order of the positions below.

Shape letters: D devices, E experts, N nodes.
"""

from megatron_fssdp.planning.kernels.parts.layer_traffic import _HOP_BITS, Layer
from megatron_fssdp.planning.native import compiler_marks as cython
from megatron_fssdp.planning.native.kernel_types import Index, Int, Ints, Real, Reals

_DISPATCH = 0  # start-up and seconds for each pair, near then far
_COMBINE = 4  # the same
_PER_TOKEN = 8  # seconds of the experts for each pair, both passes
_TIMES = 9  # number of micro-batches
_STARTS = 10  # start-up of a transfer, near then far
_GATHER = 12  # seconds to gather an expert, near then far
_REDUCE = 14  # seconds to reduce the gradient of an expert, near then far
_HIDDEN = 16  # seconds that hide a gather, then those that hide a reduction
_EACH_PASS = 18  # 1 if every micro-batch gathers twice, otherwise 0
# For each number of hops: a message near and far, and the least seconds; then the same for reductions.
_NUM_HOP_COSTS = 6

_ROUNDING = 1e-12  # part of all pairs below which traffic is the rounding error of a difference


@cython.cclass
class PricedLayer(Layer):
    """A layer with its modelled seconds.

    The highest values are those of all experts that are not out. An expert only adds to them, so its
    placements are priced by what they add, without a look at all devices.

    Attributes:
        num_prices: Number of prices computed so far.
        most_tokens: Highest load of a device.
        most_near: Most pairs on a link inside a node.
        most_far: Most pairs on a NIC.
        most_moved_near: Most experts on a link inside a node.
        most_moved_far: Most experts on a NIC.
        most_hops: Most hops of a transfer.
        most_fill: Highest of ``fill_E``.
        least: Seconds of the layer with these values.
        sender_N: Device of each node that sends most to its node, if all of them send their pairs for the
            expert that is out.
        sent_N: What it then sends.
    """

    num_prices: Int
    most_tokens: Real
    most_near: Real
    most_far: Real
    most_moved_near: Int
    most_moved_far: Int
    most_hops: Int
    most_fill: Int
    least: Real
    sender_N: Ints
    sent_N: Reals

    def __init__(self, num_experts: Index, num_devices: Index, num_nodes: Index, slots: Int) -> None:
        Layer.__init__(self, num_experts, num_devices, num_nodes, slots)
        self.num_prices = 0
        self.most_tokens = self.most_near = self.most_far = self.least = 0.0
        self.most_moved_near = self.most_moved_far = self.most_hops = self.most_fill = 0
        self.sender_N, self.sent_N = self.new_ints(num_nodes), self.new_reals(num_nodes)

    @cython.inner
    def find_highest(self) -> cython.void:
        """Compute the highest values and ``least``."""
        tokens: Real = 0.0
        near: Real = 0.0
        far: Real = 0.0
        moved_near: Int = 0
        moved_far: Int = 0
        hops: Int = 0
        fill: Int = 0
        for device in range(self.num_devices):
            tokens = max(tokens, self.load_D[device])
            near = max(near, self.in_D[device], self.out_D[device])
            moved_near = max(moved_near, self.gets_D[device], self.sends_D[device])
        for node in range(self.num_nodes):
            far = max(far, self.far_in_N[node], self.far_out_N[node])
            moved_far = max(moved_far, self.gets_N[node], self.sends_N[node])
        for i in range(self.num_replicated):
            expert: Index = self.replicated_E[i]
            hops = max(hops, self.hops_E[expert])
            fill = max(fill, self.fill_E[expert])
        self.most_tokens, self.most_near, self.most_far = tokens, near, far
        self.most_moved_near, self.most_moved_far = moved_near, moved_far
        self.most_hops, self.most_fill = hops, fill
        self.least = self.seconds(tokens, near, far, moved_near, moved_far, hops, fill)

    @cython.inner
    def price(self) -> Real:
        """Seconds of the layer, if no expert is out."""
        self.num_prices += 1
        self.find_highest()
        return self.least

    @cython.inner
    def prepare_prices(self, expert: Index) -> cython.void:
        """Make :meth:`price_of` valid for an expert that is out, while no other expert changes."""
        self.find_highest()
        for node in range(self.num_nodes):
            self.sent_N[node] = -1.0
            for i in range(self.first_N[node], self.first_N[node + 1]):
                device: Index = self.member_D[i]
                sent = self.out_D[device] + self.load_ED[expert * self.num_devices + device]
                if sent > self.sent_N[node]:
                    self.sent_N[node] = sent
                    self.sender_N[node] = device

    @cython.inner
    def price_of(self, expert: Index) -> Real:
        """Seconds of the layer if the expert that is out keeps its present holders."""
        self.num_prices += 1
        tokens, near, far = self.most_tokens, self.most_near, self.most_far
        moved_near, moved_far = self.most_moved_near, self.most_moved_far
        hops, fill = self.most_hops, self.most_fill
        holders = self.holders_E[expert]
        each_far = self.unserved_E[expert] / holders
        row = expert * self.num_devices
        for i in range(holders):
            device: Index = self.holder_ED[row + i]
            at = expert * self.num_nodes + self.node_D[device]
            share = self.rest_EN[at] / self.holders_EN[at]
            tokens = max(tokens, self.load_D[device] + (self.load_ED[row + device] + share + each_far))
            near = max(near, self.in_D[device] + share)
        left = holders
        position: Int = 0
        node: Index = self.node_D[self.owner_E[expert]]
        for _ in range(self.num_nodes):
            at = expert * self.num_nodes + node
            count = self.holders_EN[at]
            if count == 0:
                far = max(far, self.far_out_N[node] + self.load_EN[at])
            else:
                left -= count
                far = max(far, self.far_in_N[node] + each_far * count)
                if position > 0:
                    moved_far = max(moved_far, self.gets_N[node] + 1)
                if left > 0:
                    moved_far = max(moved_far, self.sends_N[node] + 1)
                near = max(near, self.most_sent(expert, node, near))
                if count > 1:
                    moved_near = max(moved_near, self.most_moved(expert, node))
                hops = max(hops, self.hops_to(position, count))
                fill = max(fill, self.fill_to(position, count, left))
                position += 1
            node = node + 1 if node + 1 < self.num_nodes else 0
        return self.seconds(tokens, near, far, moved_near, moved_far, hops, fill)

    @cython.inner
    def most_sent(self, expert: Index, node: Index, least: Real) -> Real:
        """Most pairs that a device without the expert that is out sends to its node; ``least`` if fewer."""
        row = expert * self.num_devices
        if self.sent_N[node] <= least:
            return least
        sender: Index = self.sender_N[node]
        if self.present_ED[row + sender] == 0:
            return self.sent_N[node]
        for i in range(self.first_N[node], self.first_N[node + 1]):
            device: Index = self.member_D[i]
            if self.present_ED[row + device] == 0:
                least = max(least, self.out_D[device] + self.load_ED[row + device])
        return least

    @cython.inner
    def most_moved(self, expert: Index, node: Index) -> Int:
        """Most experts on a link of a holder in a node, with the one that is out; see ``count_tree``."""
        row = expert * self.num_devices
        at: Index = self.leader_place(expert, node)
        children = self.holders_EN[expert * self.num_nodes + node] - 1
        most: Int = 0
        is_first: Int = 1
        for _ in range(self.first_N[node + 1] - self.first_N[node]):
            device: Index = self.member_D[at]
            if self.present_ED[row + device]:
                if is_first == 0:
                    most = max(most, self.gets_D[device] + 1)
                if children > 0:
                    most = max(most, self.sends_D[device] + min(children, 2))
                children -= 2
                is_first = 0
            at = at + 1 if at + 1 < self.first_N[node + 1] else self.first_N[node]
        return most

    @cython.inner
    def pair_seconds(self, is_far: Index) -> Real:
        """Seconds of one pair on the busiest link of a kind in all all-to-alls, without start-ups."""
        at: Index = 2 * is_far + 1
        return 2.0 * self.costs[_TIMES] * (self.costs[_DISPATCH + at] + self.costs[_COMBINE + at])

    @cython.inner
    def link_seconds(self, at: Index, pairs: Real) -> Real:
        """Seconds of an all-to-all on one kind of link, whose costs begin at ``at``."""
        if pairs <= _ROUNDING * self.all_pairs:
            return 0.0
        return self.costs[at] + pairs * self.costs[at + 1]

    @cython.inner
    def moving_seconds(
        self, is_far: Index, experts: Int, fill: Int, hop_costs: Index, per_expert: Index
    ) -> Real:
        """Seconds of a transfer on one kind of link; ``layer_seconds.transfer_times`` has the formula."""
        if experts == 0:
            return 0.0
        near_hops = fill & ((1 << _HOP_BITS) - 1)
        far_hops = fill >> _HOP_BITS
        first = near_hops * self.hop_costs[hop_costs] + far_hops * self.hop_costs[hop_costs + 1]
        seconds = self.costs[_STARTS + is_far] + first + experts * self.costs[per_expert + is_far]
        return max(seconds, self.hop_costs[hop_costs + 2]) if seconds > 0.0 else 0.0

    @cython.inner
    def seconds(
        self, tokens: Real, near: Real, far: Real, moved_near: Int, moved_far: Int, hops: Int, fill: Int
    ) -> Real:
        """The price of ``layer_seconds``, without router counts."""
        dispatch = max(self.link_seconds(_DISPATCH, near), self.link_seconds(_DISPATCH + 2, far))
        combine_near = self.link_seconds(_COMBINE, near)
        combine_far = self.link_seconds(_COMBINE + 2, far)
        combine = max(combine_near, combine_far)
        times = self.costs[_TIMES]
        seconds = times * 2.0 * (dispatch + combine) + self.costs[_PER_TOKEN] * tokens
        if hops == 0:
            return seconds
        at: Index = _NUM_HOP_COSTS * hops
        gather_near = self.moving_seconds(0, moved_near, fill, at, _GATHER)
        gather_far = self.moving_seconds(1, moved_far, fill, at, _GATHER)
        gather = max(gather_near, gather_far)
        reduce = max(
            self.moving_seconds(0, moved_near, fill, at + 3, _REDUCE),
            self.moving_seconds(1, moved_far, fill, at + 3, _REDUCE),
        )
        room = max(0.0, self.costs[_HIDDEN + 1] - reduce)
        waits = max(0.0, gather - self.costs[_HIDDEN])
        waits_back = max(0.0, reduce - self.costs[_HIDDEN + 1])
        if self.costs[_EACH_PASS] == 0.0:
            return seconds + waits + waits_back
        left = max(0.0, gather - room)
        if (gather_far >= gather_near) != (combine_far >= combine_near):
            left = max(0.0, left - combine)
        return seconds + times * (waits + waits_back + left)
