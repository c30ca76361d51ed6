"""Kernel of balanced dispatch: redistributes tokens among holders until device loads are even.

``planning/dispatch/balanced_dispatch.py`` says what is searched and why. Near tokens come from other devices
of the holder's node, and the holders of an expert in one node share them. Far tokens come from other nodes,
and all holders of an expert share them. A group is the pairs of expert and holder that share tokens.

Shape letters: E experts, D devices, N nodes, P pairs of expert and device, U positions
among an expert's holders.
"""

from megatron_fssdp.planning.kernels.parts.water_filling import WaterFilling
from megatron_fssdp.planning.native import compiler_marks as cython
from megatron_fssdp.planning.native.kernel_types import Flag, Index, Int, Ints, ReadInts, ReadInts2, Real
from megatron_fssdp.planning.native.work_arrays import zero_ints


@cython.cclass
class _Deals:
    """Redistributes the tokens of one group at a time, and keeps the sums of tokens.

    Attributes:
        near_P: Near tokens of each pair.
        far_P: Far tokens of each pair.
        device_P: Holder of each pair.
        node_D: Node of each device.
        load_D: Tokens that each device computes.
        near_D: Near tokens of each device.
        far_D: Far tokens of each device.
        far_N: Far tokens of each node.
        most_near: Most near tokens of a device.
        most_far: Most far tokens of a device.
        most_of_node: Most far tokens of a node.
        filling: Water filling over the positions in a group.
        chosen_U: The pairs of the present group.
        kept_U: Positions in the group whose node is not full yet.
        room_N: Far tokens of the group that each node may get.
        sum_N: Far tokens of the group that each node would get; -1 if the node is full.
    """

    near_P: Ints
    far_P: Ints
    device_P: ReadInts
    node_D: ReadInts
    load_D: Ints
    near_D: Ints
    far_D: Ints
    far_N: Ints
    most_near: Int
    most_far: Int
    most_of_node: Int
    filling: WaterFilling
    chosen_U: Ints
    kept_U: Ints
    room_N: Ints
    sum_N: Ints

    def __init__(
        self,
        own_P: ReadInts,
        near_P: Ints,
        far_P: Ints,
        device_P: ReadInts,
        node_D: ReadInts,
        num_nodes: Index,
        above_even: Int,
    ) -> None:
        num_devices: Index = node_D.shape[0]
        self.near_P, self.far_P, self.device_P, self.node_D = near_P, far_P, device_P, node_D
        self.load_D, self.near_D, self.far_D = (zero_ints(num_devices) for _ in range(3))
        self.far_N, self.room_N, self.sum_N = (zero_ints(num_nodes) for _ in range(3))
        self.chosen_U, self.kept_U = zero_ints(num_devices), zero_ints(num_devices)
        self.filling = WaterFilling(num_devices)
        for pair in range(device_P.shape[0]):
            device: Index = device_P[pair]
            self.load_D[device] += own_P[pair] + near_P[pair] + far_P[pair]
            self.near_D[device] += near_P[pair]
            self.far_D[device] += far_P[pair]
            self.far_N[node_D[device]] += far_P[pair]
        self.most_near = self.most_far = self.most_of_node = above_even
        for device in range(num_devices):
            self.most_near = max(self.most_near, self.near_D[device] + above_even)
            self.most_far = max(self.most_far, self.far_D[device] + above_even)
            self.most_of_node = max(self.most_of_node, self.far_N[node_D[device]] + above_even)

    @cython.inner
    def deal(self, is_far: Flag, size: Index, own_pair: Index) -> Flag:
        """Redistribute the tokens of the group, if this lowers the load of one of its holders.

        Args:
            is_far: Whether the tokens come from other nodes.
            size: Number of pairs in the group.
            own_pair: The pair whose holder's load should become lower.

        Returns:
            Whether the tokens were redistributed.
        """
        tokens_P, received_D = self.near_P, self.near_D
        limit = self.most_near
        if is_far:
            tokens_P, received_D = self.far_P, self.far_D
            limit = self.most_far
        total: Int = 0
        for i in range(size):
            now = tokens_P[self.chosen_U[i]]
            device: Index = self.device_P[self.chosen_U[i]]
            total += now
            self.filling.load_U[i] = self.load_D[device] - now
            self.filling.room_U[i] = limit - received_D[device] + now
        if is_far:
            self.divide_among_nodes(total, size)
        else:
            for i in range(size):
                self.filling.rising_U[i] = i
            self.filling.divide(total, size)
        for i in range(size):
            if self.chosen_U[i] == own_pair and self.filling.part_U[i] >= tokens_P[own_pair]:
                return False
        for i in range(size):
            device = self.device_P[self.chosen_U[i]]
            change = self.filling.part_U[i] - tokens_P[self.chosen_U[i]]
            tokens_P[self.chosen_U[i]] += change
            received_D[device] += change
            self.load_D[device] += change
            if is_far:
                self.far_N[self.node_D[device]] += change
        return True

    @cython.inner
    def divide_among_nodes(self, amount: Int, size: Index) -> cython.void:
        """Divide far tokens among a group's holders, with a limit for each node.

        Args:
            amount: Far tokens of the group.
            size: Number of pairs in the group.
        """
        num_kept = size
        for i in range(size):
            self.kept_U[i] = i
            node: Index = self.node_of(i)
            self.room_N[node] = self.most_of_node - self.far_N[node]
        for i in range(size):
            self.room_N[self.node_of(i)] += self.far_P[self.chosen_U[i]]
        while True:
            for i in range(num_kept):
                self.filling.rising_U[i] = self.kept_U[i]
                self.sum_N[self.node_of(self.kept_U[i])] = 0
            self.filling.divide(amount, num_kept)
            for i in range(num_kept):
                self.sum_N[self.node_of(self.kept_U[i])] += self.filling.part_U[self.kept_U[i]]
            # A node whose limit is exceeded gets exactly its limit. The other nodes share the rest.
            any_full = False
            for i in range(num_kept):
                node = self.node_of(self.kept_U[i])
                if self.sum_N[node] <= self.room_N[node]:
                    continue
                any_full = True
                inside: Index = 0
                for j in range(i, num_kept):
                    if self.node_of(self.kept_U[j]) == node:
                        self.filling.rising_U[inside] = self.kept_U[j]
                        inside += 1
                self.filling.divide(self.room_N[node], inside)
                amount -= self.room_N[node]
                self.sum_N[node] = -1
            if not any_full:
                return
            inside = 0
            for i in range(num_kept):
                if self.sum_N[self.node_of(self.kept_U[i])] >= 0:
                    self.kept_U[inside] = self.kept_U[i]
                    inside += 1
            num_kept = inside

    @cython.inner
    def node_of(self, position: Index) -> Index:
        """Node of the holder at a position in the group."""
        return self.node_D[self.device_P[self.chosen_U[position]]]


