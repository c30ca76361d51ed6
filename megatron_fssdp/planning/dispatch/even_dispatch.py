"""Even dispatch: to which holders of an expert each source's tokens go (Hecate, §4.4).

If the source has the expert, its tokens stay there. Otherwise they are split evenly over the expert's holders
in the source's node. If there is no such holder, they are split evenly over all holders. When ``n`` holders
share the tokens, a remainder of ``r`` tokens goes to ``r`` holders, one token to each. The first of them is
at position ``(source + expert) mod n`` of the ascending list of holders, and the list is taken as a ring.
Every rank derives its own row (what it sends) and its own column (what it receives) from the same counts. The
full table of shape ``[D, E, D]`` is never built.

Shape letters: E experts, D devices, N nodes, P pairs of expert and device, H selected experts of a layer, U
positions among an expert's holders, Z pairs of source and expert.
"""

from dataclasses import dataclass

import numpy as np

from megatron_fssdp.planning.placement.holder_groups import HolderGroups, holder_groups
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology

MOST_CELLS_AT_ONCE = 1 << 12
"""Number of cells (sources times experts) up to which :func:`even_pair_tokens` handles all cells at once."""


@dataclass(frozen=True, eq=False)
class EvenDispatch:
    """A dispatch that sends tokens in equal parts to the nearest holders of their experts (Hecate §4.4).

    Attributes:
        counts_DE: (token, k) pairs by source device and expert, integers ``[D, E]``.
        placement: Owners and replicas of the experts.
        topology: Nodes of the devices.
    """

    counts_DE: np.ndarray
    placement: ExpertPlacement
    topology: Topology

    def from_source(self, source: int) -> np.ndarray:
        """Tokens that one source sends, by expert and receiving device: int64 ``[E, D]``.

        Row ``e`` sums to ``counts_DE[source, e]``.
        """
        row = self._groups().row(source)
        counts_E = self.counts_DE[source]
        share_E = counts_E // row.num_chosen_E
        rest_E = counts_E - share_E * row.num_chosen_E
        dispatch_ED = np.zeros((self.placement.num_experts, self.placement.num_devices), dtype=np.int64)
        dispatch_ED.reshape(-1)[row.flat_P] = share_E[row.expert_P] + (row.turn_P < rest_E[row.expert_P])
        return dispatch_ED

    def to_device(self, device: int) -> np.ndarray:
        """Tokens that one device receives, by source and expert: int64 ``[D, E]``.

        The result equals ``[from_source(s)[:, device] for s in devices]``.
        """
        column = self._groups().column(device)
        counts_P = self.counts_DE[column.source_P, column.expert_P]
        share_P = counts_P // column.num_chosen_P
        rest_P = counts_P - share_P * column.num_chosen_P
        dispatch_DE = np.zeros((self.placement.num_devices, self.placement.num_experts), dtype=np.int64)
        dispatch_DE.reshape(-1)[column.flat_P] = share_P + (column.turn_P < rest_P)
        return dispatch_DE

    def device_tokens_D(self) -> np.ndarray:
        """Exact number of (token, k) pairs that every device computes: int64 ``[D]``."""
        pairs = even_pair_tokens(self.counts_DE, self.placement, self.topology)
        tokens_D = np.zeros(self.placement.num_devices, dtype=np.int64)
        np.add.at(tokens_D, self._groups().device_P, pairs.own_P + pairs.near_P + pairs.far_P)
        return tokens_D

    def cross_node_tokens(self) -> int:
        """Number of (token, k) pairs that are sent to another node.

        If no device of a source's node holds an expert, all the source's tokens for it go to other nodes.
        Otherwise none of them do.
        """
        absent_DE = (self._groups().holders_EN == 0).T[self.topology.node_of_device_D]
        return int(np.asarray(self.counts_DE)[absent_DE].sum())

    def _groups(self) -> HolderGroups:
        return _groups(self.counts_DE, self.placement, self.topology)


@dataclass(frozen=True, eq=False)
class PairTokens:
    """Tokens that each holder computes of each of its experts under even dispatch, by where they come from.

    Attributes:
        own_P: Tokens of the holder itself, ``[P]``.
        near_P: Tokens of other devices of its node, ``[P]``.
        far_P: Tokens of other nodes, ``[P]``.
    """

    own_P: np.ndarray
    near_P: np.ndarray
    far_P: np.ndarray


