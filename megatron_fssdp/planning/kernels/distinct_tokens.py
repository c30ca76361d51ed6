"""Kernel of the deduplicated exchange: how many different tokens a source sends to each device and node.

``planning/cost/deduplicated_traffic.py`` explains the estimate. ``planning/placement/holder_groups.py``
prepares the arrays that depend on the placement only.

Shape letters: E experts, D devices, N nodes, P pairs of expert and device.
"""

from megatron_fssdp.planning.native import compiler_marks as cython
from megatron_fssdp.planning.native.kernel_types import (
    Index,
    ReadBytes2,
    ReadInts,
    ReadInts2,
    ReadReals2,
    Real,
    Reals,
    Reals2,
)
from megatron_fssdp.planning.native.work_arrays import zero_reals


def distinct_tokens(
    load_DE: ReadReals2,
    top_k: Real,
    present_ED: ReadBytes2,
    device_P: ReadInts,
    by_node_P: ReadInts,
    first_E: ReadInts,
    size_E: ReadInts,
    node_first_EN: ReadInts2,
    node_size_EN: ReadInts2,
    node_D: ReadInts,
    tokens_DN: Reals2,
    tokens_DD: Reals2,
) -> None:
    """Number of different tokens that every source is expected to send to each node and device.

    The dispatch is even.

    Args:
        load_DE: (token, k) pairs by source device and expert, float64 ``[D, E]``.
        top_k: Number of experts that a token selects.
        present_ED: Whether each expert is on each device, one byte each, ``[E, D]``.
        device_P: Holder of each pair, ascending for each expert, int64 ``[P]``.
        by_node_P: The pairs by expert, node and device, int64 ``[P]``.
        first_E: First pair of each expert, int64 ``[E]``.
        size_E: Number of holders of each expert, int64 ``[E]``.
        node_first_EN: Where the pairs of an expert and a node begin in ``by_node_P``, int64 ``[E, N]``.
        node_size_EN: Number of holders of each expert in each node, int64 ``[E, N]``.
        node_D: Node of each device, int64 ``[D]``.
        tokens_DN: Gets the tokens of each source that go to each node, float64 ``[D, N]``.
        tokens_DD: Gets the tokens of each source that go to each device, float64 ``[D, D]``.
    """
    num_devices: Index = load_DE.shape[0]
    num_experts: Index = load_DE.shape[1]
    num_nodes: Index = node_size_EN.shape[1]
    # For devices first, then nodes: the share of tokens that miss the place with the experts so far, and the
    # sum of these experts' shares.
    missed: Reals = zero_reals(num_devices + num_nodes)
    taken: Reals = zero_reals(num_devices + num_nodes)
    with cython.nogil:
        for source in range(num_devices):
            for place in range(num_devices + num_nodes):
                missed[place] = 1.0
                taken[place] = 0.0
            total: Real = 0.0
            for expert in range(num_experts):
                total += load_DE[source, expert]
            tokens: Real = total / top_k
            home: Index = node_D[source]
            for expert in range(num_experts):
                if load_DE[source, expert] <= 0.0:
                    continue
                share: Real = load_DE[source, expert] / tokens
                first: Index = first_E[expert]
                if present_ED[expert, source]:
                    _choose(share, top_k, source, missed, taken)
                    _choose(share, top_k, num_devices + home, missed, taken)
                elif node_size_EN[expert, home] > 0:
                    first = node_first_EN[expert, home]
                    near: Real = 1.0 / node_size_EN[expert, home]
                    for pair in range(first, first + node_size_EN[expert, home]):
                        _choose(share * near, top_k, device_P[by_node_P[pair]], missed, taken)
                    _choose(share, top_k, num_devices + home, missed, taken)
                else:
                    share = share / size_E[expert]
                    for pair in range(first, first + size_E[expert]):
                        _choose(share, top_k, device_P[pair], missed, taken)
                    for node in range(num_nodes):
                        size: Index = node_size_EN[expert, node]
                        if size > 0:
                            _choose(share * size, top_k, num_devices + node, missed, taken)
            for place in range(num_devices):
                tokens_DD[source, place] = tokens * (1.0 - missed[place])
            for place in range(num_nodes):
                tokens_DN[source, place] = tokens * (1.0 - missed[num_devices + place])


@cython.inner
def _choose(share: Real, top_k: Real, place: Index, missed: Reals, taken: Reals) -> cython.void:
    """Add the choice of one expert to a place.

    Args:
        share: Share of the source's tokens that select the expert and send it to the place.
        top_k: Number of experts that a token selects.
        place: Number of the device, or D plus the number of the node.
        missed: Share of tokens that miss each place; changed in place.
        taken: Sum of the shares of each place; changed in place.
    """
    chance: Real = 1.0
    if taken[place] + share * top_k < top_k:
        chance = share * top_k / (top_k - taken[place])
    missed[place] *= 1.0 - chance
    taken[place] += share
