"""Kernel of the replica search: finds the placement of one layer with the fewest modelled seconds.

It also prices single placements.

``planning/balanced/replica_planner.py`` says what is searched and why. The parts are: traffic, price,
smooth price, moves and seeds of a layer.

Shape letters: D devices, E experts, N nodes.
"""

from megatron_fssdp.planning.kernels.parts.kept_replicas import _GAIN
from megatron_fssdp.planning.kernels.parts.layer_price import PricedLayer
from megatron_fssdp.planning.kernels.parts.layer_traffic import Layer
from megatron_fssdp.planning.kernels.parts.replica_seeds import SeededLayer
from megatron_fssdp.planning.native import compiler_marks as cython
from megatron_fssdp.planning.native.kernel_types import (
    Index,
    Int,
    Ints,
    ReadBytes2,
    ReadInts,
    ReadReals,
    Real,
)

# How wide a step looks: experts of the busiest device, and of the busiest link, that it tries. More experts
# take longer and find little more (benchmarks/planner_quality.py).
_NUM_SMOOTH = 4
_NUM_EXACT = 2
_NUM_LAST = 4  # where nothing but the price is left to lower
_LEAST_GAIN = 2e-4  # smallest gain of a move under the smooth price, which is an estimate
# Parts of the mean load that owners keep in seeds, between 0.82 and 0.12. The low ones need many slots.
_NUM_RATIOS = 6
_HIGHEST_RATIO = 0.82
_RATIO_STEP = 0.14
# Devices that Pro-Prophet's seeds leave out; with more of them, its replicas are nearly single.
_MOST_LEFT_OUT = 16
# Prices of all kicks, times the number of experts: small layers need more kicks, and their prices take less
# time.
_KICK_PRICES = 20000


