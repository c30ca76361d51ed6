"""A smooth price, with sums of powers in place of highest values. Part of the kernel of the replica search.

The highest load of several equally loaded devices falls only after all of them are relieved. A sum of powers
falls with each of them, and a change of it follows from the resources that change alone.

Shape letters: D devices, E experts, N nodes.
"""

from megatron_fssdp.planning.kernels.parts.layer_price import _PER_TOKEN, PricedLayer
from megatron_fssdp.planning.native import compiler_marks as cython
from megatron_fssdp.planning.native.kernel_types import Index, Int, Real, Reals

_NEAR_PART = 0.5  # of the seconds of the busiest link; the fourth powers of shorter ones hardly count
_FORBIDDEN = 1e300  # price of placements that exceed the level


@cython.inner
def _power(value: Real) -> Real:
    """The fourth power."""
    square = value * value
    return square * square


@cython.cclass
class SmoothLayer(PricedLayer):
    """A layer with its smooth price, in seconds.

    Attributes:
        is_smooth: Whether :meth:`score` is the smooth price.
        level: Most experts that may cross a NIC in one direction under the smooth price.
        near_s: Seconds of a pair on a link inside a node in all all-to-alls; ``far_s`` between nodes.
        load_weight: Seconds that one more unit of the devices' sum of powers counts.
        link_weight: Seconds that one more unit of the links' sum of powers counts.
        counts_near: Whether links inside nodes count.
        out_price_N: Price of what the devices of each node send, if the expert that is out has a holder in
            the node but not on them.
        busiest: Device that computes most.
        link_kind: What takes longest: 1 what device ``link_at`` receives from its node, 2 what it sends to
            it; 3 what node ``link_at`` receives, 4 what it sends.
        link_at: That device or node.
    """

    is_smooth: Int
    level: Int
    near_s: Real
    far_s: Real
    load_weight: Real
    link_weight: Real
    counts_near: Int
    out_price_N: Reals
    busiest: Index
    link_kind: Index
    link_at: Index

    def __init__(self, num_experts: Index, num_devices: Index, num_nodes: Index) -> None:
        PricedLayer.__init__(self, num_experts, num_devices, num_nodes)
        self.is_smooth = self.level = self.counts_near = 0
        self.near_s = self.far_s = self.load_weight = self.link_weight = 0.0
        self.out_price_N = self.new_reals(num_nodes)
        self.busiest = self.link_kind = self.link_at = 0

    @cython.inner
    def weigh(self) -> cython.void:
        """Find the busiest device and link, and weigh the sums so that they count in seconds."""
        self.near_s, self.far_s = self.pair_seconds(0), self.pair_seconds(1)
        self.busiest = 0
        loads: Real = 0.0
        most: Real = 0.0
        near: Real = 0.0
        self.link_kind = 1
        self.link_at = 0
        for device in range(self.num_devices):
            loads += _power(self.load_D[device])
            if self.load_D[device] > most:
                most = self.load_D[device]
                self.busiest = device
            if self.in_D[device] > near:
                near, self.link_kind, self.link_at = self.in_D[device], 1, device
            if self.out_D[device] > near:
                near, self.link_kind, self.link_at = self.out_D[device], 2, device
        link = self.near_s * near
        links: Real = 0.0
        for node in range(self.num_nodes):
            for kind in range(2):
                pairs = self.far_out_N[node] if kind else self.far_in_N[node]
                seconds = self.far_s * pairs
                links += _power(seconds)
                if seconds > link:
                    link, self.link_kind, self.link_at = seconds, 3 + kind, node
        self.counts_near = 1 if self.near_s * near > _NEAR_PART * link else 0
        if self.counts_near:
            for device in range(self.num_devices):
                links += _power(self.near_s * self.in_D[device])
                links += _power(self.near_s * self.out_D[device])
        self.load_weight = self.costs[_PER_TOKEN] * most / loads if loads > 0.0 else 0.0
        self.link_weight = link / links if links > 0.0 else 0.0

    @cython.inner
    def prepare(self, expert: Index) -> cython.void:
        """Make :meth:`score` valid for an expert that is out, while no other expert changes."""
        if self.is_smooth == 0:
            self.prepare_prices(expert)
            return
        for node in range(self.num_nodes):
            self.out_price_N[node] = 0.0
            if self.counts_near:
                for i in range(self.first_N[node], self.first_N[node + 1]):
                    device: Index = self.member_D[i]
                    out = self.near_s * self.out_D[device]
                    more = self.near_s * self.load_ED[expert * self.num_devices + device]
                    self.out_price_N[node] += _power(out + more) - _power(out)

    @cython.inner
    def smooth_of(self, expert: Index) -> Real:
        """Smooth price that the expert that is out adds with its present holders."""
        self.num_prices += 1
        holders = self.holders_E[expert]
        far = self.unserved_E[expert] / holders
        loads: Real = 0.0
        links: Real = 0.0
        left = holders
        position: Int = 0
        node: Index = self.node_D[self.owner_E[expert]]
        if self.num_nodes > 1:
            for _ in range(self.num_nodes):
                at = expert * self.num_nodes + node
                count = self.holders_EN[at]
                if count == 0:
                    before = self.far_s * self.far_out_N[node]
                    links += _power(before + self.far_s * self.load_EN[at]) - _power(before)
                else:
                    left -= count
                    before = self.far_s * self.far_in_N[node]
                    links += _power(before + self.far_s * far * count) - _power(before)
                    if self.counts_near:
                        links += self.out_price_N[node]
                    if position > 0 and self.gets_N[node] >= self.level:
                        return _FORBIDDEN
                    if left > 0 and self.sends_N[node] >= self.level:
                        return _FORBIDDEN
                    position += 1
                node = node + 1 if node + 1 < self.num_nodes else 0
        elif self.counts_near:
            links += self.out_price_N[0]
        row = expert * self.num_devices
        for i in range(holders):
            device: Index = self.holder_ED[row + i]
            at = expert * self.num_nodes + self.node_D[device]
            own = self.load_ED[row + device]
            share = self.rest_EN[at] / self.holders_EN[at]
            before = self.load_D[device]
            loads += _power(before + own + share + far) - _power(before)
            if self.counts_near:
                before = self.near_s * self.in_D[device]
                links += _power(before + self.near_s * share) - _power(before)
                before = self.near_s * self.out_D[device]
                links -= _power(before + self.near_s * own) - _power(before)
        return self.load_weight * loads + self.link_weight * links

    @cython.inner
    def score(self, expert: Index) -> Real:
        """The price or the smooth price with the present holders of the expert that is out."""
        if self.is_smooth:
            return self.smooth_of(expert)
        return self.price_of(expert)
