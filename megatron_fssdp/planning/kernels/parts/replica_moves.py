"""Moves of the replica search: one replica more, less, elsewhere or in place of another. Part of its kernel.

Shape letters: D devices, E experts, N nodes.
"""

from megatron_fssdp.planning.kernels.parts.layer_price import _DISPATCH
from megatron_fssdp.planning.kernels.parts.replica_seeds import _GAIN, SeededLayer
from megatron_fssdp.planning.native import compiler_marks as cython
from megatron_fssdp.planning.native.kernel_types import Index, Int, Ints, Real
from megatron_fssdp.planning.native.work_arrays import zero_ints

# How wide a step looks. Larger numbers find slightly better placements at several times as many prices
# (benchmarks/planner_quality.py).
_NUM_EXPERTS = 2  # experts of the busiest device, and of the busiest link, that a step tries
_NUM_DEVICES = 1  # least loaded devices of each node that a step tries


@cython.cclass
class MovingLayer(SeededLayer):
    """A layer whose replicas move while that lowers the price.

    Attributes:
        most_prices: Number of prices after which a descent ends.
        chosen_E: Experts whose moves are tried, the first ``num_chosen``.
        chosen_D: Devices on which a replica is tried, the first ``num_devices_chosen``.
        best: Lowest price of the tried moves.
        best_expert: Expert of the best move; -1 if no move gains.
        best_from: Device that loses the expert; -1 for none.
        best_to: Device that gets the expert; -1 for none.
        best_instead: Expert whose replica on that device makes room; -1 for none.
    """

    most_prices: Int
    chosen_E: Ints
    num_chosen: Index
    chosen_D: Ints
    num_devices_chosen: Index
    best: Real
    best_expert: Int
    best_from: Int
    best_to: Int
    best_instead: Int

    def __init__(self, num_experts: Index, num_devices: Index, num_nodes: Index) -> None:
        SeededLayer.__init__(self, num_experts, num_devices, num_nodes)
        self.chosen_E, self.chosen_D = zero_ints(num_experts), zero_ints(num_devices)
        self.num_chosen = self.num_devices_chosen = 0
        self.most_prices = self.best_expert = self.best_from = self.best_to = self.best_instead = 0
        self.best = 0.0

    @cython.inner
    def part_of(self, expert: Index, kind: Index, at: Index) -> Real:
        """Pairs of an expert on one resource.

        Args:
            expert: The expert.
            kind: 0 computed by device ``at``, 1 received by it, 2 sent by it to its node; 3 received by node
                ``at``, 4 sent by it.
            at: The device or node.
        """
        if kind > 2:
            row = expert * self.num_nodes + at
            if kind == 3:
                return self.far_E[expert] * self.holders_EN[row]
            return 0.0 if self.holders_EN[row] else self.load_EN[row]
        own = self.load_ED[expert * self.num_devices + at]
        node: Index = self.node_D[at]
        if self.present_ED[expert * self.num_devices + at] == 0:
            held = self.holders_EN[expert * self.num_nodes + node]
            return own if kind == 2 and held else 0.0
        if kind == 2:
            return 0.0
        near = self.share_EN[expert * self.num_nodes + node]
        return near if kind == 1 else own + near + self.far_E[expert]

    @cython.inner
    def choose_largest(self, kind: Index, at: Index, number: Index) -> cython.void:
        """Choose the experts with the largest parts of one resource; see :meth:`part_of`."""
        for _ in range(number):
            found: Int = -1
            most: Real = 0.0
            for expert in range(self.num_experts):
                if self.listed_E[expert] == 0:
                    part = self.part_of(expert, kind, at)
                    if part > most:
                        found, most = expert, part
            if found < 0:
                return
            self.listed_E[found] = 1
            self.chosen_E[self.num_chosen] = found
            self.num_chosen += 1

    @cython.inner
    def choose_experts(self, number: Index) -> cython.void:
        """Choose experts on the device that computes most and on the link that takes longest."""
        self.unlist()
        self.num_chosen = 0
        busiest: Index = 0
        gets: Index = 0
        sends: Index = 0
        for device in range(self.num_devices):
            if self.load_D[device] > self.load_D[busiest]:
                busiest = device
            if self.in_D[device] > self.in_D[gets]:
                gets = device
            if self.out_D[device] > self.out_D[sends]:
                sends = device
        self.choose_largest(0, busiest, number)
        far_gets: Index = 0
        far_sends: Index = 0
        for node in range(self.num_nodes):
            if self.far_in_N[node] > self.far_in_N[far_gets]:
                far_gets = node
            if self.far_out_N[node] > self.far_out_N[far_sends]:
                far_sends = node
        near = max(self.in_D[gets], self.out_D[sends])
        far = max(self.far_in_N[far_gets], self.far_out_N[far_sends])
        if self.link_seconds(_DISPATCH + 2, far) > self.link_seconds(_DISPATCH, near):
            if self.far_in_N[far_gets] >= self.far_out_N[far_sends]:
                self.choose_largest(3, far_gets, number)
            else:
                self.choose_largest(4, far_sends, number)
        elif self.in_D[gets] >= self.out_D[sends]:
            self.choose_largest(1, gets, number)
        else:
            self.choose_largest(2, sends, number)

    @cython.inner
    def choose_devices(self, expert: Index, number: Index) -> cython.void:
        """Choose devices without an expert.

        They are, in each node, the least loaded ones and the one with most of the expert's pairs.
        """
        self.num_devices_chosen = 0
        for node in range(self.num_nodes):
            first = self.num_devices_chosen
            for turn in range(number + 1):
                found: Int = -1
                most: Real = 0.0
                for i in range(self.first_N[node], self.first_N[node + 1]):
                    device: Index = self.member_D[i]
                    is_taken = self.present_ED[expert * self.num_devices + device]
                    for j in range(first, self.num_devices_chosen):
                        if self.chosen_D[j] == device:
                            is_taken = 1
                    if is_taken:
                        continue
                    merit = -self.load_D[device]
                    if turn == number:
                        merit = self.load_ED[expert * self.num_devices + device]
                    if found < 0 or merit > most:
                        found, most = device, merit
                if found < 0:
                    break
                self.chosen_D[self.num_devices_chosen] = found
                self.num_devices_chosen += 1

    @cython.inner
    def note(self, price: Real, expert: Int, source: Int, to: Int, instead: Int) -> cython.void:
        """Note a move if it is the best one so far; see the attributes."""
        if price < self.best:
            self.best = price
            self.best_expert, self.best_from, self.best_to, self.best_instead = expert, source, to, instead

    @cython.inner
    def try_instead(self, expert: Index, device: Index) -> cython.void:
        """Try an expert that is out in place of each replica on a device."""
        for other in range(self.num_experts):
            place = other * self.num_devices + device
            if self.present_ED[place] == 0 or self.owner_E[other] == device:
                continue
            at = other * self.num_nodes + self.node_D[device]
            leader = self.leader_EN[at]
            self.take_out(other)
            self.drop(other, device)
            self.bring_in(other)
            self.note_others()
            if self.may_replicate(expert):
                self.put(expert, device)
                self.note(self.price_of(expert), expert, -1, device, other)
                self.drop(expert, device)
            self.take_out(other)
            self.put(other, device)
            self.leader_EN[at] = leader
            self.bring_in(other)
            self.note_others()

    @cython.inner
    def try_adding(self, expert: Index, source: Int, number: Index) -> cython.void:
        """Try one more replica of an expert that is out, which just lost the one on ``source`` (-1: none)."""
        if not self.may_replicate(expert):
            return
        self.choose_devices(expert, number)
        for i in range(self.num_devices_chosen):
            device: Index = self.chosen_D[i]
            if device == source:
                continue
            self.put(expert, device)
            price = self.price_of(expert)
            self.drop(expert, device)
            if self.used_D[device] < self.slots:
                self.note(price, expert, source, device, -1)
            elif source < 0 and price < self.best:
                self.try_instead(expert, device)

    @cython.inner
    def try_moves(self, expert: Index, number: Index) -> cython.void:
        """Try all moves of one expert: another replica, one less, or one elsewhere."""
        self.take_out(expert)
        self.try_adding(expert, -1, number)
        if self.holders_E[expert] > 1:
            for device in range(self.num_devices):
                if self.present_ED[expert * self.num_devices + device] and self.owner_E[expert] != device:
                    at = expert * self.num_nodes + self.node_D[device]
                    leader = self.leader_EN[at]
                    self.drop(expert, device)
                    self.note(self.price_of(expert), expert, device, -1, -1)
                    self.try_adding(expert, device, 1)
                    self.put(expert, device)
                    self.leader_EN[at] = leader
        self.bring_in(expert)

    @cython.inner
    def make_best_move(self) -> Index:
        """Make the move that :meth:`note` has; 0 if there is none."""
        if self.best_expert < 0:
            return 0
        if self.best_instead >= 0:
            self.take_out(self.best_instead)
            self.drop(self.best_instead, self.best_to)
            self.bring_in(self.best_instead)
        self.take_out(self.best_expert)
        if self.best_from >= 0:
            self.drop(self.best_expert, self.best_from)
        if self.best_to >= 0:
            self.put(self.best_expert, self.best_to)
        self.bring_in(self.best_expert)
        return 1

    @cython.inner
    def step(self, of_replicated: Index) -> Index:
        """Make the best move of the first chosen expert that has one; 0 if no expert has.

        Args:
            of_replicated: Whether all experts with replicas are tried, not only those on the busiest device
                and link.
        """
        self.best = self.price_now() * (1 - _GAIN)
        self.best_expert = -1
        if of_replicated:
            for expert in range(self.num_experts):
                if self.holders_E[expert] > 1 and self.best_expert < 0:
                    self.try_moves(expert, _NUM_DEVICES)
        else:
            self.choose_experts(_NUM_EXPERTS)
            for i in range(self.num_chosen):
                if self.best_expert < 0:
                    self.try_moves(self.chosen_E[i], _NUM_DEVICES)
        return self.make_best_move()

    @cython.inner
    def descend(self) -> cython.void:
        """Make moves until none gains, or until ``most_prices``."""
        while self.num_prices < self.most_prices and (self.step(0) or self.step(1)):
            pass
