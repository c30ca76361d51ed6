"""Even dispatch: to which holders of an expert each source's tokens go (Hecate, §4.4).

If the source has the expert, its tokens stay there. Otherwise they are split evenly over the expert's holders
in the source's node. If there is no such holder, they are split evenly over all holders. When ``n`` holders
share the tokens, a remainder of ``r`` tokens goes to ``r`` holders, one token to each. The first of them is
at position ``(source + expert) mod n`` of the ascending list of holders, and the list is taken as a ring.
A source derives its own row (what it sends) from its own counts. The full table of shape ``[D, E, D]`` is
never built.

Shape letters: E experts, D devices, N nodes, P pairs of expert and device.
"""

from dataclasses import dataclass

import numpy as np

from megatron_fssdp.planning.dispatch.sent_rows import SentRows
from megatron_fssdp.planning.kernels import even_split
from megatron_fssdp.planning.native.kernel import Kernel
from megatron_fssdp.planning.placement.holder_groups import HolderGroups, holder_groups
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology

split_evenly = Kernel(even_split.split_evenly)
even_row = Kernel(even_split.even_row)


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

    def rows_from(self, source: int) -> SentRows:
        """Tokens that one source sends. They sum to ``counts_DE[source]`` for each expert."""
        row = self._groups().row(source)
        tokens_P = np.empty_like(row.expert_P)
        counts_E = np.ascontiguousarray(self.counts_DE[source], np.int64)
        even_row(counts_E, row.expert_P, row.num_chosen_E, row.turn_P, tokens_P)
        return SentRows(row.expert_P, row.device_P, tokens_P)

    def device_tokens_D(self) -> np.ndarray:
        """Exact number of (token, k) pairs that every device computes: int64 ``[D]``."""
        sums = even_pair_tokens(self.counts_DE, self.placement, self.topology).sums
        return np.asarray(sums[0] + sums[2] + sums[4])

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


@dataclass(frozen=True, eq=False)
class SplitTokens(PairTokens):
    """Whole tokens of each pair, and their sums.

    Attributes:
        sums: Own tokens of each device, tokens that it sends to and receives from other devices of its node,
            and tokens that it sends to and receives from other nodes, int64 ``[5, D]``.
    """

    sums: np.ndarray


def even_pair_tokens(counts_DE: np.ndarray, placement: ExpertPlacement, topology: Topology) -> SplitTokens:
    """Exact number of tokens that each holder computes of each of its experts under even dispatch.

    The (expert, holder) pairs are ordered by expert, then device.

    Args:
        counts_DE: (token, k) pairs by source device and expert, integers ``[D, E]``.
        placement: Owners and replicas of the experts.
        topology: Nodes of the devices.

    Returns:
        int64 arrays of their own, which the caller may change.
    """
    groups = _groups(counts_DE, placement, topology)
    own_P, near_P, far_P = np.empty((3, groups.device_P.size), np.int64)
    sums = np.zeros((5, topology.num_devices), np.int64)
    split_evenly(
        np.ascontiguousarray(counts_DE, np.int64),
        groups.device_P,
        groups.by_node_P,
        groups.first_E,
        groups.num_holders_E,
        groups.node_first_EN,
        groups.holders_EN,
        topology.node_of_device_D,
        own_P,
        near_P,
        far_P,
        sums,
    )
    return SplitTokens(own_P, near_P, far_P, sums)


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
