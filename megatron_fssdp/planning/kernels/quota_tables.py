"""Kernels of dispatch by quotas: checks, sums, and one rank's row and column of the dispatch.

``planning/dispatch/quota_dispatch.py`` says how tokens and quotas are matched along lines. Of the tokens that
the devices of a node send away for an expert, the first ones stay in the node, up to the sum of the node's
near quotas. Near tokens and near quotas lie along one line in each node, far ones along one line of all
devices.

Shape letters: E experts, D devices, N nodes, G experts present on a device, P pairs of expert and device.
"""

from megatron_fssdp.planning.native.kernel_types import Flag, Index, Int, Ints, Ints2, ReadInts, ReadInts2
from megatron_fssdp.planning.native.work_arrays import zero_ints


def sum_quotas(
    counts_DE: ReadInts2,
    own_DE: ReadInts2,
    near_DE: ReadInts2,
    far_DE: ReadInts2,
    node_D: ReadInts,
    near_NE: Ints2,
    left_NE: Ints2,
    far_NE: Ints2,
    near_out_D: Ints,
) -> Flag:
    """Check quotas, and sum them over nodes.

    Args:
        counts_DE: (token, k) pairs by source device and expert, int64 ``[D, E]``.
        own_DE: Quotas for own tokens, int64 ``[D, E]``.
        near_DE: Quotas for tokens of other devices in the same node, int64 ``[D, E]``.
        far_DE: Quotas for tokens of other nodes, int64 ``[D, E]``.
        node_D: Node of each device, int64 ``[D]``.
        near_NE: Zeros; gets the near quotas of each node, int64 ``[N, E]``.
        left_NE: Zeros; gets the tokens of each node that go to other nodes, int64 ``[N, E]``.
        far_NE: Zeros; gets the far quotas of each node, int64 ``[N, E]``.
        near_out_D: Gets the tokens that each device sends to other devices of its node, int64 ``[D]``.

    Returns:
        Whether no quota is negative and the quotas add up to the tokens that are there. Otherwise the sums
        have no meaning.
    """
    num_experts: Index = counts_DE.shape[1]
    for device in range(node_D.shape[0]):
        node: Index = node_D[device]
        for expert in range(num_experts):
            if own_DE[device, expert] < 0 or near_DE[device, expert] < 0 or far_DE[device, expert] < 0:
                return False
            if own_DE[device, expert] > counts_DE[device, expert]:
                return False
            near_NE[node, expert] += near_DE[device, expert]
            far_NE[node, expert] += far_DE[device, expert]
    near_left_NE: Ints = zero_ints(near_NE.shape[0] * num_experts)
    for node in range(near_NE.shape[0]):
        for expert in range(num_experts):
            near_left_NE[node * num_experts + expert] = near_NE[node, expert]
    for device in range(node_D.shape[0]):
        node = node_D[device]
        near_out: Int = 0
        for expert in range(num_experts):
            leaving = counts_DE[device, expert] - own_DE[device, expert]
            near = min(leaving, near_left_NE[node * num_experts + expert])
            near_left_NE[node * num_experts + expert] -= near
            left_NE[node, expert] += leaving - near
            near_out += near
        near_out_D[device] = near_out
    for expert in range(num_experts):
        difference: Int = 0
        for node in range(near_NE.shape[0]):
            if near_left_NE[node * num_experts + expert] > 0:  # more near quotas than tokens
                return False
            if left_NE[node, expert] > 0 and far_NE[node, expert] > 0:
                return False
            difference += left_NE[node, expert] - far_NE[node, expert]
        if difference != 0:
            return False
    return True


def quota_row(
    counts_DE: ReadInts2,
    own_DE: ReadInts2,
    near_DE: ReadInts2,
    far_DE: ReadInts2,
    node_D: ReadInts,
    near_NE: ReadInts2,
    source: Index,
    found: Ints2,
    expert_P: Ints,
    device_P: Ints,
    tokens_P: Ints,
    order_P: Ints,
    send_D: Ints,
) -> Index:
    """The tokens that one source sends.

    Args:
        counts_DE: As in :func:`sum_quotas`, and so are the other quotas, ``node_D`` and ``near_NE``.
        own_DE: Quotas for own tokens.
        near_DE: Near quotas.
        far_DE: Far quotas.
        node_D: Nodes.
        near_NE: Near quotas of each node.
        source: Number of the source.
        found: Work array, int64, three columns and ``D * E`` rows.
        expert_P: Gets the expert of each chunk, ascending, int64 ``[P]`` with room for ``D * E`` chunks.
        device_P: Gets the device of each chunk, ascending for each expert.
        tokens_P: Gets the tokens of each chunk, 1 or more.
        order_P: Gets the positions of the chunks, sorted by device, then expert.
        send_D: Zeros; gets the tokens of each device, int64 ``[D]``.

    Returns:
        Number of chunks.
    """
    num_experts: Index = counts_DE.shape[1]
    own_node: Index = node_D[source]
    # Where this source's tokens begin on both lines, and how many there are.
    near_at_E: Ints = zero_ints(num_experts)
    far_at_E: Ints = zero_ints(num_experts)
    near_left_E: Ints = zero_ints(num_experts)
    far_left_E: Ints = zero_ints(num_experts)
    near_left_NE: Ints = zero_ints(near_NE.shape[0] * num_experts)
    for node in range(near_NE.shape[0]):
        for expert in range(num_experts):
            near_left_NE[node * num_experts + expert] = near_NE[node, expert]
    for device in range(source + 1):
        first = node_D[device] * num_experts
        for expert in range(num_experts):
            leaving = counts_DE[device, expert] - own_DE[device, expert]
            near = min(leaving, near_left_NE[first + expert])
            near_left_NE[first + expert] -= near
            if device == source:
                near_left_E[expert] = near
                far_left_E[expert] = leaving - near
            else:
                far_at_E[expert] += leaving - near
                if node_D[device] == own_node:
                    near_at_E[expert] += near
    # Chunks are found by device, then expert: quotas before this source's tokens are passed, then the tokens
    # are handed out.
    num_chunks: Index = 0
    next_E: Ints = zero_ints(num_experts + 1)
    for device in range(node_D.shape[0]):
        for expert in range(num_experts):
            tokens = own_DE[source, expert] if device == source else 0
            if near_left_E[expert] > 0 and near_DE[device, expert] > 0 and node_D[device] == own_node:
                skipped = min(near_DE[device, expert], near_at_E[expert])
                near_at_E[expert] -= skipped
                near = min(near_DE[device, expert] - skipped, near_left_E[expert])
                near_left_E[expert] -= near
                tokens += near
            if far_DE[device, expert] > 0 and far_left_E[expert] > 0:
                skipped = min(far_DE[device, expert], far_at_E[expert])
                far_at_E[expert] -= skipped
                far = min(far_DE[device, expert] - skipped, far_left_E[expert])
                far_left_E[expert] -= far
                tokens += far
            if tokens > 0:
                found[num_chunks, 0] = expert
                found[num_chunks, 1] = device
                found[num_chunks, 2] = tokens
                send_D[device] += tokens
                next_E[expert + 1] += 1
                num_chunks += 1
    for expert in range(num_experts):
        next_E[expert + 1] += next_E[expert]
    for chunk in range(num_chunks):
        place: Index = next_E[found[chunk, 0]]
        next_E[found[chunk, 0]] += 1
        expert_P[place] = found[chunk, 0]
        device_P[place] = found[chunk, 1]
        tokens_P[place] = found[chunk, 2]
        order_P[chunk] = place
    return num_chunks


