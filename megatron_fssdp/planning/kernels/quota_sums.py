"""Kernels of dispatch by quotas: fills quotas with tokens, checks them, and sums what devices send.

``kernels/parts/expert_quotas.py`` says how quotas are kept.

Shape letters: E experts, D devices, N nodes, P pairs of expert and device.
"""

from megatron_fssdp.planning.kernels.parts.expert_quotas import ExpertQuotas
from megatron_fssdp.planning.native import compiler_marks as cython
from megatron_fssdp.planning.native.kernel_types import Flag, Index, Ints, ReadInts, ReadInts2
from megatron_fssdp.planning.native.work_arrays import zero_ints


def are_fillable(
    counts_DE: ReadInts2,
    expert_P: ReadInts,
    device_P: ReadInts,
    own_P: ReadInts,
    near_P: ReadInts,
    far_P: ReadInts,
    node_D: ReadInts,
    by_node_D: ReadInts,
    first_N: ReadInts,
) -> Flag:
    """Whether no quota is negative and the quotas add up to the tokens that are there.

    Args:
        counts_DE: The arguments of all functions are those of :class:`ExpertQuotas`.
        expert_P: Experts.
        device_P: Devices.
        own_P: Quotas for own tokens.
        near_P: Near quotas.
        far_P: Far quotas.
        node_D: Nodes.
        by_node_D: Devices by node.
        first_N: First devices of nodes.
    """
    quotas = ExpertQuotas(counts_DE, expert_P, device_P, own_P, near_P, far_P, node_D, by_node_D, first_N)
    left_E: Ints = zero_ints(counts_DE.shape[1])
    with cython.nogil:
        is_fillable = _are_fillable(quotas, left_E)
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


def sum_near_tokens(
    counts_DE: ReadInts2,
    expert_P: ReadInts,
    device_P: ReadInts,
    own_P: ReadInts,
    near_P: ReadInts,
    far_P: ReadInts,
    node_D: ReadInts,
    by_node_D: ReadInts,
    first_N: ReadInts,
    near_out_D: Ints,
) -> None:
    """Count the tokens that every device sends to other devices of its node.

    Args:
        counts_DE: As in :func:`are_fillable`, and so are the arguments up to ``first_N``.
        expert_P: Experts.
        device_P: Devices.
        own_P: Quotas for own tokens.
        near_P: Near quotas.
        far_P: Far quotas.
        node_D: Nodes.
        by_node_D: Devices by node.
        first_N: First devices of nodes.
        near_out_D: Zeros; gets the tokens, int64 ``[D]``.
    """
    quotas = ExpertQuotas(counts_DE, expert_P, device_P, own_P, near_P, far_P, node_D, by_node_D, first_N)
    with cython.nogil:
        for expert in range(counts_DE.shape[1]):
            quotas.turn_to(expert)
            for pair in range(quotas.first, quotas.end):
                node: Index = node_D[device_P[pair]]
                for i in range(first_N[node], first_N[node + 1]):
                    if quotas.near_N[node] == 0:  # all near quotas of the node are filled
                        break
                    device: Index = by_node_D[i]
                    near = min(counts_DE[device, expert] - quotas.own_D[device], quotas.near_N[node])
                    quotas.near_N[node] -= near
                    near_out_D[device] += near


def fill_quotas(
    counts_DE: ReadInts2,
    expert_P: ReadInts,
    device_P: ReadInts,
    own_P: Ints,
    near_P: Ints,
    far_P: Ints,
    node_D: ReadInts,
    by_node_D: ReadInts,
    first_N: ReadInts,
) -> None:
    """Fill each device's quota with its own tokens first, then with those of its node, then with all others.

    Args:
        counts_DE: As in :func:`are_fillable`, and so are the arguments that are not described.
        expert_P: Experts.
        device_P: Devices.
        own_P: Tokens of its expert that each device computes; gets the device's own tokens among them.
        near_P: Zeros; gets the tokens of other devices of the node.
        far_P: Zeros; gets the tokens of other nodes.
        node_D: Nodes.
        by_node_D: Devices by node.
        first_N: First devices of nodes.
    """
    for pair in range(expert_P.shape[0]):
        own = min(own_P[pair], counts_DE[device_P[pair], expert_P[pair]])
        far_P[pair] = own_P[pair] - own
        own_P[pair] = own
    quotas = ExpertQuotas(counts_DE, expert_P, device_P, own_P, near_P, far_P, node_D, by_node_D, first_N)
    with cython.nogil:
        for expert in range(counts_DE.shape[1]):
            quotas.turn_to(expert)
            for pair in range(quotas.first, quotas.end):
                if far_P[pair] == 0:
                    continue
                node: Index = node_D[device_P[pair]]
                near = min(far_P[pair], quotas.leaving(node, node_D.shape[0]) - quotas.near_N[node])
                quotas.near_N[node] += near
                near_P[pair] = near
                far_P[pair] -= near
