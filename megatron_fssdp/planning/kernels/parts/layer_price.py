"""The price of one layer while replicas come and go: part of the kernel of the replica search.

The formula is that of ``planning/cost/layer_seconds.py`` without router counts; a test compares the two. The
costs come from ``planning/balanced/search_costs.py`` in the order of the positions below.

Shape letters: D devices, E experts, N nodes.
"""

from megatron_fssdp.planning.kernels.parts.layer_traffic import _HOP_BITS, Layer
from megatron_fssdp.planning.native import compiler_marks as cython
from megatron_fssdp.planning.native.kernel_types import Index, Int, Real

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
_ROOT_STEPS = 8  # Newton steps of a square root, from a start that is at most sqrt(D) times too large


@cython.cclass
class PricedLayer(Layer):
    """A layer with its modelled seconds."""

    @cython.inner
    def price_now(self) -> Real:
        """Seconds of the layer when no expert is out."""
        for node in range(self.num_nodes):
            self.is_held_N[node] = 0
            self.own_far_in_N[node] = self.own_far_out_N[node] = 0.0
            self.own_gets_N[node] = self.own_sends_N[node] = 0
        self.own_hops = self.own_fill = 0
        self.note_others()
        return self.price()

    @cython.inner
    def price_of(self, expert: Index) -> Real:
        """Seconds of the layer if the expert that is out keeps its present holders."""
        self.spread(expert)
        return self.price()

    @cython.inner
    def price(self) -> Real:
        """Seconds of the layer: the sums, and beside them the expert that :meth:`spread` computed."""
        self.num_prices += 1
        tokens: Real = 0.0
        near: Real = 0.0
        far: Real = 0.0
        square_load: Real = 0.0
        square_near: Real = 0.0
        square_far: Real = 0.0
        moved_near, moved_far = self.prepaid_near, self.prepaid_far
        for node in range(self.num_nodes):
            far_in = self.far_in_N[node] + self.own_far_in_N[node]
            far_out = self.far_out_N[node] + self.own_far_out_N[node]
            square_far += far_in * far_in + far_out * far_out
            far = max(far, far_in, far_out)
            gets = self.gets_N[node] + self.own_gets_N[node]
            sends = self.sends_N[node] + self.own_sends_N[node]
            moved_far = max(moved_far, gets, sends)
            if self.is_held_N[node] == 0:
                tokens = max(tokens, self.most_load_N[node])
                near = max(near, self.most_near_N[node])
                moved_near = max(moved_near, self.most_moved_N[node])
                square_load += self.square_load_N[node]
                square_near += self.square_near_N[node]
                continue
            for i in range(self.first_N[node], self.first_N[node + 1]):
                device: Index = self.member_D[i]
                load = self.load_D[device] + self.own_load_D[device]
                near_in = self.in_D[device] + self.own_in_D[device]
                near_out = self.out_D[device] + self.own_out_D[device]
                gets = self.gets_D[device] + self.own_gets_D[device]
                sends = self.sends_D[device] + self.own_sends_D[device]
                square_load += load * load
                square_near += near_in * near_in + near_out * near_out
                tokens = max(tokens, load)
                near = max(near, near_in, near_out)
                moved_near = max(moved_near, gets, sends)
        if self.is_smooth:
            tokens = self.root(square_load / self.num_devices, tokens)
            near = self.root(square_near / (2 * self.num_devices), near)
            far = self.root(square_far / (2 * self.num_nodes), far)
        hops, fill = max(self.others_hops, self.own_hops), max(self.others_fill, self.own_fill)
        if hops == 0 and moved_near + moved_far > 0:
            hops = 1
        return self.seconds(tokens, near, far, moved_near, moved_far, hops, fill)

    @cython.inner
    def root(self, square: Real, above: Real) -> Real:
        """Square root by Newton's method, from a number that is at least the root."""
        if square <= 0.0 or above <= 0.0:
            return 0.0
        for _ in range(_ROOT_STEPS):
            above = 0.5 * (above + square / above)
        return above

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
