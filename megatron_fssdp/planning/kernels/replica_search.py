"""Kernel of the replica search: finds the placement of one layer with the fewest modelled seconds.

``planning/balanced/replica_planner.py`` says what is searched and why. The parts are: traffic, price, seeds
and moves of a layer.

Shape letters: D devices, E experts, N nodes.
"""

from megatron_fssdp.planning.kernels.parts.replica_moves import MovingLayer
from megatron_fssdp.planning.native import compiler_marks as cython
from megatron_fssdp.planning.native.kernel_types import Index, Int, Ints, ReadInts, ReadReals, Real

_PATIENCE = 2  # levels of transfers without a gain after which no higher level is tried
# Parts of the mean load that owners keep in seeds: from a little more than all, to so little that most pairs
# stay on their devices.
_NUM_RATIOS = 8
_HIGHEST_RATIO = 1.1
_RATIO_STEP = 0.14


@cython.cclass
class _Search(MovingLayer):
    """The order in which seeds and moves are tried."""

    @cython.inner
    def descend_by_levels(self) -> cython.void:
        """Start with the owners; descend with one prepaid expert on each link, then two, and so on.

        One replica that crosses a NIC makes the whole transfer longer, and the next ones on other NICs are
        free. So a single move rarely pays, although several together do. With a prepaid level they pay one by
        one.
        """
        self.clear_all()
        level: Int = 0
        num_missed: Int = 0
        while num_missed < _PATIENCE and level < self.num_experts and self.num_prices < self.most_prices:
            level += 1
            self.prepaid_near = level
            if self.num_nodes > 1:
                self.prepaid_far = level
                self.prepaid_near = 0
            self.is_smooth = 1
            while self.num_prices < self.most_prices and self.step(0):
                pass
            self.is_smooth = 0
            self.descend()
            self.prepaid_near = self.prepaid_far = 0
            num_missed = 0 if self.keep_if_better() else num_missed + 1
        self.go_back()
        self.descend()
        self.keep_if_better()

    @cython.inner
    def descend_from_kicks(self) -> cython.void:
        """Change all replicas of one expert at once and descend; keep what gains, otherwise go back."""
        self.go_back()
        turn: Index = 0
        num_missed: Index = 0
        while num_missed < 3 * self.num_experts and self.num_prices < self.most_prices:
            kind = turn // self.num_experts % 3
            if turn % self.num_experts == 0:
                self.rank_experts()
            expert: Index = self.wanted_E[turn % self.num_experts]
            turn += 1
            num_missed += 1
            self.take_out(expert)
            changed = self.clear(expert) if kind == 0 else self.widen(expert, kind == 2)
            self.bring_in(expert)
            if changed:
                self.descend()
                if self.keep_if_better():
                    num_missed = 0
                else:
                    self.go_back()

    @cython.inner
    def rank_experts(self) -> cython.void:
        """Write the experts in descending load to ``wanted_E`` (insertion sort)."""
        for expert in range(self.num_experts):
            at: Index = expert
            while at > 0 and self.total_E[self.wanted_E[at - 1]] < self.total_E[expert]:
                self.wanted_E[at] = self.wanted_E[at - 1]
                at -= 1
            self.wanted_E[at] = expert

    @cython.inner
    def prune(self) -> cython.void:
        """Drop the replicas without which the kept placement costs no more."""
        self.go_back()
        for expert in range(self.num_experts):
            for device in range(self.num_devices):
                if self.present_ED[expert * self.num_devices + device] and self.owner_E[expert] != device:
                    at = expert * self.num_nodes + self.node_D[device]
                    leader = self.leader_EN[at]
                    self.take_out(expert)
                    self.drop(expert, device)
                    price = self.price_of(expert)
                    if price <= self.kept_price:
                        self.kept_price = price
                    else:
                        self.put(expert, device)
                        self.leader_EN[at] = leader
                    self.bring_in(expert)

    @cython.inner
    def run(self, num_prices: Int) -> cython.void:
        """Find a placement. Each of the three descents ends after about ``num_prices`` prices."""
        self.fill()
        self.kept_price = 2.0 * self.price_now() + 1.0  # so that the owners are kept first
        self.keep_if_better()
        self.seed_widely(1)
        for turn in range(_NUM_RATIOS):
            ratio = _HIGHEST_RATIO - turn * _RATIO_STEP
            self.seed_evenly(ratio, 0)
            if self.num_nodes > 1:
                self.seed_evenly(ratio, 1)
        if self.num_nodes > 1:
            self.seed_widely(0)
        self.go_back()
        self.most_prices = self.num_prices + num_prices
        self.descend()
        self.keep_if_better()
        self.most_prices = self.num_prices + num_prices
        self.descend_by_levels()
        self.most_prices = self.num_prices + num_prices
        self.descend_from_kicks()
        self.prune()


def search_replicas(
    load_ED: ReadReals,
    load_EN: ReadReals,
    owner_E: ReadInts,
    node_D: ReadInts,
    first_N: ReadInts,
    member_D: ReadInts,
    costs: ReadReals,
    hop_costs: ReadReals,
    slots: Int,
    max_replicated: Int,
    num_prices: Int,
    present_ED: Ints,
) -> Real:
    """Find a placement with few modelled seconds.

    Args:
        load_ED: (token, k) pairs by expert and source device, float64 ``[E, D]`` as one row.
        load_EN: Pairs by expert and source node, float64 ``[E, N]`` as one row.
        owner_E: Owner of each expert, int64 ``[E]``.
        node_D: Node of each device, int64 ``[D]``.
        first_N: Position of each node's first device in ``member_D``, and the number of devices; int64
            ``[N+1]``.
        member_D: Devices by node, then number; int64 ``[D]``.
        costs: Costs of the layer, see the top of this file.
        hop_costs: Costs for each number of hops, ``_NUM_HOP_COSTS`` each.
        slots: Most replicas that a device may hold.
        max_replicated: Most experts that may have replicas.
        num_prices: Number of prices after which each of the three descents ends.
        present_ED: Gets 1 where a device has an expert, int64 ``[E, D]`` as one row. If ``num_prices`` is
            negative, it is the placement to price, and nothing is searched.

    Returns:
        Seconds of the layer under the placement, without router counts.
    """
    num_experts: Index = owner_E.shape[0]
    num_devices: Index = node_D.shape[0]
    search = _Search(num_experts, num_devices, first_N.shape[0] - 1)
    search.load_ED, search.load_EN, search.owner_E = load_ED, load_EN, owner_E
    search.node_D, search.first_N, search.member_D = node_D, first_N, member_D
    search.costs, search.hop_costs = costs, hop_costs
    search.slots, search.max_replicated = slots, max_replicated
    if num_prices < 0:
        search.fill()
        for i in range(num_experts * num_devices):
            search.kept_ED[i] = present_ED[i]
        search.go_back()
        return search.price_now()
    with cython.nogil:
        search.run(num_prices)
    for i in range(num_experts * num_devices):
        present_ED[i] = search.present_ED[i]
    return search.kept_price