def even_pair_tokens(counts_DE: np.ndarray, placement: ExpertPlacement, topology: Topology) -> PairTokens:
    """Exact number of tokens that each holder computes of each of its experts under even dispatch.

    The (expert, holder) pairs are ordered by expert, then device.

    Args:
        counts_DE: (token, k) pairs by source device and expert, integers ``[D, E]``.
        placement: Owners and replicas of the experts.
        topology: Nodes of the devices.

    Returns:
        int64 ``[P]`` each.
    """
    groups = _groups(counts_DE, placement, topology)
    expert_P, device_P = groups.expert_P, groups.device_P
    own_P = counts_DE[device_P, expert_P].astype(np.int64)
    moving_DE = np.array(counts_DE, dtype=np.int64)
    moving_DE[device_P, expert_P] = 0
    none_P = np.zeros_like(own_P)
    if topology.num_nodes == 1:
        return PairTokens(own_P, _over_all_holders_P(moving_DE, groups), none_P)
    near_P = _take_near_tokens_P(moving_DE, groups, topology)
    return PairTokens(own_P, near_P, _over_all_holders_P(moving_DE, groups))


def _over_all_holders_P(moving_DE: np.ndarray, groups: HolderGroups) -> np.ndarray:
    """Split all tokens evenly over all holders of their experts: tokens of every pair, int64 ``[P]``."""
    if moving_DE.size > MOST_CELLS_AT_ONCE:
        return _split_by_size(moving_DE, groups)
    source_Z, expert_Z = np.nonzero(moving_DE)
    size_Z, first_Z = groups.num_holders_E[expert_Z], groups.first_E[expert_Z]
    return _split_cells(
        moving_DE[source_Z, expert_Z], source_Z + expert_Z, size_Z, first_Z, groups.expert_P.size
    )


def _take_near_tokens_P(moving_DE: np.ndarray, groups: HolderGroups, topology: Topology) -> np.ndarray:
    """Split the tokens whose expert has a holder in their node, and set their entries in ``moving_DE`` to 0.

    Args:
        moving_DE: Tokens that leave their device, int64 ``[D, E]``; changed in place.
        groups: Holders of the placement.
        topology: Nodes of the devices.

    Returns:
        Tokens of every pair, int64 ``[P]``.
    """
    node_D = topology.node_of_device_D
    near_DE = (groups.holders_EN > 0).T[node_D]
    source_Z, expert_Z = np.nonzero(near_DE)
    counts_Z = moving_DE[source_Z, expert_Z]
    moving_DE[source_Z, expert_Z] = 0
    node_Z = node_D[source_Z]
    tokens_P = np.empty(groups.expert_P.size, dtype=np.int64)
    tokens_P[groups.by_node_P] = _split_cells(
        counts_Z,
        source_Z + expert_Z,
        groups.holders_EN[expert_Z, node_Z],
        groups.node_first_EN[expert_Z, node_Z],
        tokens_P.size,
    )
    return tokens_P


def _split_cells(
    counts_Z: np.ndarray, turn_Z: np.ndarray, size_Z: np.ndarray, first_Z: np.ndarray, num_pairs: int
) -> np.ndarray:
    """Split the tokens of each cell (source, expert) evenly over a range of consecutive pairs.

    Args:
        counts_Z: Tokens of every cell, int64 ``[Z]``.
        turn_Z: Source plus expert of every cell, int64 ``[Z]``. Modulo the length of the range, this is the
            position from which the remainder is dealt out.
        size_Z: Length of every cell's range of pairs, int64 ``[Z]``.
        first_Z: First pair of every cell's range, int64 ``[Z]``.
        num_pairs: Number of pairs, P.

    Returns:
        Tokens of every pair, int64 ``[P]``.
    """
    share_Z = counts_Z // size_Z
    rest_Z = counts_Z - share_Z * size_Z
    # Every cell adds its share to all pairs of its range, and 1 to the pairs that get a token of the
    # remainder (from ``start`` on, in a ring). Adding a value where an interval opens and subtracting it
    # where the interval closes, followed by one running sum, does this for all cells at once.
    steps = np.zeros(num_pairs + 1, dtype=np.int64)
    np.add.at(steps, first_Z, share_Z)
    np.subtract.at(steps, first_Z + size_Z, share_Z)
    start_Z = turn_Z % size_Z
    stop_Z = start_Z + rest_Z
    wraps_Z = stop_Z > size_Z
    opens = np.concatenate([first_Z + start_Z, first_Z[wraps_Z]])
    closes = np.concatenate([first_Z + np.minimum(stop_Z, size_Z), (first_Z + stop_Z - size_Z)[wraps_Z]])
    steps += np.bincount(opens, minlength=num_pairs + 1) - np.bincount(closes, minlength=num_pairs + 1)
    return np.cumsum(steps)[:num_pairs]


