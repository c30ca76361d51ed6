"""A smooth price, with sums of powers in place of highest values. Part of the kernel of the replica search.

The highest load of several equally loaded devices falls only after all of them are relieved. A sum of powers
falls with each of them, and a change of it follows from the resources that change alone.

Shape letters: D devices, E experts, N nodes.
"""

from megatron_fssdp.planning.kernels.parts.layer_price import _PER_TOKEN, PricedLayer
from megatron_fssdp.planning.native import compiler_marks as cython
from megatron_fssdp.planning.native.kernel_types import Index, Int, Real

_NEAR_PART = 0.5  # of the seconds of the busiest link; the fourth powers of shorter ones hardly count
_FORBIDDEN = 1e300  # change of the price by moves that exceed the level


@cython.inner
def _rise(value: Real, change: Real) -> Real:
    """By how much the fourth power of a value changes."""
    before = value * value
    after = (value + change) * (value + change)
    return after * after - before * before


@cython.cclass
class SmoothLayer(PricedLayer):
    """A layer with its smooth price, in seconds.

    Attributes:
        level: Most experts that may cross a NIC in one direction under the smooth price.
        near_s: Seconds of a pair on a link inside a node in all all-to-alls; ``far_s`` between nodes.
        load_weight: Seconds that one more unit of the devices' sum of powers counts.
        link_weight: Seconds that one more unit of the links' sum of powers counts.
        counts_near: Whether links inside nodes count.
        highest_s: Seconds of the busiest device and of the busiest link.
        busiest: Device that computes most.
        link_kind: What takes longest: 1 what device ``link_at`` receives from its node, 2 what it sends to
            it; 3 what node ``link_at`` receives, 4 what it sends.
        link_at: That device or node.
    """

    level: Int
    near_s: Real
    far_s: Real
    load_weight: Real
    link_weight: Real
    counts_near: Int
    highest_s: Real
    busiest: Index
    link_kind: Index
    link_at: Index

    def __init__(self, num_experts: Index, num_devices: Index, num_nodes: Index, slots: Int) -> None:
        PricedLayer.__init__(self, num_experts, num_devices, num_nodes, slots)
        self.level = self.counts_near = 0
        self.highest_s = self.near_s = self.far_s = self.load_weight = self.link_weight = 0.0
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
            loads += _rise(0.0, self.load_D[device])
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
                links += _rise(0.0, seconds)
                if seconds > link:
                    link, self.link_kind, self.link_at = seconds, 3 + kind, node
        self.counts_near = 1 if self.near_s * near > _NEAR_PART * link else 0
        if self.counts_near:
            for device in range(self.num_devices):
                links += _rise(0.0, self.near_s * self.in_D[device])
                links += _rise(0.0, self.near_s * self.out_D[device])
        self.highest_s = self.costs[_PER_TOKEN] * most + link
        self.load_weight = self.costs[_PER_TOKEN] * most / loads if loads > 0.0 else 0.0
        self.link_weight = link / links if links > 0.0 else 0.0

    @cython.inner
    def change_by(self, expert: Index, add: Int, drop: Int) -> Real:
        """By how much the smooth price changes if an expert, which is not out, moves.

        Args:
            expert: The expert.
            add: Device that gets it; -1 for none.
            drop: Device that loses it; -1 for none.
        """
        self.num_prices += 1
        add_node: Int = -1
        drop_node: Int = -1
        count = self.holders_E[expert]
        after = count
        unserved = self.unserved_E[expert]
        unserved_after = unserved
        if add >= 0:
            add_node = self.node_D[add]
            after += 1
        if drop >= 0:
            drop_node = self.node_D[drop]
            after -= 1
        if add_node != drop_node:
            if add >= 0 and self.holders_EN[expert * self.num_nodes + add_node] == 0:
                if self.exceeds_level(expert, add_node, drop_node):
                    return _FORBIDDEN
                unserved_after -= self.load_EN[expert * self.num_nodes + add_node]
            if drop >= 0 and self.holders_EN[expert * self.num_nodes + drop_node] == 1:
                if add < 0 and self.exceeds_level(expert, add_node, drop_node):
                    return _FORBIDDEN
                unserved_after += self.load_EN[expert * self.num_nodes + drop_node]
        far = unserved / count
        far_after = unserved_after / after
        links = self.far_change(expert, add_node, drop_node, far, far_after) if self.num_nodes > 1 else 0.0
        loads: Real = 0.0
        row = expert * self.num_devices
        for i in range(count):
            device: Index = self.holder_ED[row + i]
            if device == drop:
                continue
            node = self.node_D[device]
            change = far_after - far
            if node in (add_node, drop_node):
                change += self.near_change(expert, node, add, drop)
                if self.counts_near:
                    links += _rise(self.near_s * self.in_D[device], self.near_s * (change - far_after + far))
            loads += _rise(self.load_D[device], change)
        if drop >= 0:
            near = self.rest_EN[expert * self.num_nodes + drop_node]
            near /= self.holders_EN[expert * self.num_nodes + drop_node]
            loads += _rise(self.load_D[drop], -(self.load_ED[row + drop] + near + far))
            if self.counts_near:
                links += _rise(self.near_s * self.in_D[drop], -self.near_s * near)
        if add >= 0:
            near = self.near_after(expert, add_node, add, drop)
            loads += _rise(self.load_D[add], self.load_ED[row + add] + near + far_after)
            if self.counts_near:
                links += _rise(self.near_s * self.in_D[add], self.near_s * near)
        if self.counts_near:
            links += self.sent_change(expert, add, drop)
        return self.load_weight * loads + self.link_weight * links

    @cython.inner
    def near_after(self, expert: Index, node: Index, add: Int, drop: Int) -> Real:
        """Pairs of its node that a holder of an expert computes after a move."""
        rest = self.rest_EN[expert * self.num_nodes + node]
        count = self.holders_EN[expert * self.num_nodes + node]
        if add >= 0 and self.node_D[add] == node:
            rest -= self.load_ED[expert * self.num_devices + add]
            count += 1
        if drop >= 0 and self.node_D[drop] == node:
            rest += self.load_ED[expert * self.num_devices + drop]
            count -= 1
        return rest / count

    @cython.inner
    def near_change(self, expert: Index, node: Index, add: Int, drop: Int) -> Real:
        """By how many pairs of its node a holder of an expert computes more after a move."""
        at = expert * self.num_nodes + node
        return self.near_after(expert, node, add, drop) - self.rest_EN[at] / self.holders_EN[at]

    @cython.inner
    def far_change(self, expert: Index, add_node: Int, drop_node: Int, far: Real, far_after: Real) -> Real:
        """By how much the sum of the links between nodes changes.

        Args:
            expert: The expert.
            add_node: Node that gets a holder; -1 for none.
            drop_node: Node that loses a holder; -1 for none.
            far: Pairs of nodes without a holder that each holder computes.
            far_after: The same after the move.
        """
        links: Real = 0.0
        for node in range(self.num_nodes):
            at = expert * self.num_nodes + node
            count = self.holders_EN[at]
            after = count
            if node == add_node:
                after += 1
            if node == drop_node:
                after -= 1
            if count == 0 and after == 0:
                continue
            links += _rise(self.far_s * self.far_in_N[node], self.far_s * (far_after * after - far * count))
            if count == 0:
                links += _rise(self.far_s * self.far_out_N[node], -self.far_s * self.load_EN[at])
            elif after == 0:
                links += _rise(self.far_s * self.far_out_N[node], self.far_s * self.load_EN[at])
        return links

    @cython.inner
    def sent_change(self, expert: Index, add: Int, drop: Int) -> Real:
        """By how much the sum of what devices send to their nodes changes by a move."""
        links: Real = 0.0
        for turn in range(2):
            moved = drop if turn else add
            other = add if turn else drop
            if moved < 0:
                continue
            node: Index = self.node_D[moved]
            at = expert * self.num_nodes + node
            row = expert * self.num_devices
            stays: Int = 1 if other >= 0 and self.node_D[other] == node else 0
            if self.holders_EN[at] > turn or stays:  # the node has a holder before and after
                own = self.near_s * self.load_ED[row + moved]
                links += _rise(self.near_s * self.out_D[moved], own if turn else -own)
                continue
            for i in range(self.first_N[node], self.first_N[node + 1]):
                device: Index = self.member_D[i]
                if device != moved:
                    own = self.near_s * self.load_ED[row + device]
                    links += _rise(self.near_s * self.out_D[device], -own if turn else own)
        return links

    @cython.inner
    def exceeds_level(self, expert: Index, add_node: Int, drop_node: Int) -> Index:
        """Whether more than ``level`` experts cross a NIC after a move between nodes."""
        left: Int = 0
        left_after: Int = 0
        for node in range(self.num_nodes):
            count = self.holders_EN[expert * self.num_nodes + node]
            after = self.holders_after(count, node, add_node, drop_node)
            left += 1 if count > 0 else 0
            left_after += 1 if after > 0 else 0
        is_first: Int = 1
        at: Index = self.node_D[self.owner_E[expert]]
        for _ in range(self.num_nodes):
            count = self.holders_EN[expert * self.num_nodes + at]
            after = self.holders_after(count, at, add_node, drop_node)
            left -= 1 if count > 0 else 0
            if after > 0:
                left_after -= 1
                gets = self.gets_N[at] + (0 if is_first or count > 0 else 1)
                sends = self.sends_N[at] + (1 if left_after > 0 else 0)
                sends -= 1 if count > 0 and left > 0 else 0
                if gets > self.level or sends > self.level:
                    return 1
            is_first = 0
            at = at + 1 if at + 1 < self.num_nodes else 0
        return 0

    @cython.inner
    def holders_after(self, count: Int, node: Index, add_node: Int, drop_node: Int) -> Int:
        """Number of holders in a node after a move."""
        if node == add_node:
            count += 1
        if node == drop_node:
            count -= 1
        return count
