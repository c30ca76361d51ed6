"""Even dispatch: which holder of an expert each source's tokens go to (Hecate, §4.4).

If the source has the expert, its tokens stay; else they are split evenly over the
expert's holders in the source's node; else evenly over all holders. A remainder of
``r`` tokens over ``n`` holders goes one each to the ``r`` holders from position
``(source + expert) mod n`` of the ascending holder list, cyclically. Every rank derives
its own row (what it sends) and column (what it receives) from the same counts; the
[D, E, D] tensor is never built.

Shape letters: T tokens, M model dim, F ffn dim, E experts, D devices, N nodes, L layers,
P (expert, holder) pairs.
"""

import numpy as np

from megatron_fssdp.planning.holder_groups import HolderGroups, holder_groups
from megatron_fssdp.planning.placement import ExpertPlacement
from megatron_fssdp.planning.topology import Topology


def dispatch_from_source(
    counts_DE: np.ndarray, placement: ExpertPlacement, topology: Topology, source: int
) -> np.ndarray:
    """What one source sends: int64 [E, D], row ``e`` sums to ``counts_DE[source, e]``.

    Args:
        counts_DE: (token, k) pairs by source and expert, integers [D, E].
        placement: Where the experts are.
        topology: Nodes of the devices.
        source: The sending device.
    """
    groups = _groups(counts_DE, placement, topology)
    row = groups.row(source)
    counts_E = counts_DE[source]
    share_E = counts_E // row.num_chosen_E
    rest_E = counts_E - share_E * row.num_chosen_E
    dispatch_ED = np.zeros((placement.num_experts, placement.num_devices), dtype=np.int64)
    dispatch_ED.reshape(-1)[row.flat_P] = share_E[row.expert_P] + (row.turn_P < rest_E[row.expert_P])
    return dispatch_ED


def dispatch_to_device(
    counts_DE: np.ndarray, placement: ExpertPlacement, topology: Topology, device: int
) -> np.ndarray:
    """What one device receives: int64 [D, E], by source and expert.

    Equals ``[dispatch_from_source(..., s)[:, device] for s in devices]``.

    Args:
        counts_DE: (token, k) pairs by source and expert, integers [D, E].
        placement: Where the experts are.
        topology: Nodes of the devices.
        device: The receiving device.
    """
    groups = _groups(counts_DE, placement, topology)
    column = groups.column(device)
    counts_P = counts_DE[column.source_P, column.expert_P]
    share_P = counts_P // column.num_chosen_P
    rest_P = counts_P - share_P * column.num_chosen_P
    dispatch_DE = np.zeros((placement.num_devices, placement.num_experts), dtype=np.int64)
    dispatch_DE.reshape(-1)[column.flat_P] = share_P + (column.turn_P < rest_P)
    return dispatch_DE


def device_tokens_D(counts_DE: np.ndarray, placement: ExpertPlacement, topology: Topology) -> np.ndarray:
    """Tokens every device computes under even dispatch, exactly: int64 [D]."""
    groups = _groups(counts_DE, placement, topology)
    expert_P, device_P = groups.expert_P, groups.device_P
    local_P = counts_DE[device_P, expert_P].astype(np.int64)
    moving_DE = np.array(counts_DE, dtype=np.int64)
    moving_DE[device_P, expert_P] = 0

    node_D = topology.node_of_device_D
    in_node_DE = (groups.holders_EN > 0).T[node_D]
    num_chosen_DE = np.where(in_node_DE, groups.holders_EN.T[node_D], groups.num_holders_E)
    share_DE = moving_DE // num_chosen_DE
    rest_DE = moving_DE - share_DE * num_chosen_DE
    share_NE = topology.sum_over_nodes(np.where(in_node_DE, share_DE, 0))
    share_E = np.where(in_node_DE, 0, share_DE).sum(axis=0)
    tokens_P = local_P + share_NE[node_D[device_P], expert_P] + share_E[expert_P]

    # Deal the remainders: a range of holder positions per (source, expert), counted as the running
    # sum of +1 where a range opens and -1 where it closes.
    source_R, expert_R = np.nonzero(rest_DE)
    rest_R, size_R = rest_DE[source_R, expert_R], num_chosen_DE[source_R, expert_R]
    start_R = (source_R + expert_R) % size_R
    in_node_R = in_node_DE[source_R, expert_R]
    num_pairs = expert_P.size
    for chosen, first_R, order_P in (
        (in_node_R, groups.node_first_EN[expert_R, node_D[source_R]], groups.by_node_P),
        (~in_node_R, groups.first_E[expert_R], None),
    ):
        first, start, stop = first_R[chosen], start_R[chosen], (start_R + rest_R)[chosen]
        size = size_R[chosen]
        wraps = stop > size
        opens = np.concatenate([first + start, first[wraps]])
        closes = np.concatenate([first + np.minimum(stop, size), (first + stop - size)[wraps]])
        steps = np.bincount(opens, minlength=num_pairs + 1) - np.bincount(closes, minlength=num_pairs + 1)
        dealt_P = np.cumsum(steps)[:num_pairs]
        if order_P is None:
            tokens_P += dealt_P
        else:
            tokens_P[order_P] += dealt_P
    tokens_D = np.zeros(placement.num_devices, dtype=np.int64)
    np.add.at(tokens_D, device_P, tokens_P)
    return tokens_D


def cross_node_tokens(counts_DE: np.ndarray, placement: ExpertPlacement, topology: Topology) -> int:
    """Number of (token, k) pairs sent to another node.

    A source's tokens for an expert cross nodes all together or not at all: they do when no
    device of its node holds the expert.
    """
    groups = _groups(counts_DE, placement, topology)
    absent_DE = (groups.holders_EN == 0).T[topology.node_of_device_D]
    return int(np.asarray(counts_DE)[absent_DE].sum())


def expected_device_load_D(load_DE: np.ndarray, placement: ExpertPlacement, topology: Topology) -> np.ndarray:
    """Load of every device under even dispatch, without rounding: float64 [D].

    A holder of an expert computes its own tokens, an even share of the tokens of its
    node's devices without the expert, and an even share of the tokens of nodes without it.

    Args:
        load_DE: Load by source and expert, [D, E]; need not be whole numbers.
        placement: Where the experts are.
        topology: Nodes of the devices.
    """
    groups = _groups(load_DE, placement, topology)
    load = np.ascontiguousarray(load_DE, dtype=np.float64)
    expert_P, device_P, group_P = groups.expert_P, groups.device_P, groups.group_P
    num_experts, num_nodes = groups.holders_EN.shape
    load_EN = np.ascontiguousarray(topology.sum_over_nodes(load).T)
    own_P = load[device_P, expert_P]
    own_EN = np.bincount(group_P, weights=own_P, minlength=num_experts * num_nodes)
    far_E = np.where(groups.holders_EN == 0, load_EN, 0.0).sum(axis=1)
    near_P = (load_EN.reshape(-1)[group_P] - own_EN[group_P]) / groups.holders_EN.reshape(-1)[group_P]
    share_P = own_P + near_P + (far_E / groups.num_holders_E)[expert_P]
    return np.bincount(device_P, weights=share_P, minlength=placement.num_devices)


def _groups(values_DE: np.ndarray, placement: ExpertPlacement, topology: Topology) -> HolderGroups:
    """The placement's holder groups, after checking that the three arguments fit together."""
    if values_DE.shape != (placement.num_devices, placement.num_experts):
        raise ValueError(
            f"the loads have shape {values_DE.shape}: wanted ({placement.num_devices}, "
            f"{placement.num_experts}), by source device and expert, as the placement has them"
        )
    return holder_groups(placement, topology)
