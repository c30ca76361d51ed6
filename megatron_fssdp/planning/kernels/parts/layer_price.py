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


@cython.cclass
class PricedLayer(Layer):
    """A layer with its modelled seconds.

    Attributes:
        num_prices: Number of prices computed so far.
    """

    num_prices: Int

    def __init__(self, num_experts: Index, num_devices: Index, num_nodes: Index) -> None:
        Layer.__init__(self, num_experts, num_devices, num_nodes)
        self.num_prices = 0

    @cython.inner
    def price_of(self, expert: Index) -> Real:
        """Seconds of the layer if the expert that is out keeps its present holders."""
        self.count(expert, 1)
        price = self.price()
        self.count(expert, -1)
        return price

    @cython.inner
    def price(self) -> Real:
        """Seconds of the layer."""
        self.num_prices += 1
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
        for expert in range(self.num_experts):
            hops = max(hops, self.hops_E[expert])
            fill = max(fill, self.fill_E[expert])
        return self.seconds(tokens, near, far, moved_near, moved_far, hops, fill)

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