def level_tokens(
    own_P: ReadInts,
    near_P: Ints,
    far_P: Ints,
    expert_P: ReadInts,
    device_P: ReadInts,
    by_node_P: ReadInts,
    by_device_P: ReadInts,
    first_D: ReadInts,
    first_E: ReadInts,
    size_E: ReadInts,
    node_first_EN: ReadInts2,
    node_size_EN: ReadInts2,
    node_D: ReadInts,
    enough: Real,
    deals_left: Int,
    above_even: Int,
) -> None:
    """Lower the highest device load until this is impossible or the load is close to the mean.

    A device of the highest load gives up tokens of one of its groups if the other holders can take them. If
    no group allows it, the devices that are as loaded and share tokens with the device give up theirs first.

    Args:
        own_P: Tokens of the holder itself for each pair, int64 ``[P]``.
        near_P: Near tokens of each pair, int64 ``[P]``; changed in place.
        far_P: Far tokens of each pair, int64 ``[P]``; changed in place.
        expert_P: Expert of each pair, ascending, int64 ``[P]``.
        device_P: Holder of each pair, ascending for each expert, int64 ``[P]``.
        by_node_P: The pairs by expert, node and device, int64 ``[P]``.
        by_device_P: The pairs by device and expert, int64 ``[P]``.
        first_D: Where the pairs of each device begin in ``by_device_P``, then P; int64 ``[D + 1]``.
        first_E: First pair of each expert, int64 ``[E]``.
        size_E: Number of holders of each expert, int64 ``[E]``.
        node_first_EN: Where the pairs of an expert and a node begin in ``by_node_P``, int64 ``[E, N]``.
        node_size_EN: Number of holders of each expert in each node, int64 ``[E, N]``.
        node_D: Node of each device, int64 ``[D]``.
        enough: The search stops when the highest load divided by the mean load is at most this number.
        deals_left: Most redistributions that are tried.
        above_even: Tokens that devices and nodes may receive above the highest numbers of before.
    """
    deals = _Deals(own_P, near_P, far_P, device_P, node_D, node_size_EN.shape[1], above_even)
    load_D: Ints = deals.load_D
    total: Int = 0
    for device in range(load_D.shape[0]):
        total += load_D[device]
    highest_wanted = enough * total / load_D.shape[0]
    seen_D: Ints = zero_ints(node_D.shape[0])
    waiting_D: Ints = zero_ints(node_D.shape[0])
    with cython.nogil:
        _lower(
            deals,
            expert_P,
            by_node_P,
            by_device_P,
            first_D,
            first_E,
            size_E,
            node_first_EN,
            node_size_EN,
            highest_wanted,
            deals_left,
            seen_D,
            waiting_D,
        )


