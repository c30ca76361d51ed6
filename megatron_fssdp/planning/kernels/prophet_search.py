"""Kernel of Pro-Prophet's planner: the steps of its greedy search (Pro-Prophet, Alg. 1).

``planning/papers/prophet_planner.py`` prices the steps. The steps do not depend on their prices.

Shape letters: E experts, D devices, P pairs of expert and device, B bins.
"""

from megatron_fssdp.planning.native import compiler_marks as cython
from megatron_fssdp.planning.native.kernel_types import Index, Int, Ints, Ints2, ReadInts, ReadInts2, Real
from megatron_fssdp.planning.native.work_arrays import zero_ints

_DIGITS = 256  # the radix sort takes eight bits of a count at a time


@cython.cclass
class _Search:
    """The greedy search. Arguments of :func:`greedy_steps` have the same names.

    Attributes:
        used_E: The last case in which each expert was selected, from 1.
        is_sorted_E: 1 for experts whose devices are sorted in ``fewest_first_ED``.
        num_sent: Number of replicas of all cases so far.
        num_open: Number of devices with room.
        busiest: The most loaded device.
        lowest: The lowest load of a device.
        sorted_D: Work array of the sort.
        first_B: Work array of the sort: where the devices with each digit begin.
    """

    owner_E: ReadInts
    load_E: ReadInts
    counts_DE: ReadInts2
    tolerance: Real
    left_D: Ints
    computed_D: Ints
    received_D: Ints
    fewest_first_ED: Ints2
    tokens_ED: Ints2
    end_of_step: Ints
    received_after: Ints
    computed_after: Ints
    expert_P: Ints
    device_P: Ints
    used_E: Ints
    is_sorted_E: Ints
    num_sent: Index
    num_open: Index
    busiest: Index
    lowest: Int
    sorted_D: Ints
    first_B: Ints

    def __init__(self, owner_E: ReadInts, load_E: ReadInts, counts_DE: ReadInts2, tolerance: Real) -> None:
        self.owner_E, self.load_E, self.counts_DE, self.tolerance = owner_E, load_E, counts_DE, tolerance
        size: Index = counts_DE.shape[0]
        work: Ints = zero_ints(4 * size + _DIGITS + 1)  # one array, because each one takes a microsecond
        self.left_D, self.computed_D = work[:size], work[size : 2 * size]
        self.received_D, self.sorted_D = work[2 * size : 3 * size], work[3 * size : 4 * size]
        self.first_B = work[4 * size :]
        self.used_E = zero_ints(owner_E.shape[0])
        self.num_sent, self.num_open, self.busiest, self.lowest = 0, 0, 0, 0

    @cython.inner
    def run(self, case: Int, num_left_out: Index, num_steps: Index, last: Index) -> Index:
        """Search once; returns the number of steps of all cases so far.

        Args:
            case: Number of the case, from 1.
            num_left_out: Number of devices to which a selected expert is not sent.
            num_steps: Number of steps of the cases before.
            last: Most steps of these cases and this one.
        """
        self.scan_loads()
        most_received: Int = self.most_received()
        while self.computed_D[self.busiest] - self.lowest >= self.tolerance:
            # Further steps would send nothing, and so change nothing but the number of selected experts.
            if num_steps == last or self.num_open == 0:
                break
            owner: Index = self.busiest
            selected: Index = self.most_loaded_expert(owner, case)
            if selected < 0:
                break
            self.used_E[selected] = case
            received = self.received_D[owner]
            self.send(selected, owner, num_left_out)
            self.scan_loads()
            if received == most_received:  # only the owner receives fewer inputs than before
                most_received = self.most_received()
            self.end_of_step[num_steps] = self.num_sent
            self.received_after[num_steps] = most_received
            self.computed_after[num_steps] = self.computed_D[self.busiest]
            num_steps += 1
        return num_steps

    @cython.inner
    def scan_loads(self) -> cython.void:
        """Find the most loaded device and the lowest load."""
        self.busiest = 0
        self.lowest = self.computed_D[0]
        for device in range(self.computed_D.shape[0]):
            if self.computed_D[device] > self.computed_D[self.busiest]:
                self.busiest = device
            self.lowest = min(self.lowest, self.computed_D[device])

    @cython.inner
    def most_received(self) -> Int:
        """Most inputs that a device receives."""
        most: Int = 0
        for device in range(self.received_D.shape[0]):
            most = max(most, self.received_D[device])
        return most

    @cython.inner
    def most_loaded_expert(self, owner: Index, case: Int) -> Index:
        """The most loaded expert of an owner that was not selected in this case, or -1."""
        selected: Index = -1
        most: Int = 0
        for expert in range(self.owner_E.shape[0]):
            if self.owner_E[expert] != owner or self.used_E[expert] == case:
                continue
            if self.load_E[expert] > most:
                selected = expert
                most = self.load_E[expert]
        return selected

    @cython.inner
    def send(self, expert: Index, owner: Index, num_left_out: Index) -> cython.void:
        """Send an expert to all devices with room, except its owner and those with the fewest inputs."""
        if self.is_sorted_E[expert] == 0:
            self.sort_devices(expert)
        num_passed: Index = 0
        for i in range(self.computed_D.shape[0]):
            device: Index = self.fewest_first_ED[expert, i]
            if device == owner:
                continue
            num_passed += 1
            if num_passed <= num_left_out or self.left_D[device] == 0:
                continue
            tokens = self.tokens_ED[expert, device]
            self.computed_D[device] += tokens
            self.computed_D[owner] -= tokens
            self.received_D[owner] -= tokens
            self.left_D[device] -= 1
            if self.left_D[device] == 0:
                self.num_open -= 1
            if self.num_sent < self.expert_P.shape[0]:
                self.expert_P[self.num_sent] = expert
                self.device_P[self.num_sent] = device
            self.num_sent += 1

    @cython.inner
    def sort_devices(self, expert: Index) -> cython.void:
        """Sort the devices by their inputs for an expert, ascending, then by number (radix sort)."""
        num_devices: Index = self.computed_D.shape[0]
        most: Int = 0
        for device in range(num_devices):
            self.fewest_first_ED[expert, device] = device
            self.tokens_ED[expert, device] = self.counts_DE[device, expert]
            most = max(most, self.tokens_ED[expert, device])
        unit: Int = 1
        while most // unit > 0:
            for digit in range(_DIGITS + 1):
                self.first_B[digit] = 0
            for device in range(num_devices):
                at: Index = self.tokens_ED[expert, device] // unit % _DIGITS
                self.first_B[at + 1] += 1
            for digit in range(_DIGITS):
                self.first_B[digit + 1] += self.first_B[digit]
            for i in range(num_devices):
                moved: Index = self.fewest_first_ED[expert, i]
                at = self.tokens_ED[expert, moved] // unit % _DIGITS
                place: Index = self.first_B[at]
                self.sorted_D[place] = moved
                self.first_B[at] += 1
            for i in range(num_devices):
                self.fewest_first_ED[expert, i] = self.sorted_D[i]
            unit *= _DIGITS
        self.is_sorted_E[expert] = 1


