"""Kernel of the quota planner: the lowest ceiling of device loads, and which tokens spill under it.

``planning/balanced/quota_planner.py`` has the rules.

Shape letters: E experts, D devices, N nodes, P pairs of expert and device.
"""

from megatron_fssdp.planning.native import compiler_marks as cython
from megatron_fssdp.planning.native.kernel_types import (
    Flag,
    Index,
    Int,
    Ints,
    Ints2,
    ReadInts,
    ReadInts2,
    Real,
)
from megatron_fssdp.planning.native.work_arrays import zero_ints


@cython.cclass
class _Spilling:
    """Finds which tokens spill to which devices under a ceiling. Arguments are those of :func:`spill`.

    Attributes:
        room_D: Tokens that each device may still take.
        left_D: Experts of other owners that each device may still take.
        expert_P: Experts of which tokens spill; so do the device and the number of tokens.
        num_spilled: Number of such entries.
        order_D: The devices by the present expert's tokens in their node, descending, then by number.
    """

    load_E: ReadInts
    load_D: ReadInts
    load_NE: ReadInts2
    by_owner_E: ReadInts
    first_D: ReadInts
    busiest_first_D: ReadInts
    node_D: ReadInts
    slots: Int
    room_D: Ints
    left_D: Ints
    expert_P: Ints
    device_P: Ints
    tokens_P: Ints
    num_spilled: Index
    nearest_ED: Ints2
    is_sorted_E: Ints

    def __init__(
        self,
        load_E: ReadInts,
        load_D: ReadInts,
        load_NE: ReadInts2,
        by_owner_E: ReadInts,
        first_D: ReadInts,
        busiest_first_D: ReadInts,
        node_D: ReadInts,
        slots: Int,
        room: Index,
        nearest_ED: Ints2,
    ) -> None:
        self.load_E, self.load_D, self.load_NE = load_E, load_D, load_NE
        self.by_owner_E, self.first_D, self.busiest_first_D = by_owner_E, first_D, busiest_first_D
        self.node_D, self.slots, self.nearest_ED = node_D, slots, nearest_ED
        self.room_D, self.left_D = zero_ints(load_D.shape[0]), zero_ints(load_D.shape[0])
        self.expert_P, self.device_P, self.tokens_P = zero_ints(room), zero_ints(room), zero_ints(room)
        self.num_spilled = 0
        self.is_sorted_E = zero_ints(load_E.shape[0])

    @cython.cfunc
    @cython.nogil
    @cython.exceptval(check=False)
    def fits_below(self, ceiling: Int) -> Flag:
        """Spill all tokens above a ceiling, in ``expert_P`` and its siblings; False if they find no room."""
        self.num_spilled = 0
        for device in range(self.load_D.shape[0]):
            self.room_D[device] = ceiling - self.load_D[device]
            self.left_D[device] = self.slots
        for i in range(self.load_D.shape[0]):
            busy: Index = self.busiest_first_D[i]
            over = -self.room_D[busy]
            if over <= 0:
                break
            for j in range(self.first_D[busy], self.first_D[busy + 1]):
                if over == 0:
                    break
                over -= self.spill_expert(self.by_owner_E[j], over)
            if over > 0:
                return False
        return True

    @cython.cfunc
    @cython.nogil
    @cython.exceptval(check=False)
    def spill_expert(self, expert: Index, over: Int) -> Int:
        """Spill up to ``over`` tokens of an expert to the nearest devices with room; returns how many."""
        if self.is_sorted_E[expert] == 0:
            self.sort_devices(expert)
        wanted = min(over, self.load_E[expert])
        left = wanted
        for i in range(self.load_D.shape[0]):
            if left == 0:
                break
            device: Index = self.nearest_ED[expert, i]
            taken = min(left, self.room_D[device])
            if taken > 0 and self.left_D[device] > 0:
                self.expert_P[self.num_spilled] = expert
                self.device_P[self.num_spilled] = device
                self.tokens_P[self.num_spilled] = taken
                self.num_spilled += 1
                self.room_D[device] -= taken
                self.left_D[device] -= 1
                left -= taken
        return wanted - left

    @cython.cfunc
    @cython.nogil
    @cython.exceptval(check=False)
    def sort_devices(self, expert: Index) -> cython.void:
        """Sort the devices by the expert's tokens in their node, descending, then by number (heap sort)."""
        end: Index = self.load_D.shape[0]
        for i in range(end):
            self.nearest_ED[expert, i] = i
        start = end // 2
        while end > 1:
            if start > 0:  # build the heap
                start -= 1
                moved: Index = self.nearest_ED[expert, start]
            else:  # take the last device out
                end -= 1
                moved = self.nearest_ED[expert, end]
                self.nearest_ED[expert, end] = self.nearest_ED[expert, 0]
            parent = start
            while 2 * parent + 1 < end:
                child = 2 * parent + 1
                if child + 1 < end and self.is_nearer(
                    expert, self.nearest_ED[expert, child], self.nearest_ED[expert, child + 1]
                ):
                    child += 1
                if not self.is_nearer(expert, moved, self.nearest_ED[expert, child]):
                    break
                self.nearest_ED[expert, parent] = self.nearest_ED[expert, child]
                parent = child
            self.nearest_ED[expert, parent] = moved
        self.is_sorted_E[expert] = 1

    @cython.cfunc
    @cython.nogil
    @cython.exceptval(check=False)
    def is_nearer(self, expert: Index, first: Index, second: Index) -> Flag:
        """Whether a device comes before another one."""
        first_load = self.load_NE[self.node_D[first], expert]
        second_load = self.load_NE[self.node_D[second], expert]
        if first_load == second_load:
            return first < second
        return bool(first_load > second_load)


