# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
# cython: infer_types=True, annotation_typing=False
"""The search for replicas: seeds, descents from the best of them, and kicks."""

import cython
import numpy as np

from megatron_fssdp.planning.arrays import zero_ints, zero_reals
from megatron_fssdp.planning.cost.layer_costs import CostedLayer

if not cython.compiled:  # the .pxd file imports them for C
    from megatron_fssdp.planning.kernels.constants import (
        HIGHEST_LEVEL,
        KICK_PRICES,
        LEVEL_STEP,
        MOST_FREE,
        NUM_LEVELS,
    )
    from megatron_fssdp.planning.kernels.placement_descent import PlacementDescent


class PlacementSearch(PlacementDescent):
    """The search for the placement with the fewest seconds; ``search.py`` says what it tries and why.

    Attributes:
        hottest_E: The experts by load, descending.
        want_E: Holders that water filling wants for each expert, and ``plan_D`` the loads of devices then.
            ``order_D`` has the devices in the order of these, and ``taken_D`` those that get an expert.
        by_owner_E: The experts by owner; those of a device begin at ``first_D``.
        load_DE, load_NE: The loads by source, of which a device reads one row.
    """

    def __init__(
        self, layer: CostedLayer, start_ED: np.ndarray, slots: int, most_replicated: int, most_prices: int
    ) -> None:
        PlacementDescent.__init__(self, layer, start_ED, slots, most_replicated, most_prices)
        devices = self.num_devices
        self.hottest_E = memoryview(np.argsort(-np.asarray(self.total_E), kind="stable"))
        self.want_E, self.plan_D, self.taken_D = (
            zero_ints(self.num_experts),
            zero_reals(devices),
            zero_ints(devices),
        )
        self.order_D = memoryview(np.arange(devices))
        self.load_DE = memoryview(np.ascontiguousarray(layer.load_DE))
        self.load_NE = memoryview(np.array(np.asarray(self.load_EN).T, order="C"))
        self.by_owner_E = memoryview(np.argsort(layer.owner_E, kind="stable"))
        owned_D = np.bincount(layer.owner_E, minlength=devices)
        self.first_D = memoryview(np.concatenate([[0], np.cumsum(owned_D)]))

    def climb(self) -> None:
        """Descend by the smooth price while more and more transfers cost nothing.

        One replica that crosses a link makes a whole transfer longer, and the next ones over other links are
        then free. So a single replica rarely pays, although several together do.
        """
        self.drop_all()
        self.descend(True, 0)
        num_free = 1
        gained = True
        while num_free <= MOST_FREE and gained:
            before = self.kept_s
            self.descend(True, num_free)
            gained = num_free == 1 or self.kept_s < before
            num_free *= 2

    def give_away(self, in_all_nodes: bool, level: float, room: int) -> int:
        """Water filling: raise ``want_E`` until no owner keeps more than ``level`` times the mean load.

        The owner with the highest load goes first, and of its experts the one whose next replica takes most
        from it; ``in_all_nodes``, it gets as many at once as there are nodes. The result is the number of
        replicas for which there is still room; 0 if nothing more can be done.
        """
        while room > 0:
            owner = 0
            for device in range(self.num_devices):
                if self.plan_D[device] > self.plan_D[owner]:
                    owner = device
            if self.plan_D[owner] <= level * self.all_pairs / self.num_devices:
                return room
            picked = -1
            wanted = 0
            most = 0.0
            for i in range(self.first_D[owner], self.first_D[owner + 1]):
                expert = self.by_owner_E[i]
                have = self.want_E[expert]
                more = have + 1
                if in_all_nodes:
                    more = self.num_nodes if have == 1 else have + self.num_nodes
                more = min(more, self.num_devices)
                if more <= have:
                    continue
                gain = self.total_E[expert] * (1.0 / have - 1.0 / more) / (more - have)
                if gain > most:
                    picked, wanted, most = expert, more, gain
            if picked < 0:
                return 0
            self.plan_D[owner] -= most * (wanted - self.want_E[picked])
            room -= wanted - self.want_E[picked]
            self.want_E[picked] = wanted
        return 0

    def place_wanted(self) -> None:
        """Put the replicas of ``want_E`` on the devices that then have least, spread over the nodes."""
        num_placed = 0
        self.sort()
        for expert in range(self.num_experts):
            self.part_E[expert] = (
                self.total_E[expert] / self.want_E[expert] if self.want_E[expert] > 1 else 0.0
            )
        while num_placed < self.most_replicated:
            picked = self.largest_part()
            part = self.part_E[picked]
            if part <= 0.0:
                return
            self.part_E[picked] = 0.0
            num_placed += 1
            most = (self.want_E[picked] + self.num_nodes - 1) // self.num_nodes
            self.count_held(picked, -1)
            self.place(picked, part, most)
            self.count_held(picked, 1)

    def place(self, expert: int, part: float, most: int) -> None:
        """Put the replicas of ``want_E`` of an expert that is out, at most so many holders in a node.

        ``order_D`` stays in order, although devices with a new replica move back in it.
        """
        num_taken = 0
        for i in range(self.num_devices):
            if num_taken == self.want_E[expert] - 1:
                break
            device = self.order_D[i]
            is_free = not self.has_ED[expert, device] and self.used_D[device] < self.slots
            if is_free and self.holders_EN[expert, self.node_D[device]] < most:
                self.put(expert, device, 1)
                self.plan_D[device] += part
                self.taken_D[num_taken] = device
                self.order_D[i] = -1
                num_taken += 1
        taken = 0
        next_at = 0
        at = 0
        while taken < num_taken:
            while next_at < self.num_devices and self.order_D[next_at] < 0:
                next_at += 1
            if (
                next_at == self.num_devices
                or self.plan_D[self.taken_D[taken]] < self.plan_D[self.order_D[next_at]]
            ):
                self.order_D[at] = self.taken_D[taken]
                taken += 1
            else:
                self.order_D[at] = self.order_D[next_at]
                next_at += 1
            at += 1

    def sort(self) -> None:
        """Sort ``order_D`` by ``plan_D``, equal ones by number; most are in order."""
        for i in range(1, self.num_devices):
            device = self.order_D[i]
            plan = self.plan_D[device]
            at = i
            while at > 0:
                previous = self.order_D[at - 1]
                if self.plan_D[previous] < plan or (self.plan_D[previous] == plan and previous < device):
                    break
                self.order_D[at] = previous
                at -= 1
            self.order_D[at] = device

    def seed_by_levels(self) -> None:
        """Keep the best placement in which owners give load away until they keep a part of the mean."""
        for kind in range(2 if self.num_nodes > 1 else 1):
            room = self.slots * self.num_devices
            for i in range(self.num_experts):
                self.want_E[i] = 1
            for level in range(NUM_LEVELS):
                # Replicas change plan_D while they are placed, so it is computed anew at each level.
                for i in range(self.num_devices):
                    self.plan_D[i] = 0.0
                for i in range(self.num_experts):
                    self.plan_D[self.owner_E[i]] += self.total_E[i] / self.want_E[i]
                before = room
                room = self.give_away(kind == 1, HIGHEST_LEVEL - level * LEVEL_STEP, room)
                if room == before:
                    continue
                self.drop_all()
                self.place_wanted()
                # All slots are used, or more replicas cost more than they save.
                if self.keep() > self.start_s or room == 0:
                    break

    def seed_by_sources(self) -> None:
        """Keep the best placement in which devices, or nodes, have the one or two experts they use most."""
        for kind in range(4 if self.num_nodes > 1 else 2):
            self.drop_all()
            num_replicated = 0
            for turn in range(min(self.slots, 1 + kind % 2) * self.num_devices):
                num_replicated += self.fetch(turn % self.num_devices, kind > 1, num_replicated)
            for expert in range(self.num_experts):
                if self.holders_E[expert] > 1:
                    self.count_held(expert, 1)
            self.keep()

    def fetch(self, device: int, for_node: bool, num: int) -> int:
        """Give a device the missing expert to which it, or its node, sends most; 1 if it was counted."""
        node = self.node_D[device]
        chosen = -1
        most = 0.0
        for expert in range(self.num_experts):
            load = self.load_NE[node, expert] if for_node else self.load_DE[device, expert]
            if load > most and (num < self.most_replicated or self.holders_E[expert] > 1):
                has = self.holders_EN[expert, node] > 0 if for_node else self.has_ED[expert, device]
                if not has:
                    chosen, most = expert, load
        is_first = chosen >= 0 and self.holders_E[chosen] == 1
        if is_first:
            self.count_held(chosen, -1)  # out until all replicas are placed
        if chosen >= 0:
            self.put(chosen, device, 1)
        return 1 if is_first else 0

    def seed_by_shadows(self) -> None:
        """Keep the best placement in which the experts with the highest loads are everywhere (FasterMoE)."""
        self.drop_all()
        for i in range(min(self.slots, self.most_replicated, self.num_experts)):
            expert = self.hottest_E[i]
            self.count_held(expert, -1)
            self.spread(expert, 3)
            self.count_held(expert, 1)
            self.keep()

    def prune(self) -> None:
        """Drop the replicas without which the kept placement costs no more."""
        self.go_back()
        for expert in range(self.num_experts):
            if self.holders_E[expert] == 1:
                continue
            self.count(expert, -1)
            self.price()
            self.aim_below(self.kept_s)
            for device in range(self.num_devices):
                if self.has_ED[expert, device] and device != self.owner_E[expert]:
                    self.put(expert, device, -1)
                    seconds = self.price_with(expert, -1)
                    if seconds <= self.kept_s:
                        self.kept_s = seconds
                        self.aim_below(seconds)
                    else:
                        self.put(expert, device, 1)
            self.count(expert, 1)
        self.keep_this()

    def kick(self) -> None:
        """Change all replicas of one expert at once and descend; keep what gains, otherwise go back."""
        self.most_prices = KICK_PRICES // self.num_experts
        last = self.num_prices + self.most_prices
        turn = 0
        missed = 0
        while missed < 4 * self.num_experts and self.num_prices < last:
            expert = self.hottest_E[turn // 4 % self.num_experts]
            before = self.kept_s
            self.go_back()
            if turn % 4 == 0 or self.may_grow(expert):
                self.count_held(expert, -1)
                self.spread(expert, turn % 4)
                self.count_held(expert, 1)
                self.descend(False, 0)
            turn += 1
            missed = 0 if self.kept_s < before else missed + 1

    def run(self) -> None:
        """Search; the result is ``kept_ED`` and ``kept_s``."""
        self.go_back()
        self.kept_s = self.price()
        self.drop_all()
        self.keep()
        self.seed_by_sources()
        self.seed_by_levels()
        self.seed_by_shadows()
        if not self.is_quick:
            self.climb()
            self.go_back()
            self.descend(False, 0)
        self.go_back()
        # Several devices or links are equally busy now, so no single change lowers the exact price.
        self.descend(True, 0)
        self.descend(False, 0)
        if not self.is_quick:
            self.kick()
        self.prune()


def search_replicas(
    layer: CostedLayer,
    start_ED: np.ndarray,
    slots: int,
    most_replicated: int,
    most_prices: int,
    is_quick: bool,
) -> tuple[float, float, np.ndarray]:
    """Seconds of a layer without replicas and with those that are found; the placement, bytes ``[E, D]``.

    Devices hold at most ``slots`` replicas, at most ``most_replicated`` experts have some, and a descent
    looks at ``most_prices`` placements. ``start_ED`` is one more seed. If ``is_quick``, there are neither
    a climb nor kicks.
    """
    search = PlacementSearch(layer, start_ED, slots, most_replicated, most_prices)
    search.is_quick = is_quick
    with cython.nogil:
        search.run()
    return search.start_s, search.kept_s, np.asarray(search.kept_ED)