@cython.inner
def _lower(
    deals: _Deals,
    expert_P: ReadInts,
    by_node_P: ReadInts,
    by_device_P: ReadInts,
    first_D: ReadInts,
    first_E: ReadInts,
    size_E: ReadInts,
    node_first_EN: ReadInts2,
    node_size_EN: ReadInts2,
    highest_wanted: Real,
    deals_left: Int,
    seen_D: Ints,
    waiting_D: Ints,
) -> cython.void:
    """Lower the highest load step by step. The first arguments are those of :func:`level_tokens`.

    Args:
        deals: Redistributes the tokens of one group.
        expert_P: Experts.
        by_node_P: Pairs by node.
        by_device_P: Pairs by device.
        first_D: First pairs of devices.
        first_E: First pairs of experts.
        size_E: Numbers of holders.
        node_first_EN: First pairs in nodes.
        node_size_EN: Numbers of holders in nodes.
        highest_wanted: The search stops at this highest load.
        deals_left: Most redistributions that are tried.
        seen_D: Zeros; gets the last turn in which each device was waiting.
        waiting_D: Work array for devices whose groups are tried.
    """
    load_D: Ints = deals.load_D
    turn: Int = 0
    lowered: Flag = True
    while lowered:
        lowered = False
        busiest: Index = 0
        for device in range(load_D.shape[0]):
            if load_D[device] > load_D[busiest]:
                busiest = device
        highest = load_D[busiest]
        if highest <= highest_wanted:
            return
        turn += 1
        seen_D[busiest] = turn
        waiting_D[0] = busiest
        num_waiting: Index = 1
        at: Index = 0
        while at < num_waiting and not lowered:
            current: Index = waiting_D[at]
            at += 1
            num_pairs = first_D[current + 1] - first_D[current]
            for index in range(2 * num_pairs):  # groups of near tokens, then groups of far tokens
                is_far: Flag = index >= num_pairs
                pair: Index = by_device_P[first_D[current] + index % num_pairs]
                if (deals.far_P[pair] if is_far else deals.near_P[pair]) == 0:
                    continue
                expert: Index = expert_P[pair]
                size = size_E[expert] if is_far else node_size_EN[expert, deals.node_D[current]]
                if size == 1:
                    continue
                if deals_left == 0:
                    return
                deals_left -= 1
                first = first_E[expert] if is_far else node_first_EN[expert, deals.node_D[current]]
                for i in range(size):
                    deals.chosen_U[i] = first + i if is_far else by_node_P[first + i]
                lowered = deals.deal(is_far, size, pair)
                if lowered:
                    break
                for i in range(size):
                    holder: Index = deals.device_P[deals.chosen_U[i]]
                    if load_D[holder] >= highest - 1 and seen_D[holder] != turn:
                        seen_D[holder] = turn
                        waiting_D[num_waiting] = holder
                        num_waiting += 1


def level_out(amount: Int, load_U: ReadInts, room_U: ReadInts, part_U: Ints) -> None:
    """Divide an amount into whole parts so that the highest load is as low as possible (water filling).

    Args:
        amount: The amount to divide, at most the sum of ``room_U``.
        load_U: Load of each receiver before, 0 or more, int64 ``[U]``.
        room_U: Most that each receiver may get, 0 or more, int64 ``[U]``.
        part_U: Gets the part of each receiver, int64 ``[U]``.
    """
    filling = WaterFilling(load_U.shape[0])
    for i in range(load_U.shape[0]):
        filling.rising_U[i] = i
        filling.load_U[i] = load_U[i]
        filling.room_U[i] = room_U[i]
    filling.divide(amount, load_U.shape[0])
    for i in range(load_U.shape[0]):
        part_U[i] = filling.part_U[i]
