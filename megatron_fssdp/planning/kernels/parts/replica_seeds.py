"""Where the replica search starts: many replicas at once. Part of its kernel.

Shape letters: D devices, E experts, N nodes.
"""

from megatron_fssdp.planning.kernels.parts.replica_moves import MovingLayer
from megatron_fssdp.planning.native import compiler_marks as cython
from megatron_fssdp.planning.native.kernel_types import Index, Int, Ints, Real, Reals


@cython.cclass
class SeededLayer(MovingLayer):
    """A layer that can be filled with replicas at once.

    Attributes:
        ranked_E: The experts in descending load.
        wanted_E: Number of holders that each expert is to have.
        planned_D: Load of each device after owners have given away what they plan to.
        relief_D: Load that the next holders of the device's most relieving expert take from it.
        relieving_D: That expert.
        left_out_D: 1 for the devices that a seed leaves out.
    """

    ranked_E: Ints
    wanted_E: Ints
    planned_D: Reals
    relief_D: Reals
    relieving_D: Ints
    left_out_D: Ints

    def __init__(self, num_experts: Index, num_devices: Index, num_nodes: Index, slots: Int) -> None:
        MovingLayer.__init__(self, num_experts, num_devices, num_nodes, slots)
        self.ranked_E, self.wanted_E = self.new_ints(num_experts), self.new_ints(num_experts)
        self.planned_D, self.relief_D = self.new_reals(num_devices), self.new_reals(num_devices)
        self.left_out_D, self.relieving_D = self.new_ints(num_devices), self.new_ints(num_devices)

    @cython.inner
    def rank(self) -> cython.void:
        """Write the experts to ``ranked_E`` in descending load."""
        for expert in range(self.num_experts):
            load = self.total_E[expert]
            at: Index = expert
            while at > 0 and self.part_E[at - 1] < load:
                self.part_E[at] = self.part_E[at - 1]
                self.ranked_E[at] = self.ranked_E[at - 1]
                at -= 1
            self.part_E[at] = load
            self.ranked_E[at] = expert

    @cython.inner
    def clear(self, expert: Index) -> Int:
        """Take all replicas from an expert that is out; their number."""
        before = self.holders_E[expert]
        while self.holders_E[expert] > 1:
            self.drop(expert, self.holder_ED[expert * self.num_devices + self.holders_E[expert] - 1])
        return before - self.holders_E[expert]

    @cython.inner
    def widen(self, expert: Index, everywhere: Index, pushes: Index) -> Int:
        """Put an expert that is out on a device of every node that lacks it, or on all devices.

        Args:
            expert: The expert.
            everywhere: Whether all devices get it.
            pushes: Whether it takes the place of other replicas where slots are full.

        Returns:
            Number of new replicas.
        """
        before = self.holders_E[expert]
        if self.may_replicate(expert):
            for node in range(self.num_nodes):
                while everywhere or self.holders_EN[expert * self.num_nodes + node] == 0:
                    device = self.least_loaded(expert, node, 0)
                    if device < 0 and pushes:
                        device = self.least_loaded(expert, node, 1)
                        if device >= 0:
                            self.push_out(device)
                    if device < 0:
                        break
                    self.put(expert, device)
        return self.holders_E[expert] - before

    @cython.inner
    def push_out(self, device: Index) -> cython.void:
        """Drop the replica on a device whose expert has the least load for each holder."""
        found: Int = -1
        least: Real = 0.0
        for i in range(self.used_D[device]):
            expert: Index = self.held_D[device * self.slots + i]
            share = self.total_E[expert] / self.holders_E[expert]
            if found < 0 or share < least:
                found, least = expert, share
        self.move(found, -1, device)

    @cython.inner
    def seed_widely(self) -> cython.void:
        """Seeds: the hottest 1, 2, … experts are on all devices. Keep the best one."""
        for i in range(self.num_experts):
            expert: Index = self.ranked_E[i]
            self.count(expert, -1)
            added = self.widen(expert, 1, 0)
            self.count(expert, 1)
            if added == 0:
                break
            self.keep_if_better()
        self.clear_all()

    @cython.inner
    def seed_as_prophet(self, num_left_out: Int) -> cython.void:
        """Seeds: the steps of Pro-Prophet's greedy search (``prophet_search.py``). Keep the best one.

        Each step sends the hottest expert of the busiest owner to all devices except those with the fewest
        pairs for it. Devices that got it compute their own pairs, as Pro-Prophet's model has it.

        Args:
            num_left_out: Number of devices that are left out.
        """
        for device in range(self.num_devices):
            self.planned_D[device] = 0.0
        for expert in range(self.num_experts):
            self.planned_D[self.owner_E[expert]] += self.total_E[expert]
            self.listed_E[expert] = 0
        added: Int = 1
        while added:
            added = 0
            busiest: Index = 0
            for device in range(self.num_devices):
                if self.planned_D[device] > self.planned_D[busiest]:
                    busiest = device
            expert = self.hottest_of(busiest)
            if expert >= 0:
                self.listed_E[expert] = 1
                self.count(expert, -1)
                if self.may_replicate(expert):
                    self.leave_out(expert, num_left_out)
                    for device in range(self.num_devices):
                        if self.left_out_D[device] == 0 and self.used_D[device] < self.slots:
                            own = self.load_ED[expert * self.num_devices + device]
                            self.put(expert, device)
                            self.planned_D[device] += own
                            self.planned_D[busiest] -= own
                            added += 1
                self.count(expert, 1)
                self.keep_if_better()
        self.clear_all()

    @cython.inner
    def hottest_of(self, owner: Index) -> Int:
        """The most loaded unlisted expert of an owner; -1 if there is none."""
        found: Int = -1
        most: Real = 0.0
        for i in range(self.first_owned_D[owner], self.first_owned_D[owner + 1]):
            expert: Index = self.owned_E[i]
            if self.listed_E[expert] == 0 and self.total_E[expert] > most:
                found, most = expert, self.total_E[expert]
        return found

    @cython.inner
    def leave_out(self, expert: Index, number: Int) -> cython.void:
        """Write 1 to ``left_out_D`` for an owner and for the devices with the fewest pairs for its expert."""
        for device in range(self.num_devices):
            self.left_out_D[device] = 1 if self.owner_E[expert] == device else 0
        row = expert * self.num_devices
        for _ in range(number):
            found: Int = -1
            for device in range(self.num_devices):
                if self.left_out_D[device]:
                    continue
                if found < 0 or self.load_ED[row + device] < self.load_ED[row + found]:
                    found = device
            self.left_out_D[found] = 1

    @cython.inner
    def seed_evenly(self, ratio: Real, in_all_nodes: Index) -> Int:
        """Seed: owners give load away until they keep ``ratio`` times the mean. Keep it if it is the best.

        An owner counts on what it will give away, so its room serves other owners' experts. That exchanges
        experts between devices which are all as loaded as the mean, which no single move can do.

        Args:
            ratio: Part of the mean load that an owner keeps.
            in_all_nodes: Whether the holders of an expert are a multiple of the number of nodes. No pair for
                such an expert leaves its node.

        Returns:
            Number of slots that were left.
        """
        self.clear_all()
        num_free = self.plan_holders(ratio * self.all_pairs / self.num_devices, in_all_nodes)
        for i in range(self.num_chosen):
            expert: Index = self.chosen_E[i]
            count = self.wanted_E[expert]
            in_node = (count + self.num_nodes - 1) // self.num_nodes
            self.count(expert, -1)
            device: Int = 0
            while self.holders_E[expert] < count and device >= 0:
                device = self.least_planned(expert, in_node)
                if device >= 0:
                    self.put(expert, device)
                    self.planned_D[device] += self.total_E[expert] / count
            self.count(expert, 1)
        self.keep_if_better()
        return num_free

    @cython.inner
    def plan_holders(self, limit: Real, in_all_nodes: Index) -> Int:
        """Write the number of holders of each expert to ``wanted_E``; the number of slots that are left.

        One by one, an owner with more than ``limit`` gives away from the expert whose next holders take most.
        It is the owner with the most load. If all nodes get an expert, that is to save links between nodes,
        and the owner is the one whose expert's next holders take most. The experts with replicas go to
        ``chosen_E`` in descending load of a holder.
        """
        for device in range(self.num_devices):
            self.planned_D[device] = 0.0
        for expert in range(self.num_experts):
            self.wanted_E[expert] = 1
            self.planned_D[self.owner_E[expert]] += self.total_E[expert]
        for device in range(self.num_devices):
            self.find_relief(device, in_all_nodes)
        free = self.num_devices * self.slots
        self.num_chosen = 0
        while free > 0:
            owner: Int = -1
            most: Real = 0.0
            for device in range(self.num_devices):
                key = self.relief_D[device] if in_all_nodes else self.planned_D[device]
                if key > most and self.planned_D[device] > limit and self.relief_D[device] > 0.0:
                    owner, most = device, key
            if owner < 0:
                break
            expert = self.relieving_D[owner]
            count = self.wanted_E[expert]
            more = self.more_holders(count, in_all_nodes)
            if count > 1 or self.num_chosen < self.max_replicated:
                if count == 1:
                    self.chosen_E[self.num_chosen] = expert
                    self.num_chosen += 1
                free -= more - count
                self.planned_D[owner] -= self.total_E[expert] / count - self.total_E[expert] / more
                self.wanted_E[expert] = more
                self.find_relief(owner, in_all_nodes)
            else:
                self.relief_D[owner] = 0.0
        self.sort_chosen()
        return free

    @cython.inner
    def find_relief(self, owner: Index, in_all_nodes: Index) -> cython.void:
        """Find the expert whose next holders take most load from an owner, for each new replica."""
        self.relief_D[owner] = 0.0
        for i in range(self.first_owned_D[owner], self.first_owned_D[owner + 1]):
            expert: Index = self.owned_E[i]
            relief = self.relief(expert, in_all_nodes)
            if relief > self.relief_D[owner]:
                self.relief_D[owner], self.relieving_D[owner] = relief, expert

    @cython.inner
    def sort_chosen(self) -> cython.void:
        """Sort ``chosen_E`` in descending load of a wanted holder."""
        for i in range(self.num_chosen):
            expert: Index = self.chosen_E[i]
            share = self.total_E[expert] / self.wanted_E[expert]
            at: Index = i
            while at > 0 and self.part_E[at - 1] < share:
                self.part_E[at] = self.part_E[at - 1]
                self.chosen_E[at] = self.chosen_E[at - 1]
                at -= 1
            self.part_E[at] = share
            self.chosen_E[at] = expert

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
