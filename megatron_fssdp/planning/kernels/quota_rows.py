"""Kernels of dispatch by quotas: one rank's row and column of the dispatch.

``kernels/parts/expert_quotas.py`` says how quotas are kept, and what the arguments up to ``first_N`` are.

Shape letters: E experts, D devices, N nodes, G experts present on a device, P pairs of expert and device.
"""

from megatron_fssdp.planning.kernels.parts.expert_quotas import ExpertQuotas
from megatron_fssdp.planning.native import compiler_marks as cython
from megatron_fssdp.planning.native.kernel_types import Index, Int, Ints, Ints2, ReadInts, ReadInts2
from megatron_fssdp.planning.native.work_arrays import zero_ints


def quota_row(
    counts_DE: ReadInts2,
    quotas: ReadInts,
    node_D: ReadInts,
    by_node_D: ReadInts,
    first_N: ReadInts,
    source: Index,
    sent_expert_P: Ints,
    sent_device_P: Ints,
    sent_tokens_P: Ints,
    order_P: Ints,
    send_D: Ints,
) -> Index:
    """The tokens that one source sends.

    Args:
        counts_DE: Counts.
        quotas: Quotas of all pairs.
        node_D: Nodes.
        by_node_D: Devices by node.
        first_N: First devices of nodes.
        source: Number of the source.
        sent_expert_P: Gets the expert of each chunk, ascending, int64 with room for P chunks.
        sent_device_P: Gets the device of each chunk, ascending for each expert.
        sent_tokens_P: Gets the tokens of each chunk, 1 or more.
        order_P: Gets the positions of the chunks, sorted by device, then expert.
        send_D: Zeros; gets the tokens of each device, int64 ``[D]``.

    Returns:
        Number of chunks.
    """
    of_expert = ExpertQuotas(counts_DE, quotas, node_D, by_node_D, first_N)
    before_E: Ints = zero_ints(counts_DE.shape[1])
    next_D: Ints = zero_ints(node_D.shape[0] + 1)
    with cython.nogil:
        for device in range(source):
            for expert in range(counts_DE.shape[1]):
                before_E[expert] += counts_DE[device, expert]
        num_chunks = _find_chunks(
            of_expert, source, before_E, sent_expert_P, sent_device_P, sent_tokens_P, next_D, send_D
        )
        for device in range(node_D.shape[0]):
            next_D[device + 1] += next_D[device]
        for chunk in range(num_chunks):
            place: Index = next_D[sent_device_P[chunk]]
            next_D[sent_device_P[chunk]] += 1
            order_P[place] = chunk
    return num_chunks


@cython.inner
def _find_chunks(
    quotas: ExpertQuotas,
    source: Index,
    before_E: ReadInts,
    sent_expert_P: Ints,
    sent_device_P: Ints,
    sent_tokens_P: Ints,
    next_D: Ints,
    send_D: Ints,
) -> Index:
    """Find the chunks of :func:`quota_row`, and count those of each device in ``next_D[device + 1]``."""
    num_chunks: Index = 0
    home: Index = quotas.node_D[source]
    for expert in range(before_E.shape[0]):
        if quotas.counts_DE[source, expert] == 0:
            continue
        quotas.turn_to(expert)
        # Where this source's tokens begin on both lines, and how many there are.
        near_at: Int = 0
        near_left: Int = 0
        far_at: Int = 0
        far_left: Int = quotas.counts_DE[source, expert] - quotas.own_D[source]
        if far_left > 0 and quotas.near_N[home] > 0:
            before: Int = quotas.leaving(home, source)
            near_at = min(before, quotas.near_N[home])
            near_left = min(before + far_left, quotas.near_N[home]) - near_at
            far_left -= near_left
        if far_left > 0:
            far_at = quotas.far_tokens_before(source, before_E[expert])
        # Quotas before this source's tokens are passed, then the tokens are handed out.
        for pair in range(quotas.first, quotas.end):
            device: Index = quotas.device_P[pair]
            tokens: Int = quotas.own_P[pair] if device == source else 0
            if near_left > 0 and quotas.node_D[device] == home:
                passed: Int = min(quotas.near_P[pair], near_at)
                near_at -= passed
                near: Int = min(quotas.near_P[pair] - passed, near_left)
                near_left -= near
                tokens += near
            if far_left > 0:
                passed = min(quotas.far_P[pair], far_at)
                far_at -= passed
                far: Int = min(quotas.far_P[pair] - passed, far_left)
                far_left -= far
                tokens += far
            if tokens > 0:
                sent_expert_P[num_chunks] = expert
                sent_device_P[num_chunks] = device
                sent_tokens_P[num_chunks] = tokens
                send_D[device] += tokens
                next_D[device + 1] += 1
                num_chunks += 1
    return num_chunks


def quota_column(
    counts_DE: ReadInts2,
    quotas: ReadInts,
    node_D: ReadInts,
    by_node_D: ReadInts,
    first_N: ReadInts,
    device: Index,
    expert_G: ReadInts,
    received_DG: Ints2,
) -> None:
    """The tokens that one device receives.

    Args:
        counts_DE: Counts.
        quotas: Quotas of all pairs.
        node_D: Nodes.
        by_node_D: Devices by node.
        first_N: First devices of nodes.
        device: Number of the device.
        expert_G: Experts whose tokens are wanted, ascending, int64 ``[G]``.
        received_DG: Gets the tokens by source and these experts, int64 ``[D, G]``.
    """
    of_expert = ExpertQuotas(counts_DE, quotas, node_D, by_node_D, first_N)
    home: Index = node_D[device]
    with cython.nogil:
        for place in range(expert_G.shape[0]):
            expert: Index = expert_G[place]
            of_expert.turn_to(expert)
            near_at: Int = 0
            near_left: Int = 0
            far_at: Int = 0
            far_left: Int = 0
            for pair in range(of_expert.first, of_expert.end):
                if of_expert.device_P[pair] == device:
                    near_left = of_expert.near_P[pair]
                    far_left = of_expert.far_P[pair]
                    break
                far_at += of_expert.far_P[pair]
                if node_D[of_expert.device_P[pair]] == home:
                    near_at += of_expert.near_P[pair]
            for source in range(node_D.shape[0]):
                # Here near_N has the near quotas that the sources before have not filled.
                node: Index = node_D[source]
                far: Int = counts_DE[source, expert] - of_expert.own_D[source]
                near: Int = min(far, of_expert.near_N[node])
                of_expert.near_N[node] -= near
                far -= near
                tokens: Int = of_expert.own_D[device] if source == device else 0
                if node == home:
                    passed: Int = min(near, near_at)
                    near_at -= passed
                    near = min(near - passed, near_left)
                    near_left -= near
                    tokens += near
                passed = min(far, far_at)
                far_at -= passed
                far = min(far - passed, far_left)
                far_left -= far
                received_DG[source, place] = tokens + far