@cython.cclass
class _Search(SeededLayer):
    """The order in which seeds and moves are tried."""

    @cython.inner
    def start_from(self, present_ED: Ints) -> cython.void:
        """Make the replicas of a placement one more seed."""
        for expert in range(self.num_experts):
            for device in range(self.num_devices):
                if present_ED[expert * self.num_devices + device] and self.owner_E[expert] != device:
                    self.start_P[self.num_start] = expert * self.num_devices + device
                    self.num_start += 1

    @cython.inner
    def write_kept(self, present_ED: Ints) -> cython.void:
        """Write the best placement to ``present_ED``."""
        for i in range(self.num_start):
            present_ED[self.start_P[i]] = 0
        for i in range(self.num_kept):
            present_ED[self.kept_P[i]] = 1

    @cython.inner
    def descend_twice(self) -> cython.void:
        """Lower the smooth price and then the price; keep the best placement."""
        self.descend(1, _NUM_SMOOTH, _LEAST_GAIN)
        self.keep_if_better()
        self.descend(0, _NUM_EXACT, _GAIN)
        self.keep_if_better()

    @cython.inner
    def least_at(self, level: Int) -> Real:
        """Fewest seconds of a layer whose transfers bring ``level`` experts over the busiest NIC."""
        return self.seconds(self.all_pairs / self.num_devices, 0.0, 0.0, 0, level, 1, 0)

    @cython.inner
    def climb_levels(self) -> cython.void:
        """Descend with at most one expert over each NIC, then two, and so on; keep the best placement.

        The smooth price alone finds the best levels, and the price only descends at these.

        One replica that crosses a NIC makes the whole transfer longer, and the next ones over other NICs are
        free. So a single move rarely pays, although several together do.
        """
        self.clear_all()
        self.level = 1
        kept_level: Int = 1
        gained: Index = 1
        while gained and self.level <= self.slots * self.num_devices:
            if self.least_at(self.level) >= self.kept_price:
                break
            # All levels that hide completely cost the same, so only the highest one is tried.
            if self.least_at(self.level + 1) > self.least_at(1):
                self.descend(1, _NUM_SMOOTH, _LEAST_GAIN)
                gained = self.keep_if_better()
                if gained:
                    kept_level = self.level
            self.level += 1
        # The placements above begin with what lower levels needed. Begin anew at the best levels.
        for change in range(-1, 2):
            self.level = kept_level + change
            if self.level > 0:
                self.clear_all()
                self.descend_twice()

    @cython.inner
    def kick(self) -> cython.void:
        """Change all replicas of one expert at once and descend; keep what gains, otherwise go back."""
        self.most_prices = self.num_prices + _KICK_PRICES // self.num_experts
        turn: Index = 0
        missed: Index = 0
        while missed < 3 * self.num_experts and self.num_prices < self.most_prices:
            expert: Index = self.ranked_E[turn // 3 % self.num_experts]
            kind = turn % 3
            turn += 1
            missed += 1
            self.count(expert, -1)
            changed = self.clear(expert) if kind == 0 else self.widen(expert, kind == 2, 1)
            self.count(expert, 1)
            if changed:
                self.descend(0, _NUM_LAST, _GAIN)
                if self.keep_if_better():
                    missed = 0
                else:
                    self.go_to(self.kept_P, self.num_kept)

    @cython.inner
    def prune(self) -> cython.void:
        """Drop the replicas without which the kept placement costs no more."""
        self.go_to(self.kept_P, self.num_kept)
        kept: Index = 0
        for i in range(self.num_kept):
            expert: Index = self.kept_P[i] // self.num_devices
            device = self.kept_P[i] - expert * self.num_devices
            self.count(expert, -1)
            self.drop(expert, device)
            self.prepare_prices(expert)
            price = self.price_of(expert)
            if price <= self.kept_price:
                self.kept_price = price
            else:
                self.put(expert, device)
                self.kept_P[kept] = self.kept_P[i]
                kept += 1
            self.count(expert, 1)
        self.num_kept = kept

    @cython.inner
    def run(self, num_prices: Int, least_saving: Real, fixed_s: Real) -> cython.void:
        """Find a placement; see :func:`search_replicas`."""
        self.line_up_owned()
        self.fill()
        self.rank()
        plain = self.price()
        self.kept_price = 2.0 * plain + 1.0  # so that the owners are kept first
        self.keep_if_better()
        self.most_prices = num_prices
        self.seed_widely()
        num_left_out: Int = 1
        self.seed_as_prophet(0)
        while num_left_out < self.num_devices - 1 and num_left_out <= _MOST_LEFT_OUT:
            self.seed_as_prophet(num_left_out)
            num_left_out *= 2
        self.weigh()
        if self.num_nodes > 1:
            self.climb_levels()
        else:
            self.descend_twice()
        num_free: Int = 1
        for turn in range(_NUM_RATIOS):
            ratio = _HIGHEST_RATIO - turn * _RATIO_STEP
            if self.num_nodes > 1:
                self.seed_evenly(ratio, 1)
            if num_free > 0:  # otherwise the next lower part gives the same seed
                num_free = self.seed_evenly(ratio, 0)
        self.go_to(self.start_P, self.num_start)
        self.keep_if_better()
        self.go_to(self.kept_P, self.num_kept)
        self.most_prices = self.num_prices + num_prices
        self.descend(0, _NUM_LAST, _GAIN)
        self.keep_if_better()
        # Several devices or links are equally busy now, so no single move lowers the price. The smooth price
        # relieves one after the other. Without this, W3 takes 7 % longer on four nodes of H200.
        self.level = self.num_experts
        self.descend(1, _NUM_EXACT, _LEAST_GAIN)
        self.descend(0, _NUM_LAST, _GAIN)
        self.keep_if_better()
        self.go_to(self.kept_P, self.num_kept)
        self.kick()
        self.prune()
        if self.kept_price + fixed_s > (1.0 - least_saving) * (plain + fixed_s):
            self.num_kept = 0
            self.kept_price = plain


@cython.cfunc
def _describe(
    layer: Layer,
    load_ED: ReadReals,
    load_EN: ReadReals,
    owner_E: ReadInts,
    node_D: ReadInts,
    first_N: ReadInts,
    member_D: ReadInts,
    costs: ReadReals,
    hop_costs: ReadReals,
) -> cython.void:
    """Give a layer its loads, owners, nodes and costs."""
    layer.load_ED, layer.load_EN, layer.owner_E = load_ED, load_EN, owner_E
    layer.node_D, layer.first_N, layer.member_D = node_D, first_N, member_D
    layer.costs, layer.hop_costs = costs, hop_costs


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
    least_saving: Real,
    fixed_s: Real,
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
        costs: Costs of the layer, see ``parts/layer_price.py``.
        hop_costs: Costs for each number of hops, ``_NUM_HOP_COSTS`` each.
        slots: Most replicas that a device may hold.
        max_replicated: Most experts that may have replicas.
        num_prices: Number of prices after which the descents before the kicks end, and again that of the last
            one.
        least_saving: Smallest saving of all replicas, as a part of the seconds without them. If they save
            less, there are none.
        fixed_s: Seconds that every placement takes beside those of ``costs``.
        present_ED: 1 where a device has an expert, int64 ``[E, D]`` as one row. The placement is one more
            seed, and the result takes its place.

    Returns:
        Seconds of the layer under the placement.
    """
    num_experts: Index = owner_E.shape[0]
    num_devices: Index = node_D.shape[0]
    search = _Search(num_experts, num_devices, first_N.shape[0] - 1, slots)
    _describe(search, load_ED, load_EN, owner_E, node_D, first_N, member_D, costs, hop_costs)
    search.max_replicated = max_replicated
    with cython.nogil:
        search.start_from(present_ED)
        search.run(num_prices, least_saving, fixed_s)
        search.write_kept(present_ED)
    return search.kept_price + fixed_s


def price_replicas(
    load_ED: ReadReals,
    load_EN: ReadReals,
    owner_E: ReadInts,
    node_D: ReadInts,
    first_N: ReadInts,
    member_D: ReadInts,
    costs: ReadReals,
    hop_costs: ReadReals,
    fixed_s: Real,
    present_ED: ReadBytes2,
) -> Real:
    """Seconds of the layer under a placement.

    The arguments are those of :func:`search_replicas`, with the placement as bytes ``[E, D]``.
    """
    layer = PricedLayer(owner_E.shape[0], node_D.shape[0], first_N.shape[0] - 1, 0)
    _describe(layer, load_ED, load_EN, owner_E, node_D, first_N, member_D, costs, hop_costs)
    seconds: Real = fixed_s
    with cython.nogil:
        layer.fill_with(present_ED)
        seconds += layer.price()
    return seconds
