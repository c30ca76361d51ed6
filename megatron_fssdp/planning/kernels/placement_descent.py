# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
# cython: infer_types=True, annotation_typing=False
"""Descents to placements that cost less."""

import cython
import numpy as np

from megatron_fssdp.planning.cost.layer_costs import CostedLayer
from megatron_fssdp.planning.placement.placement import ExpertPlacement

if not cython.compiled:  # the .pxd file imports them for C
    from megatron_fssdp.planning.kernels.constants import ROUNDING, WIDTH
    from megatron_fssdp.planning.kernels.priced_layer import PricedLayer


class PlacementDescent(PricedLayer):
    """Descents from a placement, one change of one expert at a time; ``search.py`` says what they try.

    Attributes:
        best: Seconds of the present placement during a descent.
        kept_s: Seconds of the best placement so far, ``kept_ED``, which is the caller's at first.
        tried_D: Holders of an expert before :meth:`improve`, and in its best trial of ``trial_s`` seconds.
        plain: ``work``, ``pairs_in`` and ``pairs_out`` of the placement without replicas.
        most_replicated: Most experts that may have replicas.
        most_prices: Most prices of a descent.
    """

    def __init__(
        self, layer: CostedLayer, start_ED: np.ndarray, slots: int, most_replicated: int, most_prices: int
    ) -> None:
        owners = ExpertPlacement.owners_only(layer.owner_E, layer.topology.num_devices)
        PricedLayer.__init__(self, layer, owners, slots)
        self.most_replicated, self.most_prices, self.kept_s = most_replicated, most_prices, self.start_s
        self.kept_ED = memoryview(np.array(start_ED, np.uint8))
        self.plain = memoryview(np.stack((self.work, self.pairs_in, self.pairs_out)))
        self.tried_D = memoryview(np.zeros((2, self.num_devices), np.uint8))

    def keep(self) -> float:
        """Keep the present placement if it is the best so far; its seconds."""
        seconds = self.price()
        if seconds < self.kept_s * (1.0 - ROUNDING):
            self.kept_s = seconds
            self.keep_this()
        return seconds

    def keep_this(self) -> None:
        """Keep the present placement."""
        for expert in range(self.num_experts):
            if self.is_changed_E[expert]:
                for device in range(self.num_devices):
                    self.kept_ED[expert, device] = self.has_ED[expert, device]
                self.is_changed_E[expert] = 0

    def go_back(self) -> None:
        """Go to the best placement so far."""
        for expert in range(self.num_experts):
            for device in range(self.num_devices if self.is_changed_E[expert] else 0):
                if self.has_ED[expert, device] != self.kept_ED[expert, device]:
                    self.count_held(expert, -1)
                    self.hold(expert, self.kept_ED, expert)
                    self.count_held(expert, 1)
                    break
            self.is_changed_E[expert] = 0

    def drop_all(self) -> None:
        """Go to the placement without replicas."""
        for expert in range(self.num_experts):
            if self.holders_E[expert] > 1:
                self.spread(expert, 0)
                self.hops_E[expert] = self.fill_E[expert] = 0
        for place in range(self.far_at + self.num_devices):
            self.work[place], self.pairs_in[place] = self.plain[0, place], self.plain[1, place]
            self.pairs_out[place] = self.plain[2, place]
            self.moves_in[place] = self.moves_out[place] = 0.0
        for node in range(self.num_nodes):
            self.is_stale_N[node] = 1
        self.version += 1

    def hold(self, expert: int, table: memoryview, row: int) -> None:
        """Give an expert that is out the holders of a row of a table."""
        for device in range(self.num_devices):
            if self.has_ED[expert, device] != table[row, device]:
                self.put(expert, device, 1 if table[row, device] else -1)

    def spread(self, expert: int, kind: int) -> None:
        """Take all replicas of an expert that is out (kind 0), or give it more.

        That is one in every node without it (1), one more in every node (2), or one on every device with a
        free slot (3).
        """
        for node in range(self.num_nodes):
            if kind == 2 or (kind == 1 and self.holders_EN[expert, node] == 0):
                device = self.least_loaded(expert, node, False)
                if device >= 0:
                    self.put(expert, device, 1)
        for device in range(self.num_devices):
            if kind == 0 and self.has_ED[expert, device] and device != self.owner_E[expert]:
                self.put(expert, device, -1)
            elif kind == 3 and not self.has_ED[expert, device] and self.used_D[device] < self.slots:
                self.put(expert, device, 1)

    def may_grow(self, expert: int) -> bool:
        """Whether an expert may get replicas."""
        if self.most_replicated >= self.num_experts:
            return True
        num = 0
        for i in range(self.num_experts):
            num += self.holders_E[i] > 1
        return self.holders_E[expert] > 1 or num < self.most_replicated

    def least_loaded(self, expert: int, node: int, is_full: bool) -> int:
        """The least loaded device of a node without the expert and with a free slot, or full; -1 if none."""
        chosen = -1
        for i in range(self.first_N[node], self.first_N[node + 1]):
            device = self.member_D[i]
            if self.has_ED[expert, device] or (self.used_D[device] >= self.slots) != is_full:
                continue
            if chosen < 0 or self.work[device] < self.work[chosen]:
                chosen = device
        return chosen

    def note(self, expert: int) -> None:
        """Price the present holders of an expert that is out; remember them if they are the best trial."""
        seconds = self.price_with(expert, -1)
        if seconds < self.trial_s * (1.0 - ROUNDING):
            self.trial_s = seconds
            self.aim_below(seconds)
            for device in range(self.num_devices):
                self.tried_D[1, device] = self.has_ED[expert, device]

    def try_put(self, expert: int, device: int, sign: int) -> None:
        """Note one more replica (sign 1), or one less, of an expert that is out; nothing is changed."""
        self.put(expert, device, sign)
        self.note(expert)
        self.put(expert, device, -sign)

    def improve(self, expert: int) -> bool:
        """Make the best change of one expert's holders; say whether there was one."""
        self.count(expert, -1)
        if self.price() >= self.best * (1.0 - ROUNDING):  # other experts decide the price
            self.count(expert, 1)
            return False
        may_grow = self.may_grow(expert)
        for device in range(self.num_devices):
            self.tried_D[0, device] = self.has_ED[expert, device]
        self.trial_s = self.best
        self.aim_below(self.best)
        for node in range(self.num_nodes):
            free = self.least_loaded(expert, node, False) if may_grow else -1
            if free >= 0:
                self.try_put(expert, free, 1)
        # One in every node rarely gains more than a single one, and costs a price of all nodes.
        is_alone = self.is_smooth and self.holders_E[expert] == 1
        if may_grow and (is_alone or self.trial_s == self.best):
            self.spread(expert, 1)
            self.note(expert)
            self.hold(expert, self.tried_D, 0)
        if self.trial_s == self.best:
            for device in range(self.num_devices):
                if self.tried_D[0, device] and device != self.owner_E[expert]:
                    self.try_put(expert, device, -1)
            if may_grow:
                self.spread(expert, 3)
                self.note(expert)
            self.spread(expert, 0)
            self.note(expert)
        gained = self.trial_s < self.best
        self.hold(expert, self.tried_D, 1 if gained else 0)
        self.count(expert, 1)
        self.best = self.trial_s
        return gained

    def swap(self, expert: int) -> bool:
        """Let an expert take the place of the least useful replica of a full device, if this gains; say so.

        The other expert loses the replica, or gets one where this expert gives one up.
        """
        to = -1
        instead = -1
        given = -1
        least = self.best
        if not self.may_grow(expert):
            return False
        self.count(expert, -1)
        for node in range(self.num_nodes):
            device = self.least_loaded(expert, node, True)
            goes = -1 if device < 0 else self.least_useful(device)
            if goes < 0:
                continue
            self.count(goes, -1)
            if self.price() < least * (1.0 - ROUNDING):
                # The other expert loses the replica, or gets the one of this expert on a device `back`.
                for back in range(-1, self.num_devices):
                    if back == 0 and to >= 0:
                        break
                    if back >= 0 and (
                        not self.has_ED[expert, back]
                        or back == self.owner_E[expert]
                        or self.has_ED[goes, back]
                    ):
                        continue
                    seconds = self.price_exchange(expert, goes, device, back)
                    if seconds < least * (1.0 - ROUNDING):
                        least, to, instead, given = seconds, device, goes, back
            self.count(goes, 1)
        if to >= 0:
            self.count(instead, -1)
            self.exchange(expert, instead, to, given)
            self.count(instead, 1)
            self.best = least
        self.count(expert, 1)
        return to >= 0

    def price_exchange(self, comes: int, goes: int, device: int, back: int) -> float:
        """Seconds after an :meth:`exchange` of two experts that are out; nothing is changed."""
        self.exchange(comes, goes, device, back)
        self.count(goes, 1)
        seconds = self.price_with(comes, goes)
        self.count(goes, -1)
        self.exchange(goes, comes, device, back)
        return seconds

    def exchange(self, comes: int, goes: int, device: int, back: int) -> None:
        """Let one expert take another's place on a device, and the other way round on ``back``, unless -1."""
        self.put(goes, device, -1)
        self.put(comes, device, 1)
        if back >= 0:
            moves = -1 if self.has_ED[comes, back] else 1
            self.put(comes, back, moves)
            self.put(goes, back, -moves)

    def least_useful(self, device: int) -> int:
        """The expert whose replica on a device has the smallest part of its tokens; -1 if there is none."""
        chosen = -1
        least = 0.0
        for expert in range(self.num_experts):
            if self.has_ED[expert, device] and self.owner_E[expert] != device:
                part = self.total_E[expert] / self.holders_E[expert]
                if chosen < 0 or part < least:
                    chosen, least = expert, part
        return chosen

    def descend(self, is_smooth: bool, num_free: int) -> None:
        """Change experts of the busiest device and of the busiest link while this saves seconds.

        The result is kept by the exact price. Meanwhile, ``num_free`` more experts on each link cost nothing.
        """
        hidden, hidden_back = self.costs.hidden, self.costs.hidden_back
        if num_free > 0:
            start = self.costs.moves[1, 0]
            expert_s = max(self.costs.moves[0, 1], self.costs.moves[1, 1], self.costs.moves[2, 1])
            self.costs.hidden += start + num_free * expert_s
            expert_s = max(self.costs.moves[0, 2], self.costs.moves[1, 2], self.costs.moves[2, 2])
            self.costs.hidden_back += start + num_free * expert_s
        for expert in range(self.num_experts):
            self.is_tired_E[expert] = 0
        last = self.num_prices + self.most_prices
        self.is_smooth = is_smooth
        self.best = self.price()
        while self.step() and self.num_prices < last:
            pass
        self.is_smooth = False
        self.costs.hidden, self.costs.hidden_back = hidden, hidden_back
        self.keep()

    def step(self) -> bool:
        """Change one expert of the busiest device or link; False if nothing saves seconds."""
        for of_links in range(2):
            self.rank(of_links == 1)
            for _ in range(WIDTH):
                expert = self.largest_part()
                if self.part_E[expert] <= 0.0:
                    break
                self.part_E[expert] = 0.0
                # Swaps take most of the time and gain only where the exact price counts.
                if self.improve(expert) or (not self.is_smooth and self.swap(expert)):
                    return True
                self.is_tired_E[expert] = 1
        return False
