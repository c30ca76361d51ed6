"""Moves of the replica search: one replica more, less, elsewhere or in place of another. Part of its kernel.

Shape letters: D devices, E experts, N nodes.
"""

from megatron_fssdp.planning.kernels.parts.kept_replicas import _GAIN, KeptLayer
from megatron_fssdp.planning.kernels.parts.smooth_price import _FORBIDDEN
from megatron_fssdp.planning.native import compiler_marks as cython
from megatron_fssdp.planning.native.kernel_types import Index, Int, Ints, Real, Reals


@cython.cclass
class MovingLayer(KeptLayer):
    """A layer whose replicas move while that lowers the price.

    Attributes:
        most_prices: Number of prices after which no more moves are sought.
        listed_E: 1 for the experts that had no move that gains; they are not tried again.
        chosen_E: Experts whose moves are tried, the first ``num_chosen``.
        part_E: Their parts of the busiest resource.
        threshold: Seconds that a move must gain.
        free_N: Least loaded device of each node with a free slot and without the expert that moves; -1 if
            there is none.
        best: Lowest price of the tried moves, or lowest change of the smooth price.
        best_from: Device that loses the expert in the best move; -1 for none.
        best_to: Device that gets the expert; -1 for none.
        best_instead: Expert whose replica on that device makes room; -1 for none. If the expert leaves a
            device, this one comes there.
    """

    most_prices: Int
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

    def __init__(self, num_experts: Index, num_devices: Index, num_nodes: Index, slots: Int) -> None:
        KeptLayer.__init__(self, num_experts, num_devices, num_nodes, slots)
        self.listed_E, self.chosen_E = self.new_ints(num_experts), self.new_ints(2 * num_experts)
        self.part_E = self.new_reals(2 * num_experts)
        self.free_N = self.new_ints(num_nodes)
        self.num_chosen = 0
        self.most_prices = self.best_from = self.best_to = self.best_instead = 0
        self.best = self.threshold = 0.0

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
    def offer(self, expert: Index, kind: Index, at: Index, first: Index, number: Index) -> cython.void:
        """Choose an expert if its part is one of the ``number`` largest from place ``first`` on."""
        if self.listed_E[expert]:
            return
        part = self.part_of(expert, kind, at)
        if part <= 0.0:
            return
        i: Index = self.num_chosen
        if i == first + number:
            i -= 1
            if self.part_E[i] >= part:
                return
        else:
            self.num_chosen += 1
        while i > first and self.part_E[i - 1] < part:
            self.part_E[i] = self.part_E[i - 1]
            self.chosen_E[i] = self.chosen_E[i - 1]
            i -= 1
        self.part_E[i] = part
        self.chosen_E[i] = expert

    @cython.inner
    def choose_largest(self, kind: Index, at: Index, number: Index) -> cython.void:
        """Choose unlisted experts with the largest parts of one resource; see :meth:`part_of`."""
        first = self.num_chosen
        if kind > 1:
            for expert in range(self.num_experts):
                self.offer(expert, kind, at, first, number)
            return
        for i in range(self.first_owned_D[at], self.first_owned_D[at + 1]):
            self.offer(self.owned_E[i], kind, at, first, number)
        for i in range(self.used_D[at]):
            self.offer(self.held_D[at * self.slots + i], kind, at, first, number)

    @cython.inner
    def note(self, price: Real, source: Int, to: Int, instead: Int) -> cython.void:
        """Note a move if it is the best so far."""
        if price < self.best:
            self.best, self.best_from, self.best_to, self.best_instead = price, source, to, instead

    @cython.inner
    def improve_smoothly(self, expert: Index) -> Index:
        """Make the move of an expert that lowers the smooth price most; 0 if none gains."""
        row = expert * self.num_devices
        self.best = -self.threshold
        self.best_from = self.best_to = self.best_instead = -1
        may_add = self.may_replicate(expert)
        for node in range(self.num_nodes):
            device = self.least_loaded(expert, node, 0)
            self.free_N[node] = device
            if device >= 0 and may_add:
                self.note(self.change_by(expert, device, -1), -1, device, -1)
        if self.best_to < 0:
            for i in range(1, self.holders_E[expert]):
                source = self.holder_ED[row + i]
                self.note(self.change_by(expert, -1, source), source, -1, -1)
                for node in range(self.num_nodes):
                    device = self.free_N[node]
                    if device >= 0:
                        self.note(self.change_by(expert, device, source), source, device, -1)
        if self.best_to >= 0 or self.best_from >= 0:
            self.move(expert, self.best_to, self.best_from)
            return 1
        return self.exchange_smoothly(expert)

    @cython.inner
    def exchange_smoothly(self, expert: Index) -> Index:
        """Make the exchange of an expert that lowers the smooth price most; 0 if none does."""
        self.find_exchange(expert)
        other, add, drop = self.best_instead, self.best_to, self.best_from
        if other < 0:
            return 0
        change: Real = 0.0
        if drop >= 0:  # before the other one comes, so that slots suffice
            change += self.change_by(expert, -1, drop)
            self.move(expert, -1, drop)
        change += self.change_by(other, drop, add)
        self.move(other, drop, add)
        change += self.change_by(expert, add, -1)
        self.move(expert, add, -1)
        if change < -self.threshold:
            return 1
        self.undo_exchange(expert, other, add, drop)
        return 0

    @cython.inner
    def undo_exchange(self, expert: Index, other: Index, add: Int, drop: Int) -> cython.void:
        """Bring both experts back after an exchange; ``add`` and ``drop`` are where the first one went."""
        self.move(expert, -1, add)
        self.move(other, add, drop)
        if drop >= 0:
            self.move(expert, drop, -1)

    @cython.inner
    def find_exchange(self, expert: Index) -> cython.void:
        """Note the best exchange on the least loaded full device of each node, by the smooth price.

        The expert comes in addition, and the other one is dropped. Or both replicas exchange their devices.
        """
        for node in range(self.num_nodes):
            device = self.least_loaded(expert, node, 1)
            if device >= 0:
                if self.may_replicate(expert):
                    self.estimate_exchange(expert, device, -1)
                for i in range(1, self.holders_E[expert]):
                    self.estimate_exchange(expert, device, self.holder_ED[expert * self.num_devices + i])

    @cython.inner
    def estimate_exchange(self, expert: Index, device: Int, source: Int) -> cython.void:
        """Note the exchange of an expert with the replica on a device that has the fewest pairs.

        The estimate adds the changes of both experts; it leaves out that they may share other devices.

        Args:
            expert: The expert.
            device: Device that gets the expert.
            source: Device that gets the other one in exchange; -1 if that is dropped.
        """
        other: Int = -1
        least: Real = 0.0
        for i in range(self.used_D[device]):
            held: Index = self.held_D[device * self.slots + i]
            if source >= 0 and self.present_ED[held * self.num_devices + source]:
                continue
            part = self.part_of(held, 0, device)
            if other < 0 or part < least:
                other, least = held, part
        if other < 0:
            return
        change = self.change_by(other, source, device)
        self.load_D[device] -= least
        if source >= 0:
            self.load_D[source] += least
        change += self.change_by(expert, device, source)
        self.load_D[device] += least
        if source >= 0:
            self.load_D[source] -= least
        self.note(change, source, device, other)

    @cython.inner
    def try_adding(self, expert: Index, source: Int) -> cython.void:
        """Try one more replica of an expert that is out, which just lost the one on ``source`` (-1: none)."""
        if self.may_replicate(expert):
            for node in range(self.num_nodes):
                device = self.free_N[node]
                if device >= 0:
                    self.put(expert, device)
                    self.note(self.price_of(expert), source, device, -1)
                    self.drop(expert, device)

    @cython.inner
    def improve(self, expert: Index) -> Index:
        """Make the move of an expert that lowers the price most; 0 if none gains.

        An expert without which the layer costs as much gains by no move.
        """
        row = expert * self.num_devices
        self.best_from = self.best_to = self.best_instead = -1
        self.count(expert, -1)
        self.prepare_prices(expert)
        before = self.price_of(expert) - self.threshold
        self.best = before
        may_gain: Index = 1 if self.least < before else 0
        if may_gain:
            for node in range(self.num_nodes):
                self.free_N[node] = self.least_loaded(expert, node, 0)
            self.try_adding(expert, -1)
        if self.best_to < 0:
            for _ in range(self.holders_E[expert] - 1 if may_gain else 0):
                source: Index = self.holder_ED[row + 1]
                self.drop(expert, source)
                self.note(self.price_of(expert), source, -1, -1)
                self.try_adding(expert, source)
                self.put(expert, source)
        if self.best_from >= 0:
            self.drop(expert, self.best_from)
        if self.best_to >= 0:
            self.put(expert, self.best_to)
        self.count(expert, 1)
        if self.best_to >= 0 or self.best_from >= 0:
            return 1
        return self.exchange(expert, before) if may_gain else 0

    @cython.inner
    def exchange(self, expert: Index, before: Real) -> Index:
        """Make the exchange of an expert that seems best if the price is then below ``before``; else 0."""
        self.best = _FORBIDDEN
        self.find_exchange(expert)
        other, add, drop = self.best_instead, self.best_to, self.best_from
        if other < 0:
            return 0
        if drop >= 0:
            self.move(expert, -1, drop)
        self.move(other, drop, add)
        self.move(expert, add, -1)
        if self.price() < before:
            return 1
        self.undo_exchange(expert, other, add, drop)
        return 0

    @cython.inner
    def descend(self, is_smooth: Int, number: Index, least_gain: Real) -> cython.void:
        """Make moves until no expert of the busiest device and link gains, or until ``most_prices``.

        It also ends if the busiest ones got no shorter in as many moves as there are loads and links: the
        weights of the smooth price change, so moves could follow each other in a circle.

        Args:
            is_smooth: Whether the smooth price falls, or the price.
            number: Number of experts of each resource that are tried.
            least_gain: Smallest gain of a move, as a part of the seconds.
        """
        self.threshold = least_gain * self.kept_price
        for expert in range(self.num_experts):
            self.listed_E[expert] = 0
        lowest_s: Real = _FORBIDDEN
        patience: Int = 0
        moves: Index = 1
        while moves and self.num_prices < self.most_prices:
            moves = 0
            self.weigh()
            if self.highest_s < lowest_s * (1 - _GAIN):
                lowest_s = self.highest_s
                patience = 3 * self.num_devices + 2 * self.num_nodes
            elif patience == 0:
                break
            patience -= 1
            for kind in range(2):
                self.num_chosen = 0
                if kind and moves == 0:
                    self.choose_largest(self.link_kind, self.link_at, number)
                elif moves == 0:
                    self.choose_largest(0, self.busiest, number)
                for i in range(self.num_chosen):
                    expert = self.chosen_E[i]
                    if moves == 0 and self.listed_E[expert] == 0:
                        moves = self.improve_smoothly(expert) if is_smooth else self.improve(expert)
                        self.listed_E[expert] = 1 - moves