def greedy_steps(
    owner_E: ReadInts,
    load_E: ReadInts,
    counts_DE: ReadInts2,
    left_out: ReadInts,
    most_steps: ReadInts,
    tolerance: Real,
    slots: Int,
    computed_D: ReadInts,
    received_D: ReadInts,
    is_sorted_E: Ints,
    fewest_first_ED: Ints2,
    tokens_ED: Ints2,
    case_steps: Ints,
    end_of_step: Ints,
    received_after: Ints,
    computed_after: Ints,
    expert_P: Ints,
    device_P: Ints,
) -> None:
    """Send the most loaded experts of the most loaded devices to others, until the load is balanced.

    The search starts again for each case, a number of devices that are left out. The results of the cases
    come one after the other.

    Args:
        owner_E: Owner of every expert, int64 ``[E]``.
        load_E: Inputs of every expert, int64 ``[E]``.
        counts_DE: Inputs by source device and expert, int64 ``[D, E]``.
        left_out: Number of devices to which a selected expert is not sent, in each case, int64.
            They have the fewest inputs for it, and of equal ones those with the lowest numbers are left out.
        most_steps: Most steps of each case, int64.
        tolerance: The load is balanced if the highest and the lowest load of a device differ by less.
        slots: Most replicas on a device.
        computed_D: Inputs that each device computes before the first step, int64 ``[D]``.
        received_D: Inputs that each device receives before the first step, int64 ``[D]``.
        is_sorted_E: Zeros; gets 1 for experts whose rows in the next two arrays are known, int64 ``[E]``.
            Another search with the same counts can go on with the three arrays.
        fewest_first_ED: Gets the devices in the order of their inputs for an expert, int64 ``[E, D]``.
        tokens_ED: Gets these inputs by expert and device, int64 ``[E, D]``.
        case_steps: Gets the number of steps of each case, int64.
        end_of_step: Gets the number of replicas of all cases after each step, int64 with room for
            E steps of each case.
        received_after: Gets the most inputs that a device receives after each step.
        computed_after: Gets the most inputs that a device computes after each step.
        expert_P: Gets the experts of the replicas, in the order of the steps, int64. Replicas for which
            there is no room are only counted.
        device_P: Gets the devices of the replicas, in the same order.
    """
    search = _Search(owner_E, load_E, counts_DE, tolerance)
    search.is_sorted_E, search.fewest_first_ED, search.tokens_ED = is_sorted_E, fewest_first_ED, tokens_ED
    search.end_of_step, search.received_after, search.computed_after = (
        end_of_step,
        received_after,
        computed_after,
    )
    search.expert_P, search.device_P = expert_P, device_P
    with cython.nogil:
        num_steps: Index = 0
        for case in range(left_out.shape[0]):
            for device in range(computed_D.shape[0]):
                search.left_D[device] = slots
                search.computed_D[device] = computed_D[device]
                search.received_D[device] = received_D[device]
            search.num_open = computed_D.shape[0] if slots > 0 else 0
            end = search.run(case + 1, left_out[case], num_steps, num_steps + most_steps[case])
            case_steps[case] = end - num_steps
            num_steps = end
