"""Traffic of a layer when only the first n of its replicated experts have their replicas, for every n.

Under even dispatch an expert's tokens go their ways whatever the other experts do, and so do its
parameters. So the traffic of every n is a running sum over the experts, without a plan for each.

Shape letters: E experts, D devices, N nodes, K replicated experts, P (expert, holder) pairs or edges.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_fssdp.planning.holder_groups import holder_groups
from megatron_fssdp.planning.placement import ExpertPlacement
from megatron_fssdp.planning.replica_routing import expected_pair_loads
from megatron_fssdp.planning.topology import Topology
from megatron_fssdp.planning.transfer_plan import TransferPlan

ROUNDING = 1e-12
"""Less than this part of all tokens is what is left of differences between equal numbers."""


@dataclass(frozen=True, eq=False)
class DispatchOfFirst:
    """One dispatch with the replicas of the first 0, 1, … K experts; float64 [K+1] each.

    Attributes:
        tokens_K: (token, k) pairs on the device that computes the most.
        near_K: Pairs on the busiest link between a device and others of its node.
        far_of_node_K: Pairs on the busiest link between a node and other nodes.
    """

    tokens_K: np.ndarray
    near_K: np.ndarray
    far_of_node_K: np.ndarray


def dispatch_of_first(
    load_DE: np.ndarray, placement: ExpertPlacement, experts: Sequence[int] | np.ndarray, topology: Topology
) -> DispatchOfFirst:
    """What even dispatch sends, without rounding.

    Args:
        load_DE: (token, k) pairs by source and expert, [D, E]; need not be whole numbers.
        placement: Owners and all replicas.
        experts: The replicated experts, in the order in which they get their replicas, [K].
        topology: Nodes of the devices.
    """
    owners_only = ExpertPlacement.owners_only(placement.owner_E, placement.num_devices)
    owned_LED = _by_expert(load_DE, owners_only, topology)
    growth_LKD = (_by_expert(load_DE, placement, topology) - owned_LED)[:, experts]
    total_LKD = np.concatenate([owned_LED.sum(axis=1, keepdims=True), growth_LKD], axis=1)
    np.cumsum(total_LKD, axis=1, out=total_LKD)
    total_LKD[total_LKD < ROUNDING * load_DE.sum()] = 0.0
    own_KD, near_in_KD, near_out_KD, far_in_KD, far_out_KD = total_LKD
    return DispatchOfFirst(
        (own_KD + near_in_KD + far_in_KD).max(axis=1),
        _busier_K(near_in_KD, near_out_KD),
        _busier_K(_of_nodes(far_in_KD, topology), _of_nodes(far_out_KD, topology)),
    )


def _by_expert(load_DE: np.ndarray, placement: ExpertPlacement, topology: Topology) -> np.ndarray:
    """Own pairs, those in from and out to the node, those in from and out to other nodes: [5, E, D]."""
    groups, shares = holder_groups(placement, topology), expected_pair_loads(load_DE, placement, topology)
    traffic_LED = np.zeros((5, placement.num_experts, placement.num_devices))
    own_ED, near_in_ED, near_out_ED, far_in_ED, far_out_ED = traffic_LED
    pairs = groups.expert_P, groups.device_P
    own_ED[pairs], near_in_ED[pairs], far_in_ED[pairs] = shares.own_P, shares.near_P, shares.far_P
    far_out_ED += np.where(groups.holders_EN[:, topology.node_of_device_D] == 0, load_DE.T, 0)
    near_out_ED += load_DE.T - far_out_ED - own_ED
    return traffic_LED


@dataclass(frozen=True, eq=False)
class TransferOfFirst:
    """One SparseAllGather of the replicas of the first 0, 1, … K experts; float64 [K+1] each.

    Attributes:
        near_K: Experts on the busiest link between a device and others of its node.
        far_of_node_K: Experts on the busiest link between a node and other nodes.
        max_depth_K: Depth of the deepest edge, 0 where nothing moves.
    """

    near_K: np.ndarray
    far_of_node_K: np.ndarray
    max_depth_K: np.ndarray


def transfer_of_first(
    plan: TransferPlan, experts: Sequence[int] | np.ndarray, topology: Topology
) -> TransferOfFirst:
    """What a plan's edges move.

    Args:
        plan: Of all replicas.
        experts: All experts that it moves, in the order in which they get their replicas, [K].
        topology: Nodes of the devices.
    """
    num_rows, num_devices = len(experts) + 1, plan.num_devices
    expert_P, source_P, to_P, depth_P = np.array(plan.edges, dtype=np.int64).reshape(-1, 4).T
    row_of_E = np.zeros(int(expert_P.max(initial=-1)) + 1, dtype=np.int64)
    row_of_E[experts] = np.arange(1, num_rows)
    row_P = row_of_E[expert_P]
    node_D = topology.node_of_device_D
    far_P = node_D[source_P] != node_D[to_P]

    def up_to_KD(chosen_P: np.ndarray, end_P: np.ndarray) -> np.ndarray:
        place_P = (row_P * num_devices + end_P)[chosen_P]
        moved_KD = np.bincount(place_P, minlength=num_rows * num_devices).reshape(num_rows, num_devices)
        return np.cumsum(moved_KD, axis=0).astype(np.float64)

    far_in_KD, far_out_KD = up_to_KD(far_P, to_P), up_to_KD(far_P, source_P)
    max_depth_K = np.zeros(num_rows)
    np.maximum.at(max_depth_K, row_P, depth_P)
    return TransferOfFirst(
        _busier_K(up_to_KD(~far_P, to_P), up_to_KD(~far_P, source_P)),
        _busier_K(_of_nodes(far_in_KD, topology), _of_nodes(far_out_KD, topology)),
        np.maximum.accumulate(max_depth_K),
    )


def _of_nodes(values_KD: np.ndarray, topology: Topology) -> np.ndarray:
    """[K, D] -> [K, N]."""
    return topology.sum_over_nodes(values_KD.T).T


def _busier_K(in_KD: np.ndarray, out_KD: np.ndarray) -> np.ndarray:
    """The busiest device's, or node's, busier direction."""
    return np.maximum(in_KD.max(axis=1), out_KD.max(axis=1))
