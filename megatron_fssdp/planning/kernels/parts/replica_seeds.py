"""Where the replica search starts, and the best placement that it found so far: part of its kernel.

Shape letters: D devices, E experts.
"""

from megatron_fssdp.planning.kernels.parts.layer_price import PricedLayer
from megatron_fssdp.planning.native import compiler_marks as cython
from megatron_fssdp.planning.native.kernel_types import Index, Int, Ints, Real, Reals
from megatron_fssdp.planning.native.work_arrays import zero_ints, zero_reals

_GAIN = 1e-9  # smallest relative gain; smaller ones are rounding errors


@cython.cclass
class SeededLayer(PricedLayer):
    """A layer that can be filled with replicas at once.

    Attributes:
        listed_E: 1 for the experts that are listed.
        planned_D: Load of each device after owners have given away what they plan to.
        wanted_E: Number of holders that each expert is to have.
        relief_E: Load that its next larger number of holders takes from each expert's owner, see
            :meth:`relief`.
        kept_ED: The best placement so far, like ``present_ED``.
        kept_price: Price of that placement.
    """

    listed_E: Ints
    planned_D: Reals
    wanted_E: Ints
    relief_E: Reals
    kept_ED: Ints
    kept_price: Real

    def __init__(self, num_experts: Index, num_devices: Index, num_nodes: Index) -> None:
        PricedLayer.__init__(self, num_experts, num_devices, num_nodes)
        self.listed_E, self.wanted_E = zero_ints(num_experts), zero_ints(num_experts)
        self.planned_D, self.relief_E = zero_reals(num_devices), zero_reals(num_experts)
        self.kept_ED = zero_ints(num_experts * num_devices)
        self.kept_price = 0.0

    @cython.inner
    def keep_if_better(self) -> Index:
        """Keep the present placement if its price is lower than that of the kept one; 1 if so."""
        price = self.price_now()
        if price >= self.kept_price * (1 - _GAIN):
            return 0
        self.kept_price = price
        for i in range(self.num_experts * self.num_devices):
            self.kept_ED[i] = self.present_ED[i]
        return 1

    @cython.inner
    def go_back(self) -> cython.void:
        """Return to the kept placement."""
        for expert in range(self.num_experts):
            row = expert * self.num_devices
            differs = False
            for device in range(self.num_devices):
                if self.present_ED[row + device] != self.kept_ED[row + device]:
                    differs = True
            if differs:
                self.take_out(expert)
                for device in range(self.num_devices):
                    if self.present_ED[row + device] > self.kept_ED[row + device]:
                        self.drop(expert, device)
                for device in range(self.num_devices):
                    if self.present_ED[row + device] < self.kept_ED[row + device]:
                        self.put(expert, device)
                self.bring_in(expert)

    @cython.inner
    def clear_all(self) -> cython.void:
        """Take all replicas away."""
        for expert in range(self.num_experts):
            if self.holders_E[expert] > 1:
                self.take_out(expert)
                self.clear(expert)
                self.bring_in(expert)

    @cython.inner
    def hottest(self) -> Int:
        """List the most loaded expert without replicas that is not listed yet; -1 if there is none."""
        found: Int = -1
        most: Real = 0.0
        for expert in range(self.num_experts):
            if self.listed_E[expert] == 0 and self.holders_E[expert] == 1 and self.total_E[expert] > most:
                found, most = expert, self.total_E[expert]
        if found >= 0:
            self.listed_E[found] = 1
        return found

    @cython.inner
    def may_replicate(self, expert: Index) -> Index:
        """Whether an expert that is out may get one more replica."""
        return 1 if self.holders_E[expert] > 1 or self.num_replicated < self.max_replicated else 0

    @cython.inner
    def least_loaded(self, expert: Index, node: Index) -> Int:
        """The least loaded device of a node that has a free slot and not the expert; -1 if there is none."""
        found: Int = -1
        for i in range(self.first_N[node], self.first_N[node + 1]):
            device: Index = self.member_D[i]
            if self.present_ED[expert * self.num_devices + device] or self.used_D[device] >= self.slots:
                continue
            if found < 0 or self.load_D[device] < self.load_D[found]:
                found = device
        return found

    @cython.inner
    def widen(self, expert: Index, everywhere: Index) -> Int:
        """Put an expert that is out on a device of every node that lacks it, or on all devices.

        Returns:
            Number of new replicas.
        """
        before = self.holders_E[expert]
        if self.may_replicate(expert):
            for node in range(self.num_nodes):
                device = self.least_loaded(expert, node)
                while device >= 0 and (everywhere or self.holders_EN[expert * self.num_nodes + node] == 0):
                    self.put(expert, device)
                    device = self.least_loaded(expert, node)
        return self.holders_E[expert] - before

    @cython.inner
    def seed_widely(self, everywhere: Index) -> cython.void:
        """Seeds: the hottest 1, 2, … experts are in every node, or on all devices. Keep the best one."""
        self.clear_all()
        free = self.num_devices * self.slots
        while free > 0:
            expert = self.hottest()
            if expert < 0:
                break
            self.take_out(expert)
            free -= self.widen(expert, everywhere)
            self.bring_in(expert)
            if self.holders_E[expert] == 1:
                break
            self.keep_if_better()
        self.unlist()

    @cython.inner
    def seed_evenly(self, ratio: Real, in_all_nodes: Index) -> cython.void:
        """Seed: owners give load away until they keep ``ratio`` times the mean. Keep it if it is the best.

        An owner counts on what it will give away, so its room serves other owners' experts. That exchanges
        experts between devices which are all as loaded as the mean, which no single move can do.

        Args:
            ratio: Part of the mean load that an owner keeps.
            in_all_nodes: Whether the holders of an expert are a multiple of the number of nodes.
        """
        self.clear_all()
        self.plan_holders(ratio, in_all_nodes)
        expert = self.next_planned()
        while expert >= 0:
            count = self.wanted_E[expert]
            in_node = (count + self.num_nodes - 1) // self.num_nodes
            self.take_out(expert)
            while self.holders_E[expert] < count:
                device = self.least_planned(expert, in_node)
                if device < 0:
                    break
                self.put(expert, device)
                self.planned_D[device] += self.total_E[expert] / count
            self.bring_in(expert)
            expert = self.next_planned()
        self.unlist()
        self.keep_if_better()

    @cython.inner
    def plan_holders(self, ratio: Real, in_all_nodes: Index) -> cython.void:
        """Give each expert a number of holders, where one more takes most load from an overloaded owner."""
        limit = ratio * self.all_pairs / self.num_devices
        for device in range(self.num_devices):
            self.planned_D[device] = 0.0
        for expert in range(self.num_experts):
            self.wanted_E[expert] = 1
            self.relief_E[expert] = self.relief(expert, in_all_nodes)
            self.planned_D[self.owner_E[expert]] += self.total_E[expert]
        free = self.num_devices * self.slots
        num_wanted: Int = 0
        while free > 0:
            best: Real = 0.0
            chosen: Int = -1
            for expert in range(self.num_experts):
                if self.relief_E[expert] <= best or self.planned_D[self.owner_E[expert]] <= limit:
                    continue
                if self.wanted_E[expert] > 1 or num_wanted < self.max_replicated:
                    chosen, best = expert, self.relief_E[expert]
            if chosen < 0:
                return
            count = self.wanted_E[chosen]
            if count == 1:
                num_wanted += 1
            more = self.more_holders(count, in_all_nodes)
            free -= more - count
            self.planned_D[self.owner_E[chosen]] -= self.total_E[chosen] / count - self.total_E[chosen] / more
            self.wanted_E[chosen] = more
            self.relief_E[chosen] = self.relief(chosen, in_all_nodes)

    @cython.inner
    def more_holders(self, count: Int, in_all_nodes: Index) -> Int:
        """The next larger number of holders."""
        if not in_all_nodes:
            return count + 1
        more = self.num_nodes if count == 1 and self.num_nodes > 1 else count + self.num_nodes
        return min(more, self.num_devices)

    @cython.inner
    def relief(self, expert: Index, in_all_nodes: Index) -> Real:
        """Load that the next larger number of holders takes from the owner, for each new replica.

        Returns:
            0 if all devices are to have the expert.
        """
        count = self.wanted_E[expert]
        more = self.more_holders(count, in_all_nodes)
        if more > self.num_devices or more <= count:
            return 0.0
        return (self.total_E[expert] / count - self.total_E[expert] / more) / (more - count)

    @cython.inner
    def next_planned(self) -> Int:
        """List the expert with the largest planned share that wants replicas; -1 if there is none."""
        found: Int = -1
        most: Real = 0.0
        for expert in range(self.num_experts):
            share = self.total_E[expert] / self.wanted_E[expert]
            if self.wanted_E[expert] > 1 and self.listed_E[expert] == 0 and share > most:
                found, most = expert, share
        if found >= 0:
            self.listed_E[found] = 1
        return found

    @cython.inner
    def least_planned(self, expert: Index, in_node: Int) -> Int:
        """The device with the lowest planned load that may get an expert; -1 if there is none.

        Args:
            expert: The expert.
            in_node: Most holders of the expert in one node.
        """
        found: Int = -1
        for device in range(self.num_devices):
            if self.present_ED[expert * self.num_devices + device] or self.used_D[device] >= self.slots:
                continue
            if self.holders_EN[expert * self.num_nodes + self.node_D[device]] >= in_node:
                continue
            if found < 0 or self.planned_D[device] < self.planned_D[found]:
                found = device
        return found

    @cython.inner
    def unlist(self) -> cython.void:
        """Forget the listed experts."""
        for expert in range(self.num_experts):
            self.listed_E[expert] = 0
