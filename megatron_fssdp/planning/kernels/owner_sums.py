"""Kernel of dispatches in which replicas serve only their own device: the tokens on devices and links.

``planning/cost/owner_traffic.py`` explains the sums. Rows of ``sums`` have one entry for each device: its own
tokens, those that it sends to and receives from other devices of its node, and those that it sends to and
receives from other nodes.

Shape letters: E experts, D devices, N nodes, P pairs of expert and device.
"""

from megatron_fssdp.planning.native import compiler_marks as cython
from megatron_fssdp.planning.native.kernel_types import Index, Int, Ints, Ints2, ReadInts, ReadInts2
from megatron_fssdp.planning.native.work_arrays import zero_ints


def sum_owner_tokens(
    counts_DE: ReadInts2,
    owner_E: ReadInts,
    node_D: ReadInts,
    by_node_D: ReadInts,
    first_N: ReadInts,
    sums: Ints2,
) -> None:
    """Sum the tokens if all of them go to the owners.

    Args:
        counts_DE: (token, k) pairs by source device and expert, int64 ``[D, E]``.
        owner_E: Owner of every expert, int64 ``[E]``.
        node_D: Node of each device, int64 ``[D]``.
        by_node_D: The devices by node, then number, int64 ``[D]``.
        first_N: Where the devices of each node begin in ``by_node_D``, then D; int64 ``[N + 1]``.
        sums: Zeros; gets the five sums of each device, int64.
    """
    num_experts: Index = owner_E.shape[0]
    load_E: Ints = zero_ints(num_experts)
    with cython.nogil:
        for source in range(node_D.shape[0]):
            tokens: Int = 0
            for expert in range(num_experts):
                tokens += counts_DE[source, expert]
                load_E[expert] += counts_DE[source, expert]
            sums[3, source] += tokens
        # Of the counts, only those between an expert and the devices of its owner's node stay in a node.
        for expert in range(num_experts):
            owner: Index = owner_E[expert]
            near: Int = 0
            for i in range(first_N[node_D[owner]], first_N[node_D[owner] + 1]):
                device: Index = by_node_D[i]
                sums[3, device] -= counts_DE[device, expert]
                if device == owner:
                    sums[0, owner] += counts_DE[device, expert]
                else:
                    sums[1, device] += counts_DE[device, expert]
                    near += counts_DE[device, expert]
            sums[2, owner] += near
            sums[4, owner] += load_E[expert] - near - counts_DE[owner, expert]


def keep_replicas_tokens(
    counts_DE: ReadInts2,
    owner_E: ReadInts,
    node_D: ReadInts,
    expert_P: ReadInts,
    device_P: ReadInts,
    sums: Ints2,
) -> None:
    """Change the sums to those of a dispatch in which the devices of replicas keep their tokens.

    Args:
        counts_DE: (token, k) pairs by source device and expert, int64 ``[D, E]``.
        owner_E: Owner of every expert, int64 ``[E]``.
        node_D: Node of each device, int64 ``[D]``.
        expert_P: Expert of each replica, int64 ``[P]``.
        device_P: Device of each replica, int64 ``[P]``.
        sums: The five sums of each device without these replicas, int64; changed in place.
    """
    with cython.nogil:
        for pair in range(expert_P.shape[0]):
            expert: Index = expert_P[pair]
            device: Index = device_P[pair]
            owner: Index = owner_E[expert]
            tokens = counts_DE[device, expert]
            sums[0, device] += tokens
            if node_D[device] == node_D[owner]:
                sums[1, device] -= tokens
                sums[2, owner] -= tokens
            else:
                sums[3, device] -= tokens
                sums[4, owner] -= tokens


def find_busiest(sums: ReadInts2, node_D: ReadInts, num_nodes: Index, found: Ints) -> None:
    """Find the most loaded device and the busiest links.

    Args:
        sums: The five sums of each device, int64.
        node_D: Node of each device, int64 ``[D]``.
        num_nodes: Number of nodes, N.
        found: Zeros, int64, five of them. Gets the tokens that the most loaded device computes; those between
            the busiest device and its node, between the busiest device and other nodes, and between the
            busiest node and others; and all tokens between nodes.
    """
    far_N: Ints = zero_ints(2 * num_nodes)
    with cython.nogil:
        for device in range(node_D.shape[0]):
            found[0] = max(found[0], sums[0, device] + sums[2, device] + sums[4, device])
            found[1] = max(found[1], max(sums[1, device], sums[2, device]))
            found[2] = max(found[2], max(sums[3, device], sums[4, device]))
            found[4] += sums[3, device]
            far_N[node_D[device]] += sums[3, device]
            far_N[num_nodes + node_D[device]] += sums[4, device]
        for i in range(2 * num_nodes):
            found[3] = max(found[3], far_N[i])
