"""Kernels of dispatch by quotas: fills quotas with tokens, checks them, and sums what devices send.

``kernels/parts/expert_quotas.py`` says how quotas are kept, and what the arguments of all functions are.

Shape letters: E experts, D devices, N nodes, P pairs of expert and device.
"""

from megatron_fssdp.planning.kernels.parts.expert_quotas import ExpertQuotas
from megatron_fssdp.planning.native import compiler_marks as cython
from megatron_fssdp.planning.native.kernel_types import Flag, Index, Int, Ints, Ints2, ReadInts, ReadInts2
from megatron_fssdp.planning.native.work_arrays import zero_ints


def are_fillable(
    counts_DE: ReadInts2, quotas: ReadInts, node_D: ReadInts, by_node_D: ReadInts, first_N: ReadInts
) -> Flag:
    """Whether no quota is negative and the quotas add up to the tokens that are there.

    Args:
        counts_DE: Counts.
        quotas: Quotas of all pairs.
        node_D: Nodes.
        by_node_D: Devices by node.
        first_N: First devices of nodes.
    """
    of_expert = ExpertQuotas(counts_DE, quotas, node_D, by_node_D, first_N)
    left_E: Ints = zero_ints(counts_DE.shape[1])
    with cython.nogil:
        is_fillable = _are_fillable(of_expert, left_E)
    return is_fillable


@cython.inner
def _are_fillable(quotas: ExpertQuotas, left_E: Ints) -> Flag:
    num_devices: Index = quotas.node_D.shape[0]
    for device in range(num_devices):
        for expert in range(left_E.shape[0]):
            left_E[expert] += quotas.counts_DE[device, expert]
    for expert in range(left_E.shape[0]):
        quotas.turn_to(expert)
        for pair in range(quotas.first, quotas.end):
            own, near, far = quotas.own_P[pair], quotas.near_P[pair], quotas.far_P[pair]
            holder: Index = quotas.device_P[pair]
            if own < 0 or near < 0 or far < 0 or own > quotas.counts_DE[holder, expert]:
                return False
            left_E[expert] -= own + near + far
        for pair in range(quotas.first, quotas.end):
            node: Index = quotas.node_D[quotas.device_P[pair]]
            if quotas.near_N[node] == 0 and quotas.far_N[node] == 0:
                continue
            left = quotas.leaving(node, num_devices) - quotas.near_N[node]
            if left < 0 or (left > 0 and quotas.far_N[node] > 0):
                return False
        if left_E[expert] != 0:
            return False
    return True


def sum_quota_tokens(
    counts_DE: ReadInts2,
    quotas: ReadInts,
    node_D: ReadInts,
    by_node_D: ReadInts,
    first_N: ReadInts,
    sums: Ints2,
) -> None:
    """Sum the tokens that every device keeps, sends and receives.

    Args:
        counts_DE: Counts.
        quotas: Quotas of all pairs.
        node_D: Nodes.
        by_node_D: Devices by node.
        first_N: First devices of nodes.
        sums: Zeros; gets the sums, int64 ``[5, D]``, see ``kernels/traffic_sums.py``.
    """
    of_expert = ExpertQuotas(counts_DE, quotas, node_D, by_node_D, first_N)
    with cython.nogil:
        for device in range(node_D.shape[0]):
            tokens: Int = 0
            for expert in range(counts_DE.shape[1]):
                tokens += counts_DE[device, expert]
            sums[3, device] = tokens
        for expert in range(counts_DE.shape[1]):
            of_expert.turn_to(expert)
            for pair in range(of_expert.first, of_expert.end):
                holder: Index = of_expert.device_P[pair]
                sums[0, holder] += of_expert.own_P[pair]
                sums[2, holder] += of_expert.near_P[pair]
                sums[4, holder] += of_expert.far_P[pair]
                sums[3, holder] -= of_expert.own_P[pair]
                node: Index = node_D[holder]
                for i in range(first_N[node], first_N[node + 1]):
                    if of_expert.near_N[node] == 0:  # all near quotas of the node are filled
                        break
                    source: Index = by_node_D[i]
                    near = min(counts_DE[source, expert] - of_expert.own_D[source], of_expert.near_N[node])
                    of_expert.near_N[node] -= near
                    sums[1, source] += near
                    sums[3, source] -= near


def fill_quotas(
    counts_DE: ReadInts2, quotas: Ints, node_D: ReadInts, by_node_D: ReadInts, first_N: ReadInts
) -> None:
    """Fill each device's quota with its own tokens first, then with those of its node, then with all others.

    Args:
        counts_DE: Counts.
        quotas: Quotas of all pairs. Own quotas are all tokens of the expert that the device computes, near
            and far quotas are zeros; changed in place.
        node_D: Nodes.
        by_node_D: Devices by node.
        first_N: First devices of nodes.
    """
    size: Index = quotas.shape[0] // 5
    own_P: Ints = quotas[2 * size : 3 * size]
    near_P: Ints = quotas[3 * size : 4 * size]
    far_P: Ints = quotas[4 * size :]
    of_expert = ExpertQuotas(counts_DE, quotas, node_D, by_node_D, first_N)
    with cython.nogil:
        for pair in range(size):
            holder: Index = of_expert.device_P[pair]
            expert: Index = of_expert.expert_P[pair]
            own = min(own_P[pair], counts_DE[holder, expert])
            far_P[pair] = own_P[pair] - own
            own_P[pair] = own
        for expert in range(counts_DE.shape[1]):
            of_expert.turn_to(expert)
            for pair in range(of_expert.first, of_expert.end):
                if far_P[pair] == 0:
                    continue
                node: Index = node_D[of_expert.device_P[pair]]
                left = of_expert.leaving(node, node_D.shape[0]) - of_expert.near_N[node]
                near = min(far_P[pair], left)
                of_expert.near_N[node] += near
                near_P[pair] = near
                far_P[pair] -= near