def quota_column(
    counts_DE: ReadInts2,
    own_DE: ReadInts2,
    near_DE: ReadInts2,
    far_DE: ReadInts2,
    node_D: ReadInts,
    near_NE: ReadInts2,
    device: Index,
    expert_G: ReadInts,
    received_DG: Ints2,
) -> None:
    """The tokens that one device receives.

    Args:
        counts_DE: As in :func:`sum_quotas`, and so are the other quotas, ``node_D`` and ``near_NE``.
        own_DE: Quotas for own tokens.
        near_DE: Near quotas.
        far_DE: Far quotas.
        node_D: Nodes.
        near_NE: Near quotas of each node.
        device: Number of the device.
        expert_G: Experts whose tokens are wanted, int64 ``[G]``.
        received_DG: Gets the tokens by source and these experts, int64 ``[D, G]``.
    """
    own_node: Index = node_D[device]
    near_left_N: Ints = zero_ints(near_NE.shape[0])
    for place in range(expert_G.shape[0]):
        expert: Index = expert_G[place]
        for node in range(near_NE.shape[0]):
            near_left_N[node] = near_NE[node, expert]
        near_at: Int = 0
        far_at: Int = 0
        for before in range(device):
            if node_D[before] == own_node:
                near_at += near_DE[before, expert]
            far_at += far_DE[before, expert]
        near_left = near_DE[device, expert]
        far_left = far_DE[device, expert]
        for source in range(node_D.shape[0]):
            leaving = counts_DE[source, expert] - own_DE[source, expert]
            near = min(leaving, near_left_N[node_D[source]])
            near_left_N[node_D[source]] -= near
            far = leaving - near
            tokens = own_DE[source, expert] if source == device else 0
            if node_D[source] == own_node:
                skipped = min(near, near_at)
                near_at -= skipped
                near = min(near - skipped, near_left)
                near_left -= near
                tokens += near
            skipped = min(far, far_at)
            far_at -= skipped
            far = min(far - skipped, far_left)
            far_left -= far
            received_DG[source, place] = tokens + far


def fill_quotas(
    tokens_ED: ReadInts2,
    counts_DE: ReadInts2,
    node_D: ReadInts,
    num_nodes: Index,
    own_DE: Ints2,
    near_DE: Ints2,
    far_DE: Ints2,
) -> None:
    """Fill each device's quota with its own tokens first, then with those of its node, then with all others.

    Args:
        tokens_ED: Tokens of each expert that each device computes, int64 ``[E, D]``.
        counts_DE: (token, k) pairs by source device and expert, int64 ``[D, E]``.
        node_D: Node of each device, int64 ``[D]``.
        num_nodes: Number of nodes, N.
        own_DE: Gets the own tokens of each quota, int64 ``[D, E]``.
        near_DE: Gets the tokens of each quota from other devices of the node, int64 ``[D, E]``.
        far_DE: Gets the tokens of each quota from other nodes, int64 ``[D, E]``.
    """
    num_experts: Index = counts_DE.shape[1]
    leaving_NE: Ints = zero_ints(num_nodes * num_experts)
    for device in range(node_D.shape[0]):
        first = node_D[device] * num_experts
        for expert in range(num_experts):
            own_DE[device, expert] = min(counts_DE[device, expert], tokens_ED[expert, device])
            leaving_NE[first + expert] += counts_DE[device, expert] - own_DE[device, expert]
    for device in range(node_D.shape[0]):
        first = node_D[device] * num_experts
        for expert in range(num_experts):
            wanted = tokens_ED[expert, device] - own_DE[device, expert]
            near = min(wanted, leaving_NE[first + expert])
            leaving_NE[first + expert] -= near
            near_DE[device, expert] = near
            far_DE[device, expert] = wanted - near
