"""Kernel of dispatch by quotas: what one source sends.

``kernels/parts/expert_quotas.py`` says how quotas are kept, and what the arguments up to ``first_N`` are.

Shape letters: E experts, D devices, N nodes, P pairs of expert and device.
"""

from megatron_fssdp.planning.kernels.parts.expert_quotas import ExpertQuotas
from megatron_fssdp.planning.native import compiler_marks as cython
from megatron_fssdp.planning.native.kernel_types import Index, Int, Ints, ReadInts, ReadInts2
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

    Returns:
        Number of chunks.
    """
    of_expert = ExpertQuotas(counts_DE, quotas, node_D, by_node_D, first_N)
    before_E: Ints = zero_ints(counts_DE.shape[1])
    with cython.nogil:
        for device in range(source):
            for expert in range(counts_DE.shape[1]):
                before_E[expert] += counts_DE[device, expert]
        num_chunks = _find_chunks(of_expert, source, before_E, sent_expert_P, sent_device_P, sent_tokens_P)
    return num_chunks


@cython.inner
def _find_chunks(
    quotas: ExpertQuotas,
    source: Index,
    before_E: ReadInts,
    sent_expert_P: Ints,
    sent_device_P: Ints,
    sent_tokens_P: Ints,
) -> Index:
    """Find the chunks of :func:`quota_row`."""
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
                num_chunks += 1
    return num_chunks