def _split_by_size(moving_DE: np.ndarray, groups: HolderGroups) -> np.ndarray:
    """Split each expert's tokens evenly over all its holders.

    Experts with equally many holders are handled together. The result is that of :func:`_split_cells`, but
    without arrays with one entry for each cell and step. Those arrays would take most of the time in large
    groups. With ``n`` holders, source ``s`` deals its remainder ``r`` from position ``s mod n`` on, counted
    from position ``expert mod n``. The sources therefore open their intervals at the same positions for every
    expert. Only the positions where the intervals close, ``s mod n + r``, have to be counted.

    Args:
        moving_DE: Tokens by source device and expert, int64 ``[D, E]``.
        groups: Holders of the placement.

    Returns:
        Tokens of every pair, int64 ``[P]``.
    """
    num_devices = moving_DE.shape[0]
    moving_E = moving_DE.sum(axis=0)
    single_E = groups.num_holders_E == 1
    tokens_P = np.zeros(groups.expert_P.size, dtype=np.int64)
    tokens_P[groups.first_E[single_E]] = moving_E[single_E]
    source_D = np.arange(num_devices)
    for size in np.unique(groups.num_holders_E[~single_E & (moving_E > 0)]).tolist():
        expert_H = np.flatnonzero((groups.num_holders_E == size) & (moving_E > 0))
        counts_DH = moving_DE[:, expert_H]
        rest_DH = counts_DH - counts_DH // size * size
        start_D = source_D % size
        row_H = np.arange(expert_H.size) * (2 * size)
        rest_DH += start_D[:, None]
        rest_DH += row_H
        closes = np.bincount(rest_DH.reshape(-1), minlength=2 * size * expert_H.size)
        closes_HU = closes.reshape(expert_H.size, 2 * size)
        wrapped_HU = closes_HU[:, size:]
        steps_HU = np.bincount(start_D, minlength=size) - closes_HU[:, :size] - wrapped_HU
        steps_HU[:, 0] += wrapped_HU.sum(axis=1)
        dealt_HU = np.cumsum(steps_HU, axis=1)
        share_H = (moving_E[expert_H] - dealt_HU.sum(axis=1)) // size
        position_HU = (np.arange(size) + expert_H[:, None]) % size
        tokens_P[groups.first_E[expert_H, None] + position_HU] = share_H[:, None] + dealt_HU
    return tokens_P


def expected_device_load_D(load_DE: np.ndarray, placement: ExpertPlacement, topology: Topology) -> np.ndarray:
    """Load of every device under even dispatch, without rounding to whole tokens: float64 ``[D]``.

    Args:
        load_DE: Load by source device and expert, ``[D, E]``. The numbers may be fractions.
        placement: Owners and replicas of the experts.
        topology: Nodes of the devices.
    """
    shares = expected_pair_loads(load_DE, placement, topology)
    device_P = holder_groups(placement, topology).device_P
    share_P = shares.own_P + shares.near_P + shares.far_P
    return np.bincount(device_P, weights=share_P, minlength=placement.num_devices)


def expected_pair_loads(load_DE: np.ndarray, placement: ExpertPlacement, topology: Topology) -> PairTokens:
    """Load of each (expert, holder) pair: :func:`even_pair_tokens` without rounding to whole tokens.

    A holder of an expert computes its own tokens, an even share of the tokens of its node's devices without
    the expert, and an even share of the tokens of all nodes without the expert.

    Args:
        load_DE: Load by source device and expert, ``[D, E]``. The numbers may be fractions.
        placement: Owners and replicas of the experts.
        topology: Nodes of the devices.

    Returns:
        float64 ``[P]`` each.
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
    return PairTokens(own_P, near_P, (far_E / groups.num_holders_E)[expert_P])


def _groups(values_DE: np.ndarray, placement: ExpertPlacement, topology: Topology) -> HolderGroups:
    """Holder groups of the placement, after a check that the shapes of the three arguments match."""
    if values_DE.shape != (placement.num_devices, placement.num_experts):
        raise ValueError(
            f"the loads have shape {values_DE.shape}: wanted ({placement.num_devices}, "
            f"{placement.num_experts}), by source device and expert of the placement"
        )
    return holder_groups(placement, topology)
