"""Traffic of a layer if only the first n of its replicated experts have their replicas, for every n.

Under even dispatch, the ways of an expert's tokens and parameters do not depend on the other experts. So the
traffic for every n is a running sum over the experts, and no plan for each n is needed.

Shape letters: E experts, D devices, N nodes, P pairs of expert and device, H selected experts of a layer, J
columns of a table of experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from megatron_fssdp.planning.cost.layer_traffic import BusiestLinks, TransferTraffic
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.transfer.transfer_plan import TransferPlan

ROUNDING = 1e-12
"""Traffic below this part of all tokens counts as 0.

Such a small number is the rounding error of a difference of equal numbers.
"""


@dataclass(frozen=True, eq=False)
class DispatchOfFirst:
    """Traffic of one dispatch with the replicas of only the first 0, 1, … H experts.

    Attributes:
        tokens_H: (token, k) pairs on the device that computes the most, float64 ``[H+1]``.
        near_H: Pairs on the busiest link between a device and other devices of its node, float64 ``[H+1]``.
        far_of_node_H: Pairs on the busiest link between a node and other nodes, float64 ``[H+1]``.
    """

    tokens_H: np.ndarray
    near_H: np.ndarray
    far_of_node_H: np.ndarray

    @property
    def busiest(self) -> BusiestLinks:
        """Pairs on the busiest links. The fields are arrays ``[H+1]``."""
        return BusiestLinks(near=self.near_H, far_of_node=self.far_of_node_H)  # type: ignore[arg-type]


def dispatch_of_first(
    load_DE: np.ndarray, placement: ExpertPlacement, experts: Sequence[int] | np.ndarray, topology: Topology
) -> DispatchOfFirst:
    """Traffic of even dispatch, without rounding to whole tokens.

    Args:
        load_DE: (token, k) pairs by source device and expert, ``[D, E]``. The numbers may be fractions.
        placement: Owners and all replicas.
        experts: The replicated experts, in the order in which they get their replicas; ``[H]``.
        topology: Nodes of the devices.
    """
    experts, num_experts = np.asarray(experts, dtype=np.int64), placement.num_experts
    # The first E columns are all experts without replicas. The next ones are the replicated experts with
    # replicas.
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
    """Traffic of even dispatch with all replicas, in arrays ``[1]``.

    It takes less work than :func:`dispatch_of_first`, which computes arrays ``[H+1]``.

    Args:
        load_DE: (token, k) pairs by source device and expert, ``[D, E]``. The numbers may be fractions.
        placement: Owners and all replicas.
        topology: Nodes of the devices.
    """
    total = _by_column(load_DE, placement.present_ED.T, topology).sum(axis=2, keepdims=True)
    total[total < ROUNDING * load_DE.sum()] = 0.0
    return _busiest(total, topology)


def _busiest(total: np.ndarray, topology: Topology) -> DispatchOfFirst:
    """Largest values of the traffic of all devices.

    Args:
        total: Traffic as in :func:`_by_column`, summed over experts; float64 ``[5, D, H+1]``.
        topology: Nodes of the devices.
    """
    own_DH, near_in_DH, near_out_DH, far_in_DH, far_out_DH = total
    return DispatchOfFirst(
        (own_DH + near_in_DH + far_in_DH).max(axis=0),
        np.maximum(near_in_DH, near_out_DH).max(axis=0),
        np.maximum(topology.sum_over_nodes(far_in_DH), topology.sum_over_nodes(far_out_DH)).max(axis=0),
    )


def _by_column(load_DJ: np.ndarray, present_DJ: np.ndarray, topology: Topology) -> np.ndarray:
    """Traffic of each device for each of some experts under even dispatch.

    Args:
        load_DJ: (token, k) pairs of the experts by source device, ``[D, J]``.
        present_DJ: Whether each device has each of the experts, bool ``[D, J]``.
        topology: Nodes of the devices.

    Returns:
        float64 ``[5, D, J]``: pairs that the device computes of its own tokens, pairs that it receives from
        and sends to its node, pairs that it receives from and sends to other nodes.
    """
    traffic = np.empty((5, *load_DJ.shape))
    own_DJ, near_in_DJ, near_out_DJ, far_in_DJ, far_out_DJ = traffic
    node_D = topology.node_of_device_D
    np.multiply(load_DJ, present_DJ, out=own_DJ)
    load_NJ, own_NJ = topology.sum_over_nodes(load_DJ), topology.sum_over_nodes(own_DJ)
    holders_NJ = topology.sum_over_nodes(present_DJ.astype(np.int64))
    is_far_NJ = holders_NJ == 0
    near_NJ = (load_NJ - own_NJ) / np.maximum(holders_NJ, 1)  # For each holder. A node may have no holders.
    np.multiply(near_NJ[node_D], present_DJ, out=near_in_DJ)
    np.multiply((load_NJ * is_far_NJ).sum(axis=0) / holders_NJ.sum(axis=0), present_DJ, out=far_in_DJ)
    np.multiply(load_DJ, is_far_NJ[node_D], out=far_out_DJ)
    np.subtract(load_DJ - far_out_DJ, own_DJ, out=near_out_DJ)
    return traffic


def transfer_of_first(
    plan: TransferPlan, experts: Sequence[int] | np.ndarray, topology: Topology
) -> TransferTraffic:
    """Traffic of a transfer plan on the busiest links, with the replicas of only the first 0, 1, … H experts.

    Args:
        plan: A two-level plan of all replicas. Each expert comes to each node once and spreads there.
        experts: All experts that the plan moves, in the order in which they get their replicas; ``[H]``.
        topology: Nodes of the devices.

    Returns:
        Traffic whose numbers and hops are arrays ``[H+1]``.
    """
    num_columns, num_devices, num_nodes = len(experts) + 1, plan.num_devices, topology.num_nodes
    edges = np.fromiter(chain.from_iterable(plan.edges), np.int64, 4 * plan.num_transfers)
    expert_P, source_P, to_P, depth_P = edges.reshape(-1, 4).T
    column_of_E = np.zeros(int(expert_P.max(initial=-1)) + 1, dtype=np.int64)
    column_of_E[experts] = np.arange(1, num_columns)
    column_P = column_of_E[expert_P]
    from_P, into_P = topology.node_of_device_D[source_P], topology.node_of_device_D[to_P]
    is_near_P = from_P == into_P
    # Rows: into and out of each device inside its node, then into and out of each node.
    in_P = np.where(is_near_P, to_P, 2 * num_devices + into_P)
    out_P = np.where(is_near_P, num_devices + source_P, 2 * num_devices + num_nodes + from_P)
    num_rows = 2 * (num_devices + num_nodes)
    places = np.concatenate([in_P, out_P]) * num_columns + np.concatenate([column_P, column_P])
    moved = np.bincount(places, minlength=num_rows * num_columns).reshape(num_rows, num_columns)
    near_H, far_of_node_H = np.maximum.reduceat(np.cumsum(moved, axis=1), [0, 2 * num_devices], axis=0)
    # The depth of an edge is the number of hops before it. Hops between nodes come first: as many as it takes
    # to reach the node of the edge.
    far_hops_P = depth_P
    if is_near_P.any():
        hops_KN = np.zeros((num_columns, num_nodes), np.int64)
        is_far_P = ~is_near_P
        hops_KN[column_P[is_far_P], into_P[is_far_P]] = depth_P[is_far_P] + 1
        far_hops_P = np.where(is_near_P, hops_KN[column_P, into_P], depth_P)
    # The path with the most hops between nodes counts. Among equal ones, the path with the most hops inside a
    # node counts.
    both_H = np.zeros(num_columns, np.int64)
    np.maximum.at(both_H, column_P, far_hops_P * num_devices + (depth_P - far_hops_P))
    far_hops_H, near_hops_H = np.divmod(np.maximum.accumulate(both_H), num_devices)
    num_hops_H = np.zeros(num_columns, np.int64)
    np.maximum.at(num_hops_H, column_P, depth_P + 1)
    num_hops: Any = np.maximum.accumulate(num_hops_H)
    busiest = BusiestLinks(near=near_H, far_of_node=far_of_node_H)
    return TransferTraffic(busiest, (near_hops_H, far_hops_H), num_hops)  # type: ignore[arg-type]