def spill(
    owner_E: ReadInts,
    load_E: ReadInts,
    load_D: ReadInts,
    load_NE: ReadInts2,
    by_owner_E: ReadInts,
    first_D: ReadInts,
    busiest_first_D: ReadInts,
    node_D: ReadInts,
    slots: Int,
    tolerance: Real,
    nearest_ED: Ints2,
    tokens_ED: Ints2,
) -> None:
    """Move tokens from their owners to other devices under the lowest ceiling that is possible.

    Args:
        owner_E: Owner of every expert, int64 ``[E]``.
        load_E: Tokens of every expert, int64 ``[E]``.
        load_D: Load of every device if nothing spills, int64 ``[D]``.
        load_NE: Tokens by source node and expert, int64 ``[N, E]``.
        by_owner_E: The experts by owner, then by tokens, descending; int64 ``[E]``.
        first_D: Where the experts of each device begin in ``by_owner_E``, then E; int64 ``[D + 1]``.
        busiest_first_D: The devices by load, descending, int64 ``[D]``.
        node_D: Node of each device, int64 ``[D]``.
        slots: Most experts of other owners that a device may compute.
        tolerance: Precision of the ceiling, as a part of the mean device load.
        nearest_ED: Work array, int64 ``[E, D]``.
        tokens_ED: Tokens of each expert on each device if nothing spills, int64 ``[E, D]``; changed in place.
    """
    num_devices: Index = load_D.shape[0]
    num_experts: Index = load_E.shape[0]
    room = num_devices * min(slots, num_experts)
    search = _Spilling(
        load_E, load_D, load_NE, by_owner_E, first_D, busiest_first_D, node_D, slots, room, nearest_ED
    )
    found: Ints = zero_ints(3 * room)
    num_found: Index = 0
    total: Int = 0
    for expert in range(num_experts):
        total += load_E[expert]
    low = (total + num_devices - 1) // num_devices
    high = load_D[busiest_first_D[0]]
    ceiling = low
    while low < high:
        if search.fits_below(ceiling):
            high = ceiling
            num_found = search.num_spilled
            for i in range(num_found):
                found[3 * i] = search.expert_P[i]
                found[3 * i + 1] = search.device_P[i]
                found[3 * i + 2] = search.tokens_P[i]
        else:
            low = ceiling + 1
        if high - low <= tolerance * total / num_devices:
            break
        ceiling = (low + high) // 2
    for i in range(num_found):
        spilled: Index = found[3 * i]
        device: Index = found[3 * i + 1]
        owner: Index = owner_E[spilled]
        tokens_ED[spilled, device] += found[3 * i + 2]
        tokens_ED[spilled, owner] -= found[3 * i + 2]
