"""Index tables of a placement's holders by expert and node. They are computed once for each placement.

A holder of an expert is a device on which the expert is present.

Shape letters: E experts, D devices, N nodes, P pairs of expert and device.
"""

from dataclasses import dataclass

import numpy as np

from megatron_fssdp.planning.placement.kept_results import kept_on
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology


@dataclass(frozen=True)
class SourceRow:
    """The holders that receive tokens from one source device: one entry for each (expert, receiving holder).

    Attributes:
        num_chosen_E: Number of holders over which the source's tokens of each expert are split, int64
            ``[E]``.
        expert_P: Expert of each entry, int64 ``[P]``.
        device_P: Holder of each entry, ascending for each expert, int64 ``[P]``.
        turn_P: Turn of the holder, from 0, when the remainder of a division is dealt out; int64 ``[P]``.
    """

    num_chosen_E: np.ndarray
    expert_P: np.ndarray
    device_P: np.ndarray
    turn_P: np.ndarray


class HolderGroups:
    """Holders of every expert, in the whole expert-parallel group and in each node.

    All arrays are int64.

    Attributes:
        expert_P: Expert of every (expert, holder) pair, ``[P]``. Pairs are ordered by expert, then device.
        device_P: Holder of every pair, ``[P]``.
        group_P: ``expert * N + node`` of every pair, ``[P]``.
        holders_EN: Number of holders of each expert in each node, ``[E, N]``.
        num_holders_E: Number of holders of each expert, ``[E]``.
        first_E: Position of the first pair of each expert, ``[E]``.
        by_node_P: Positions of the pairs, sorted by expert, node, device; ``[P]``.
        node_first_EN: Where the pairs of an expert and a node begin in that sorted order, ``[E, N]``.
        rank_P: Position of each pair among the holders of its expert, ``[P]``.
        node_rank_P: Position of each pair among the holders of its expert in its node, ``[P]``.

    Raises:
        ValueError: The placement and the topology have different numbers of devices.
    """

    def __init__(self, placement: ExpertPlacement, topology: Topology) -> None:
        if placement.num_devices != topology.num_devices:
            raise ValueError(
                f"the placement has {placement.num_devices} devices and the topology "
                f"{topology.num_devices}: wanted the same devices in both"
            )
        num_experts, num_nodes = placement.num_experts, topology.num_nodes
        self._placement, self._topology = placement, topology
        expert_P, device_P = np.nonzero(placement.present_ED)
        # numpy's answer has strides, and kernels want arrays in C order.
        self.expert_P, self.device_P = np.ascontiguousarray(expert_P), np.ascontiguousarray(device_P)
        node_P = topology.node_of_device_D[self.device_P]
        self.group_P = self.expert_P * num_nodes + node_P
        holders = np.bincount(self.group_P, minlength=num_experts * num_nodes)
        self.holders_EN = holders.reshape(num_experts, num_nodes)
        self.num_holders_E = self.holders_EN.sum(axis=1)
        self.first_E = np.cumsum(self.num_holders_E) - self.num_holders_E
        node_first = np.cumsum(holders) - holders
        self.node_first_EN = node_first.reshape(num_experts, num_nodes)
        position_P = np.arange(self.expert_P.size)
        self.by_node_P = np.argsort(self.group_P, kind="stable")
        self.rank_P = position_P - self.first_E[self.expert_P]
        self.node_rank_P = np.empty_like(position_P)
        self.node_rank_P[self.by_node_P] = position_P - node_first[self.group_P[self.by_node_P]]
        self._rows: dict[int, SourceRow] = {}

    def row(self, source: int) -> SourceRow:
        """Receiving holders of one source device. The result is kept for the next call."""
        if source not in self._rows:
            self._rows[source] = self._build_row(source)
        return self._rows[source]

    def _build_row(self, source: int) -> SourceRow:
        """Compute the row of one source device; :meth:`row` keeps it."""
        _check_device("source", source, self._topology)
        node = self._topology.node_of_device[source]
        expert_P, device_P = self.expert_P, self.device_P
        local_E = self._placement.present_ED[:, source]
        in_node_E = self.holders_EN[:, node]
        near_E = in_node_E > 0
        num_chosen_E = np.where(local_E, 1, np.where(near_E, in_node_E, self.num_holders_E))
        near_P = near_E[expert_P]
        same_node_P = self._topology.node_of_device_D[device_P] == node
        chosen_P = np.where(local_E[expert_P], device_P == source, same_node_P | ~near_P)
        rank_P = np.where(near_P, self.node_rank_P, self.rank_P)[chosen_P]
        expert_P, device_P = expert_P[chosen_P], device_P[chosen_P]
        turn_P = (rank_P - source - expert_P) % num_chosen_E[expert_P]
        return SourceRow(num_chosen_E, expert_P, device_P, turn_P)


def holder_groups(placement: ExpertPlacement, topology: Topology) -> HolderGroups:
    """Holder groups of a placement, cached on the placement for the latest topology."""
    return kept_on(placement, topology, HolderGroups)


def _check_device(name: str, device: int, topology: Topology) -> None:
    """Raise ValueError if a device number is out of range."""
    if not 0 <= device < topology.num_devices:
        raise ValueError(f"{name} is {device}: wanted a device from 0 to {topology.num_devices - 1}")
