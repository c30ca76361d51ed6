"""Kernels of even dispatch: who computes how many tokens, and what one source sends.

``planning/dispatch/even_dispatch.py`` has the rule. ``planning/placement/holder_groups.py`` prepares the
arrays that depend on the placement only.

Shape letters: E experts, D devices, N nodes, P pairs of expert and device.
"""

from megatron_fssdp.planning.native import compiler_marks as cython
from megatron_fssdp.planning.native.kernel_types import Index, Int, Ints, Ints2, ReadInts, ReadInts2
from megatron_fssdp.planning.native.work_arrays import zero_ints


def split_evenly(
    counts_DE: ReadInts2,
    device_P: ReadInts,
    by_node_P: ReadInts,
    first_E: ReadInts,
    size_E: ReadInts,
    node_first_EN: ReadInts2,
    node_size_EN: ReadInts2,
    node_D: ReadInts,
    own_P: Ints,
    near_P: Ints,
    far_P: Ints,
    sums: Ints2,
) -> None:
    """Split the tokens of all sources over the holders of their experts.

    Args:
        counts_DE: (token, k) pairs by source device and expert, int64 ``[D, E]``.
        device_P: Holder of each pair, ascending for each expert, int64 ``[P]``.
        by_node_P: The pairs by expert, node and device, int64 ``[P]``.
        first_E: First pair of each expert, int64 ``[E]``.
        size_E: Number of holders of each expert, int64 ``[E]``.
        node_first_EN: Where the pairs of an expert and a node begin in ``by_node_P``, int64 ``[E, N]``.
        node_size_EN: Number of holders of each expert in each node, int64 ``[E, N]``.
        node_D: Node of each device, int64 ``[D]``.
        own_P: Gets the tokens that stay on their device, int64 ``[P]``.
        near_P: Gets the tokens of each pair that come from other devices of the node, int64 ``[P]``.
        far_P: Gets the tokens of each pair that come from other nodes, int64 ``[P]``.
        sums: Zeros; gets the sums of each device, int64 ``[5, D]``, see ``kernels/traffic_sums.py``.
    """
    num_pairs: Index = device_P.shape[0]
    num_experts: Index = counts_DE.shape[1]
    # Differences of neighbours in near_P (in the order by node) and far_P. A token for each pair of a range
    # takes two changes, however long the range is.
    near_steps: Ints = zero_ints(num_pairs + 1)
    far_steps: Ints = zero_ints(num_pairs + 1)
    next_E: Ints = zero_ints(num_experts)  # the first pair whose device is not below the source
    with cython.nogil:
        for expert in range(num_experts):
            next_E[expert] = first_E[expert]
        for source in range(counts_DE.shape[0]):
            node: Index = node_D[source]
            near: Int = 0
            far: Int = 0
            for expert in range(num_experts):
                tokens = counts_DE[source, expert]
                pair: Index = next_E[expert]
                if pair < first_E[expert] + size_E[expert] and device_P[pair] == source:
                    own_P[pair] = tokens
                    next_E[expert] += 1
                elif tokens > 0:
                    if node_size_EN[expert, node] > 0:
                        first: Index = node_first_EN[expert, node]
                        _deal_out(tokens, source + expert, first, node_size_EN[expert, node], near_steps)
                        near += tokens
                    else:
                        _deal_out(tokens, source + expert, first_E[expert], size_E[expert], far_steps)
                        far += tokens
            sums[1, source] = near
            sums[3, source] = far
        near = 0
        far = 0
        for i in range(num_pairs):
            near += near_steps[i]
            far += far_steps[i]
            near_P[by_node_P[i]] = near
            far_P[i] = far
        for i in range(num_pairs):
            device: Index = device_P[i]
            sums[0, device] += own_P[i]
            sums[2, device] += near_P[i]
            sums[4, device] += far_P[i]


@cython.inner
def _deal_out(tokens: Int, turn: Index, first: Index, size: Index, steps: Ints) -> cython.void:
    """Split tokens over a range of pairs; the remainder goes to ``turn`` and the next ones, in a ring.

    Args:
        tokens: Tokens to split.
        turn: Position that gets the first token of the remainder, modulo ``size``.
        first: First pair of the range.
        size: Number of pairs in the range.
        steps: Differences of neighbouring pairs, int64 ``[P + 1]``; changed in place.
    """
    if size == 1:  # most experts have one holder, and divisions take long
        steps[first] += tokens
        steps[first + 1] -= tokens
        return
    share = tokens // size
    rest = tokens - share * size
    steps[first] += share
    steps[first + size] -= share
    if rest > 0:
        start = turn % size
        stop = start + rest
        steps[first + start] += 1
        if stop <= size:
            steps[first + stop] -= 1
        else:
            steps[first + size] -= 1
            steps[first] += 1
            steps[first + stop - size] -= 1


def even_row(
    counts_E: ReadInts,
    expert_P: ReadInts,
    size_E: ReadInts,
    turn_P: ReadInts,
    tokens_P: Ints,
) -> None:
    """Split the tokens of one source over the pairs that get some.

    Args:
        counts_E: (token, k) pairs of the source by expert, int64 ``[E]``.
        expert_P: Expert of each pair, int64 ``[P]``.
        size_E: Number of pairs that share each expert's tokens, int64 ``[E]``.
        turn_P: Turn of each pair when a remainder is dealt out, int64 ``[P]``.
        tokens_P: Gets the tokens of each pair, int64 ``[P]``.
    """
    with cython.nogil:
        for pair in range(expert_P.shape[0]):
            expert: Index = expert_P[pair]
            share = counts_E[expert] // size_E[expert]
            if turn_P[pair] < counts_E[expert] - share * size_E[expert]:
                share += 1
            tokens_P[pair] = share
