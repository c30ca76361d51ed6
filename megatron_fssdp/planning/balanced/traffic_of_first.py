"""Traffic of a layer when only the first n of its replicated experts have their replicas, for every n.

Under even dispatch an expert's tokens go their ways whatever the other experts do, and so do its
parameters. So the traffic of every n is a running sum over the experts, without a plan for each.

Shape letters: E experts, D devices, N nodes, P pairs of expert and device, H selected experts of a layer, J
columns of a table of experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from megatron_fssdp.planning.cost.layer_traffic import BusiestLinks, TransferTraffic
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.transfer.transfer_plan import TransferPlan

ROUNDING = 1e-12
"""Less than this part of all tokens is what is left of differences between equal numbers."""


@dataclass(frozen=True, eq=False)
class DispatchOfFirst:
    """One dispatch with the replicas of the first 0, 1, … H experts; float64 [H+1] each.

    Attributes:
        tokens_H: (token, k) pairs on the device that computes the most.
        near_H: Pairs on the busiest link between a device and others of its node.
        far_of_node_H: Pairs on the busiest link between a node and other nodes.
    """

    tokens_H: np.ndarray
    near_H: np.ndarray
    far_of_node_H: np.ndarray

    @property
    def busiest(self) -> BusiestLinks:
        """Pairs on the busiest links; the fields are arrays [H+1]."""
        return BusiestLinks(near=self.near_H, far_of_node=self.far_of_node_H)  # type: ignore[arg-type]


def dispatch_of_first(
    load_DE: np.ndarray, placement: ExpertPlacement, experts: Sequence[int] | np.ndarray, topology: Topology
) -> DispatchOfFirst:
    """What even dispatch sends, without rounding.

    Args:
        load_DE: (token, k) pairs by source and expert, [D, E]; need not be whole numbers.
        placement: Owners and all replicas.
        experts: The replicated experts, in the order in which they get their replicas, [H].
        topology: Nodes of the devices.
    """
    experts, num_experts = np.asarray(experts, dtype=np.int64), placement.num_experts
    # All experts with their owners alone (columns up to E), then the replicated ones with their replicas.
    expert_J = np.concatenate([np.arange(num_experts), experts])
    present_DJ = placement.present_ED[expert_J].T.copy()
    present_DJ[:, :num_experts] = False
    present_DJ[placement.owner_E, np.arange(num_experts)] = True
    traffic = _by_column(np.take(load_DE, expert_J, axis=1), present_DJ, topology)
    owned, replicated = traffic[:, :, :num_experts], traffic[:, :, num_experts:]
    total = np.empty((*traffic.shape[:2], 1 + len(experts)))
    total[:, :, 0] = np.cumsum(owned, axis=2)[:, :, -1]
    np.subtract(replicated, owned[:, :, experts], out=total[:, :, 1:])
    np.cumsum(total, axis=2, out=total)
    total[total < ROUNDING * load_DE.sum()] = 0.0
    return _busiest(total, topology)


def dispatch_of_all(load_DE: np.ndarray, placement: ExpertPlacement, topology: Topology) -> DispatchOfFirst:
    """The same with all replicas alone, [1] each: less work than with those of the first 0, 1, … H experts.

    Args:
        load_DE: (token, k) pairs by source and expert, [D, E]; need not be whole numbers.
        placement: Owners and all replicas.
        topology: Nodes of the devices.
    """
    total = _by_column(load_DE, placement.present_ED.T, topology).sum(axis=2, keepdims=True)
    total[total < ROUNDING * load_DE.sum()] = 0.0
    return _busiest(total, topology)


def _busiest(total: np.ndarray, topology: Topology) -> DispatchOfFirst:
    own_DH, near_in_DH, near_out_DH, far_in_DH, far_out_DH = total
    return DispatchOfFirst(
        (own_DH + near_in_DH + far_in_DH).max(axis=0),
        np.maximum(near_in_DH, near_out_DH).max(axis=0),
        np.maximum(topology.sum_over_nodes(far_in_DH), topology.sum_over_nodes(far_out_DH)).max(axis=0),
    )


def _by_column(load_DJ: np.ndarray, present_DJ: np.ndarray, topology: Topology) -> np.ndarray:
    """Own pairs, those in from and out to the node, those in from and out to other nodes: [5, D, J].

    Args:
        load_DJ: Pairs of some experts by source.
        present_DJ: Their holders.
        topology: Nodes of the devices.
    """
    traffic = np.empty((5, *load_DJ.shape))
    own_DJ, near_in_DJ, near_out_DJ, far_in_DJ, far_out_DJ = traffic
    node_D = topology.node_of_device_D
    np.multiply(load_DJ, present_DJ, out=own_DJ)
    load_NJ, own_NJ = topology.sum_over_nodes(load_DJ), topology.sum_over_nodes(own_DJ)
    holders_NJ = topology.sum_over_nodes(present_DJ.astype(np.int64))
    is_far_NJ = holders_NJ == 0
    near_NJ = (load_NJ - own_NJ) / np.maximum(holders_NJ, 1)  # by holder, of which there may be none
    np.multiply(near_NJ[node_D], present_DJ, out=near_in_DJ)
    np.multiply((load_NJ * is_far_NJ).sum(axis=0) / holders_NJ.sum(axis=0), present_DJ, out=far_in_DJ)
    np.multiply(load_DJ, is_far_NJ[node_D], out=far_out_DJ)
    np.subtract(load_DJ - far_out_DJ, own_DJ, out=near_out_DJ)
    return traffic


def transfer_of_first(
    plan: TransferPlan, experts: Sequence[int] | np.ndarray, topology: Topology
) -> TransferTraffic:
    """What a plan's edges put on the busiest links, for the replicas of the first 0, 1, … H experts.

    Args:
        plan: A two-level plan of all replicas: an expert comes to each node once, and spreads there.
        experts: All experts that it moves, in the order in which they get their replicas, [H].
        topology: Nodes of the devices.

    Returns:
        Numbers and hops as arrays [H+1].
    """
    num_columns, num_devices, num_nodes = len(experts) + 1, plan.num_devices, topology.num_nodes
    edges = np.fromiter(chain.from_iterable(plan.edges), np.int64, 4 * plan.num_transfers)
    expert_P, source_P, to_P, depth_P = edges.reshape(-1, 4).T
    column_of_E = np.zeros(int(expert_P.max(initial=-1)) + 1, dtype=np.int64)
    column_of_E[experts] = np.arange(1, num_columns)
    column_P = column_of_E[expert_P]
    from_P, into_P = topology.node_of_device_D[source_P], topology.node_of_device_D[to_P]
    is_near_P = from_P == into_P
    # Rows: in to and out of each device inside its node, then in to and out of each node.
    in_P = np.where(is_near_P, to_P, 2 * num_devices + into_P)
    out_P = np.where(is_near_P, num_devices + source_P, 2 * num_devices + num_nodes + from_P)
    num_rows = 2 * (num_devices + num_nodes)
    places = np.concatenate([in_P, out_P]) * num_columns + np.concatenate([column_P, column_P])
    moved = np.bincount(places, minlength=num_rows * num_columns).reshape(num_rows, num_columns)
    near_H, far_of_node_H = np.maximum.reduceat(np.cumsum(moved, axis=1), [0, 2 * num_devices], axis=0)
    # Depth counts hops before an edge. Those between nodes come first, as many as to the edge's node.
    far_hops_P = depth_P
    if is_near_P.any():
        hops_KN = np.zeros((num_columns, num_nodes), np.int64)
        is_far_P = ~is_near_P
        hops_KN[column_P[is_far_P], into_P[is_far_P]] = depth_P[is_far_P] + 1
        far_hops_P = np.where(is_near_P, hops_KN[column_P, into_P], depth_P)
    # The path with most hops between nodes counts, and of those the one with most inside a node.
    both_H = np.zeros(num_columns, np.int64)
    np.maximum.at(both_H, column_P, far_hops_P * num_devices + (depth_P - far_hops_P))
    far_hops_H, near_hops_H = np.divmod(np.maximum.accumulate(both_H), num_devices)
    busiest = BusiestLinks(near=near_H, far_of_node=far_of_node_H)
    return TransferTraffic(busiest, (near_hops_H, far_hops_H))  # type: ignore[arg-type]
