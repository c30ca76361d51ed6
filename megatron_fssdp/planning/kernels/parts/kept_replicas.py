"""Goes from one placement to another and keeps the best one. Part of the kernel of the replica search.

Shape letters: D devices, E experts, N nodes, P pairs of expert and device.
"""

from megatron_fssdp.planning.kernels.parts.smooth_price import SmoothLayer
from megatron_fssdp.planning.native import compiler_marks as cython
from megatron_fssdp.planning.native.kernel_types import Index, Int, Ints, Real

_GAIN = 1e-9  # smallest relative gain; smaller ones are rounding errors


@cython.cclass
class KeptLayer(SmoothLayer):
    """A layer that goes from one placement to another and keeps the best one.

    Attributes:
        kept_P: Replicas of the best placement so far as positions in ``present_ED``, by expert; the first
            ``num_kept``.
        kept_price: Price of that placement.
        start_P: Replicas of the placement from which the search starts, the first ``num_start``.
        wanted_ED: 1 for the replicas of the placement to which :meth:`go_to` goes, otherwise 0.
        owned_E: The experts by owner; those of a device begin at ``first_owned_D``.
    """

    kept_P: Ints
    num_kept: Index
    kept_price: Real
    start_P: Ints
    num_start: Index
    wanted_ED: Ints
    owned_E: Ints
    first_owned_D: Ints

    def __init__(self, num_experts: Index, num_devices: Index, num_nodes: Index, slots: Int) -> None:
        SmoothLayer.__init__(self, num_experts, num_devices, num_nodes, slots)
        self.kept_P, self.start_P = self.new_ints(slots * num_devices), self.new_ints(slots * num_devices)
        self.wanted_ED = self.new_ints(num_experts * num_devices)
        self.owned_E, self.first_owned_D = self.new_ints(num_experts), self.new_ints(num_devices + 1)
        self.num_kept = self.num_start = 0
        self.kept_price = 0.0

    @cython.inner
    def line_up_owned(self) -> cython.void:
        """Write the experts by owner to ``owned_E``."""
        for expert in range(self.num_experts):
            self.first_owned_D[self.owner_E[expert]] += 1
        end: Int = 0
        for device in range(self.num_devices):
            end += self.first_owned_D[device]
            self.first_owned_D[device] = end
        self.first_owned_D[self.num_devices] = end
        for turn in range(self.num_experts):
            expert = self.num_experts - 1 - turn
            owner: Index = self.owner_E[expert]
            self.first_owned_D[owner] -= 1
            self.owned_E[self.first_owned_D[owner]] = expert

    @cython.inner
    def may_replicate(self, expert: Index) -> Index:
        """Whether an expert may get one more replica."""
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
    def move(self, expert: Index, add: Int, drop: Int) -> cython.void:
        """Put an expert on a device and drop it from another; -1 for none of them."""
        self.count(expert, -1)
        if drop >= 0:
            self.drop(expert, drop)
        if add >= 0:
            self.put(expert, add)
        self.count(expert, 1)

    @cython.inner
    def keep_if_better(self) -> Index:
        """Keep the present placement if its price is lower than that of the kept one; 1 if so."""
        price = self.price()
        if price >= self.kept_price * (1 - _GAIN):
            return 0
        self.kept_price = price
        self.num_kept = 0
        for i in range(self.num_replicated):
            row = self.replicated_E[i] * self.num_devices
            for holder in range(1, self.holders_E[self.replicated_E[i]]):
                self.kept_P[self.num_kept] = row + self.holder_ED[row + holder]
                self.num_kept += 1
        return 1

    @cython.inner
    def go_to(self, wanted_P: Ints, number: Index) -> cython.void:
        """Replace the replicas by the first ``number`` of ``wanted_P``, which stand together by expert."""
        for i in range(number):
            self.wanted_ED[wanted_P[i]] = 1
        at: Index = self.num_replicated
        while at > 0:  # from the end, because an expert that loses all replicas leaves its place to the last
            at -= 1
            self.drop_unwanted(self.replicated_E[at])
        at = 0
        while at < number:
            expert: Index = wanted_P[at] // self.num_devices
            lacks: Int = 0
            end: Index = at
            while end < number and wanted_P[end] // self.num_devices == expert:
                self.wanted_ED[wanted_P[end]] = 0
                lacks += 1 - self.present_ED[wanted_P[end]]
                end += 1
            if lacks:
                self.count(expert, -1)
                for i in range(at, end):
                    if self.present_ED[wanted_P[i]] == 0:
                        self.put(expert, wanted_P[i] - expert * self.num_devices)
                self.count(expert, 1)
            at = end

    @cython.inner
    def drop_unwanted(self, expert: Index) -> cython.void:
        """Drop the replicas of an expert that are not in ``wanted_ED``."""
        row = expert * self.num_devices
        is_out: Int = 0
        holder = self.holders_E[expert] - 1
        while holder > 0:
            device: Index = self.holder_ED[row + holder]
            if self.wanted_ED[row + device] == 0:
                if is_out == 0:
                    self.count(expert, -1)
                is_out = 1
                self.drop(expert, device)
            holder -= 1
        if is_out:
            self.count(expert, 1)
