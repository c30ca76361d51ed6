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
        work: Memory of all work arrays, of which the first ``num_used`` are in use. One allocation takes less
            time than many.
        is_sorted_E: 1 for experts whose devices are sorted in ``nearest_ED``.
        size_N: Number of devices of each node.
        load_N: Tokens of the present expert in each node.
        sorted_N: The nodes by these tokens, descending.
        counter_N: Counter of each node's devices.
        next_N: Where the next device of each counter goes.
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
    work: Ints
    num_used: Index
    nearest_ED: Ints2
    is_sorted_E: Ints
    size_N: Ints
    load_N: Ints
    sorted_N: Ints
    counter_N: Ints
    next_N: Ints

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
        self.num_spilled = 0
        self.num_used = 0
        num_devices: Index = load_D.shape[0]
        num_experts: Index = load_E.shape[0]
        num_nodes: Index = load_NE.shape[0]
        self.work = zero_ints(2 * num_devices + num_experts + 5 * num_nodes + 3 * room)
        self.room_D, self.left_D = self.new_ints(num_devices), self.new_ints(num_devices)
        self.expert_P, self.device_P = self.new_ints(room), self.new_ints(room)
        self.tokens_P, self.is_sorted_E = self.new_ints(room), self.new_ints(num_experts)
        self.size_N, self.load_N = self.new_ints(num_nodes), self.new_ints(num_nodes)
        self.sorted_N, self.counter_N = self.new_ints(num_nodes), self.new_ints(num_nodes)
        self.next_N = self.new_ints(num_nodes)
        for device in range(node_D.shape[0]):
            self.size_N[node_D[device]] += 1

    @cython.cfunc
    def new_ints(self, size: Index) -> Ints:
        """The next part of ``work``: zeros."""
        first = self.num_used
        self.num_used += size
        return self.work[first : first + size]

    @cython.inner
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

    @cython.inner
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

    @cython.inner
    def sort_devices(self, expert: Index) -> cython.void:
        """Sort the devices by the expert's tokens in their node, descending, then by number.

        Nodes are sorted, and then the devices are counted off: nodes with equal tokens share a counter.
        """
        self.sort_nodes(expert)
        end: Index = 0
        for i in range(self.load_N.shape[0]):
            node: Index = self.sorted_N[i]
            previous: Index = self.sorted_N[max(0, i - 1)]
            if i == 0 or self.load_N[node] != self.load_N[previous]:
                self.counter_N[node] = i
                self.next_N[i] = end
            else:
                self.counter_N[node] = self.counter_N[previous]
            end += self.size_N[node]
        for device in range(self.load_D.shape[0]):
            counter: Index = self.counter_N[self.node_D[device]]
            place: Index = self.next_N[counter]
            self.nearest_ED[expert, place] = device
            self.next_N[counter] += 1
        self.is_sorted_E[expert] = 1

    @cython.inner
    def sort_nodes(self, expert: Index) -> cython.void:
        """Sort the nodes by an expert's tokens, descending (heap sort)."""
        end: Index = self.load_N.shape[0]
        for i in range(end):
            self.load_N[i] = self.load_NE[i, expert]
            self.sorted_N[i] = i
        start = end // 2
        while end > 1:
            if start > 0:  # build the heap
                start -= 1
                moved: Index = self.sorted_N[start]
            else:  # take the last node out
                end -= 1
                moved = self.sorted_N[end]
                self.sorted_N[end] = self.sorted_N[0]
            parent = start
            while 2 * parent + 1 < end:
                child = 2 * parent + 1
                if (
                    child + 1 < end
                    and self.load_N[self.sorted_N[child]] > self.load_N[self.sorted_N[child + 1]]
                ):
                    child += 1
                if self.load_N[moved] <= self.load_N[self.sorted_N[child]]:
                    break
                self.sorted_N[parent] = self.sorted_N[child]
                parent = child
            self.sorted_N[parent] = moved


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
    total: Int = 0
    for expert in range(num_experts):
        total += load_E[expert]
    with cython.nogil:
        num_found = _lowest_ceiling(search, total, tolerance, found)
    for i in range(num_found):
        spilled: Index = found[3 * i]
        device: Index = found[3 * i + 1]
        owner: Index = owner_E[spilled]
        tokens_ED[spilled, device] += found[3 * i + 2]
        tokens_ED[spilled, owner] -= found[3 * i + 2]


@cython.inner
def _lowest_ceiling(search: _Spilling, total: Int, tolerance: Real, found: Ints) -> Index:
    """Find the lowest ceiling of the device loads by a binary search.

    Args:
        search: Finds which tokens spill under a ceiling.
        total: Tokens of all experts.
        tolerance: Precision of the ceiling, as a part of the mean device load.
        found: Gets expert, device and number of the tokens that spill, one entry after the other.

    Returns:
        Number of entries.
    """
    num_devices: Index = search.load_D.shape[0]
    num_found: Index = 0
    low = (total + num_devices - 1) // num_devices
    high = search.load_D[search.busiest_first_D[0]]
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
    return num_found
