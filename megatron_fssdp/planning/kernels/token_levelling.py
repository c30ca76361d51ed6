"""Kernel of balanced dispatch: redistributes tokens among holders until device loads are even.

``planning/dispatch/balanced_dispatch.py`` says what is searched and why. Near tokens come from other devices
of the holder's node, and the holders of an expert in one node share them. Far tokens come from other nodes,
and all holders of an expert share them. A group is the pairs of expert and holder that share tokens.

Shape letters: E experts, D devices, N nodes, P pairs of expert and device, U positions
among an expert's holders.
"""

from megatron_fssdp.planning.kernels.parts.token_deals import TokenDeals
from megatron_fssdp.planning.native import compiler_marks as cython
from megatron_fssdp.planning.native.kernel_types import Flag, Index, Int, Ints, ReadInts, ReadInts2, Real
from megatron_fssdp.planning.native.work_arrays import zero_ints


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
    deals = TokenDeals(own_P, near_P, far_P, device_P, node_D, node_size_EN.shape[1], above_even)
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
    deals: TokenDeals,
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
