"""Moves of the replica search: one replica more, less, elsewhere or in place of another. Part of its kernel.

Shape letters: D devices, E experts, N nodes.
"""

from megatron_fssdp.planning.kernels.parts.smooth_price import SmoothLayer
from megatron_fssdp.planning.native import compiler_marks as cython
from megatron_fssdp.planning.native.kernel_types import Index, Int, Ints, Real, Reals
from megatron_fssdp.planning.native.work_arrays import zero_ints

_GAIN = 1e-9  # smallest relative gain; smaller ones are rounding errors


@cython.cclass
class MovingLayer(SmoothLayer):
    """A layer whose replicas move while that lowers the price.

    Attributes:
        most_prices: Number of prices after which no more moves are sought.
        kept_ED: The best placement so far, like ``present_ED``.
        kept_price: Price of that placement.
        listed_E: 1 for the experts that had no move that gains; they are not tried again.
        chosen_E: Experts whose moves are tried, the first ``num_chosen``.
        part_E: Their parts of the busiest resource.
        threshold: Seconds that a move must gain.
        free_N: Least loaded device of each node with a free slot and without the expert that is out; -1 if
            there is none.
        best: Lowest score of the tried moves.
        best_from: Device that loses the expert in the best move; -1 for none.
        best_to: Device that gets the expert; -1 for none.
        best_instead: Expert whose replica on that device makes room; -1 for none.
    """

    most_prices: Int
    kept_ED: Ints
    kept_price: Real
    listed_E: Ints
    chosen_E: Ints
    num_chosen: Index
    part_E: Reals
    threshold: Real
    free_N: Ints
    best: Real
    best_from: Int
    best_to: Int
    best_instead: Int

    def __init__(self, num_experts: Index, num_devices: Index, num_nodes: Index) -> None:
        SmoothLayer.__init__(self, num_experts, num_devices, num_nodes)
        self.kept_ED = zero_ints(num_experts * num_devices)
        self.listed_E, self.chosen_E = self.new_ints(num_experts), self.new_ints(2 * num_experts)
        self.part_E = self.new_reals(2 * num_experts)
        self.free_N = self.new_ints(num_nodes)
        self.num_chosen = 0
        self.most_prices = self.best_from = self.best_to = self.best_instead = 0
        self.best = self.kept_price = self.threshold = 0.0

    @cython.inner
    def keep_if_better(self) -> Index:
        """Keep the present placement if its price is lower than that of the kept one; 1 if so."""
        price = self.price()
        if price >= self.kept_price * (1 - _GAIN):
            return 0
        self.kept_price = price
        for i in range(self.num_experts * self.num_devices):
            self.kept_ED[i] = self.present_ED[i]
        return 1

    @cython.inner
    def go_to(self, wanted_ED: Ints) -> cython.void:
        """Put the experts exactly on the devices where ``wanted_ED`` is 1."""
        for expert in range(self.num_experts):
            row = expert * self.num_devices
            differs: Int = 0
            for device in range(self.num_devices):
                differs += 1 if self.present_ED[row + device] != wanted_ED[row + device] else 0
            if differs:
                self.count(expert, -1)
                for device in range(self.num_devices):
                    if self.present_ED[row + device] > wanted_ED[row + device]:
                        self.drop(expert, device)
                for device in range(self.num_devices):
                    if self.present_ED[row + device] < wanted_ED[row + device]:
                        self.put(expert, device)
                self.count(expert, 1)

    @cython.inner
    def may_replicate(self, expert: Index) -> Index:
        """Whether an expert that is out may get one more replica."""
        return 1 if self.holders_E[expert] > 1 or self.num_replicated < self.max_replicated else 0

    @cython.inner
    def least_loaded(self, expert: Index, node: Index, is_full: Int) -> Int:
        """The least loaded device of a node without the expert; -1 if there is none.

        Args:
            expert: The expert.
            node: The node.
            is_full: Whether the device has no free slot, or has one.
        """
        found: Int = -1
        for i in range(self.first_N[node], self.first_N[node + 1]):
            device: Index = self.member_D[i]
            if self.present_ED[expert * self.num_devices + device]:
                continue
            if (self.used_D[device] >= self.slots) != is_full:
                continue
            if found < 0 or self.load_D[device] < self.load_D[found]:
                found = device
        return found

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
            if kind == 4:
                return 0.0 if self.holders_EN[row] else self.load_EN[row]
            if self.holders_EN[row] == 0:
                return 0.0
            return self.unserved_E[expert] / self.holders_E[expert] * self.holders_EN[row]
        own = self.load_ED[expert * self.num_devices + at]
        is_present = self.present_ED[expert * self.num_devices + at]
        row = expert * self.num_nodes + self.node_D[at]
        if kind == 2:
            return 0.0 if is_present or self.holders_EN[row] == 0 else own
        if is_present == 0:
            return 0.0
        near = self.rest_EN[row] / self.holders_EN[row]
        return near if kind == 1 else own + near + self.unserved_E[expert] / self.holders_E[expert]

    @cython.inner
    def choose_largest(self, kind: Index, at: Index, number: Index) -> cython.void:
        """Choose unlisted experts with the largest parts of one resource; see :meth:`part_of`."""
        first = self.num_chosen
        for expert in range(self.num_experts):
            if self.listed_E[expert]:
                continue
            part = self.part_of(expert, kind, at)
            if part <= 0.0:
                continue
            i: Index = self.num_chosen
            if i == first + number:
                i -= 1
                if self.part_E[i] >= part:
                    continue
            else:
                self.num_chosen += 1
            while i > first and self.part_E[i - 1] < part:
                self.part_E[i] = self.part_E[i - 1]
                self.chosen_E[i] = self.chosen_E[i - 1]
                i -= 1
            self.part_E[i] = part
            self.chosen_E[i] = expert

    @cython.inner
    def choose_experts(self, number: Index) -> cython.void:
        """Choose experts on the device that computes most and on the link that takes longest."""
        self.num_chosen = 0
        self.weigh()
        self.choose_largest(0, self.busiest, number)
        self.choose_largest(self.link_kind, self.link_at, number)

    @cython.inner
    def note(self, price: Real, source: Int, to: Int, instead: Int) -> cython.void:
        """Note a move if it is the best so far."""
        if price < self.best:
            self.best, self.best_from, self.best_to, self.best_instead = price, source, to, instead

    @cython.inner
    def may_gain(self) -> Index:
        """Whether a move of the expert that is out may gain: whether the layer without it costs less."""
        return 1 if self.is_smooth or self.least < self.best else 0

    @cython.inner
    def try_adding(self, expert: Index, source: Int) -> cython.void:
        """Try one more replica of an expert that is out, which just lost the one on ``source`` (-1: none)."""
        if self.may_replicate(expert):
            for node in range(self.num_nodes):
                device = self.free_N[node]
                if device >= 0:
                    self.put(expert, device)
                    self.note(self.score(expert), source, device, -1)
                    self.drop(expert, device)

    @cython.inner
    def try_instead(self, expert: Index) -> cython.void:
        """Try an expert that is out in place of others, on the least loaded full device of each node."""
        if self.may_replicate(expert) == 0:
            return
        for node in range(self.num_nodes):
            device = self.least_loaded(expert, node, 1)
            if device < 0:
                continue
            for other in range(self.num_experts):
                if self.present_ED[other * self.num_devices + device] == 0 or self.owner_E[other] == device:
                    continue
                self.count(other, -1)
                change: Real = 0.0
                if self.is_smooth:
                    self.prepare(other)
                    change = -self.score(other)
                self.drop(other, device)
                if self.is_smooth:
                    change += self.score(other)
                self.count(other, 1)
                self.prepare(expert)
                if self.may_gain():
                    self.put(expert, device)
                    self.note(self.score(expert) + change, -1, device, other)
                    self.drop(expert, device)
                self.count(other, -1)
                self.put(other, device)
                self.count(other, 1)

    @cython.inner
    def improve(self, expert: Index) -> Index:
        """Make the best move of an expert: another replica, one less, or one elsewhere. 0 if none gains."""
        row = expert * self.num_devices
        self.best_from = self.best_to = self.best_instead = -1
        self.count(expert, -1)
        self.prepare(expert)
        self.best = self.score(expert) - self.threshold
        others: Int = 0
        if self.may_gain():
            for node in range(self.num_nodes):
                self.free_N[node] = self.least_loaded(expert, node, 0)
            self.try_adding(expert, -1)
            others = 0 if self.best_to >= 0 else self.holders_E[expert] - 1
        for _ in range(others):
            source: Index = self.holder_ED[row + 1]
            self.drop(expert, source)
            self.note(self.score(expert), source, -1, -1)
            self.try_adding(expert, source)
            self.put(expert, source)
        if self.best_from < 0 and self.best_to < 0:
            self.try_instead(expert)
        if self.best_instead >= 0:
            self.count(self.best_instead, -1)
            self.drop(self.best_instead, self.best_to)
            self.count(self.best_instead, 1)
        if self.best_from >= 0:
            self.drop(expert, self.best_from)
        if self.best_to >= 0:
            self.put(expert, self.best_to)
        self.count(expert, 1)
        return 1 if self.best_from >= 0 or self.best_to >= 0 else 0

    @cython.inner
    def descend(self, is_smooth: Int, number: Index, least_gain: Real) -> cython.void:
        """Make moves until no expert of the busiest device and link gains, or until ``most_prices``.

        Args:
            is_smooth: Whether the smooth price falls, or the price.
            number: Number of experts of each resource that are tried.
            least_gain: Smallest gain of a move, as a part of the seconds.
        """
        self.is_smooth = is_smooth
        self.threshold = least_gain * self.kept_price
        for expert in range(self.num_experts):
            self.listed_E[expert] = 0
        moves: Index = 1
        while moves and self.num_prices < self.most_prices:
            moves = 0
            self.choose_experts(number)
            for i in range(self.num_chosen):
                expert = self.chosen_E[i]
                if moves == 0 and self.listed_E[expert] == 0:
                    moves = self.improve(expert)
                    self.listed_E[expert] = 1 - moves
