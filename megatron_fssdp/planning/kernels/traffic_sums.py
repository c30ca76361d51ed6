"""Kernel of traffic: the tokens of a dispatch on every device and on the busiest links.

A table of *sums* has five rows with an entry for each device: its own tokens, those that it sends to and
receives from other devices of its node, and those that it sends to and receives from other nodes.
``planning/cost/owner_traffic.py`` explains the dispatch in which replicas serve only their own device.

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
        sums: Zeros; gets the sums, int64 ``[5, D]``.
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
        sums: The sums without these replicas, int64 ``[5, D]``; changed in place.
    """
    with cython.nogil:
        for pair in range(expert_P.shape[0]):
            expert: Index = expert_P[pair]
            device: Index = device_P[pair]
            _keep(counts_DE[device, expert], device, owner_E[expert], node_D, sums)


@cython.inner
def _keep(tokens: Int, device: Index, owner: Index, node_D: ReadInts, sums: Ints2) -> cython.void:
    """Let a device with a replica keep its tokens, which the owner computed before."""
    sums[0, device] += tokens
    if node_D[device] == node_D[owner]:
        sums[1, device] -= tokens
        sums[2, owner] -= tokens
    else:
        sums[3, device] -= tokens
        sums[4, owner] -= tokens


def busiest_of_cases(
    counts_DE: ReadInts2,
    owner_E: ReadInts,
    node_D: ReadInts,
    num_nodes: Index,
    expert_P: ReadInts,
    device_P: ReadInts,
    ends: ReadInts,
    plain_sums: ReadInts2,
    sums: Ints2,
    counts_ED: Ints2,
    found: Ints2,
) -> None:
    """Find the most loaded device and the busiest links for several choices of replicas.

    Args:
        counts_DE: As in :func:`keep_replicas_tokens`.
        owner_E: Owners.
        node_D: Nodes.
        num_nodes: Number of nodes, N.
        expert_P: Experts of the replicas of all cases, one case after the other.
        device_P: Their devices.
        ends: Where the replicas of each case end, int64.
        plain_sums: The sums without replicas, int64 ``[5, D]``.
        sums: Work array for the sums of a case, int64 ``[5, D]``.
        counts_ED: Work array for the counts of replicated experts, int64 ``[E, D]``. The devices of an expert
            come in any order, and one row of counts is small enough for a cache.
        found: Gets the results of :func:`find_busiest` for each case, a row of five, int64.
    """
    num_devices: Index = node_D.shape[0]
    far_N: Ints = zero_ints(2 * num_nodes)
    is_known_E: Ints = zero_ints(owner_E.shape[0])
    with cython.nogil:
        pair: Index = 0
        for case in range(ends.shape[0]):
            for row in range(5):
                for device in range(num_devices):
                    sums[row, device] = plain_sums[row, device]
            while pair < ends[case]:
                expert: Index = expert_P[pair]
                if is_known_E[expert] == 0:
                    is_known_E[expert] = 1
                    for device in range(num_devices):
                        counts_ED[expert, device] = counts_DE[device, expert]
                holder: Index = device_P[pair]
                _keep(counts_ED[expert, holder], holder, owner_E[expert], node_D, sums)
                pair += 1
            _find_busiest(sums, node_D, far_N, case, found)


def find_busiest(sums: ReadInts2, node_D: ReadInts, num_nodes: Index, found: Ints2) -> None:
    """Find the most loaded device and the busiest links.

    Args:
        sums: The sums, int64 ``[5, D]``.
        node_D: Node of each device, int64 ``[D]``.
        num_nodes: Number of nodes, N.
        found: Gets a row of five numbers, int64 ``[1, 5]``: the tokens that the most loaded device computes;
            those between the busiest device and its node, between the busiest device and other nodes, and
            between the busiest node and others; and all tokens between nodes.
    """
    far_N: Ints = zero_ints(2 * num_nodes)
    with cython.nogil:
        _find_busiest(sums, node_D, far_N, 0, found)


@cython.inner
def _find_busiest(sums: ReadInts2, node_D: ReadInts, far_N: Ints, case: Index, found: Ints2) -> cython.void:
    """Write the results of :func:`find_busiest` into a row; ``far_N`` is a work array for ``2 N`` sums."""
    num_nodes = far_N.shape[0] // 2
    for i in range(2 * num_nodes):
        far_N[i] = 0
    most: Int = 0
    near: Int = 0
    far: Int = 0
    of_node: Int = 0
    between: Int = 0
    for device in range(node_D.shape[0]):
        most = max(most, sums[0, device] + sums[2, device] + sums[4, device])
        near = max(near, max(sums[1, device], sums[2, device]))
        far = max(far, max(sums[3, device], sums[4, device]))
        between += sums[3, device]
        far_N[node_D[device]] += sums[3, device]
        far_N[num_nodes + node_D[device]] += sums[4, device]
    for i in range(2 * num_nodes):
        of_node = max(of_node, far_N[i])
    found[case, 0] = most
    found[case, 1] = near
    found[case, 2] = far
    found[case, 3] = of_node
    found[case, 4] = between
