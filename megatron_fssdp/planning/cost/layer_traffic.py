"""Traffic of a layer's dispatch and transfers on the busiest device, link and NIC.

The functions do not build the table of shape ``[D, E, D]``. They only count which tokens stay on their
device, stay in their node, or leave it.

Shape letters: E experts, D devices, N nodes, P pairs of expert and device.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_fssdp.planning.cost.dispatch_sums import UNUSED, BusiestLinks, DispatchTraffic, summed_traffic
from megatron_fssdp.planning.cost.owner_traffic import OwnerTraffic
from megatron_fssdp.planning.dispatch.even_dispatch import even_pair_tokens
from megatron_fssdp.planning.dispatch.quota_dispatch import QuotaDispatch
from megatron_fssdp.planning.dispatch.token_dispatch import DispatchPolicy, plan_dispatch
from megatron_fssdp.planning.kernels import transfer_trees
from megatron_fssdp.planning.native.kernel import Kernel
from megatron_fssdp.planning.placement.kept_results import kept_on
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.replica_sets import ReplicaSets
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.transfer.transfer_plan import TransferPlan

__all__ = [
    "NO_TRANSFER",
    "BusiestLinks",
    "DispatchTraffic",
    "TransferTraffic",
    "dispatch_traffic",
    "moves_traffic",
    "quota_traffic",
    "transfer_traffic",
    "two_level_traffic",
]

sum_edges = Kernel(transfer_trees.sum_edges)
sum_two_level_edges = Kernel(transfer_trees.sum_two_level_edges)


def dispatch_traffic(
    policy: DispatchPolicy, counts_DE: np.ndarray, placement: ExpertPlacement, topology: Topology
) -> DispatchTraffic:
    """Traffic of the dispatch that :func:`plan_dispatch` plans.

    Args:
        policy: How the tokens of an expert are split among its holders.
        counts_DE: (token, k) pairs by source device and expert, int64 ``[D, E]``.
        placement: Owners and replicas of the experts.
        topology: Nodes of the devices.
    """
    if policy == "owner" or not placement.num_replicas:
        return OwnerTraffic(counts_DE, placement.owner_E, topology).of(placement)
    dispatch = plan_dispatch(policy, counts_DE, placement, topology)
    if isinstance(dispatch, QuotaDispatch):
        return quota_traffic(dispatch)
    return summed_traffic(even_pair_tokens(counts_DE, placement, topology).sums, topology)


def quota_traffic(dispatch: QuotaDispatch) -> DispatchTraffic:
    """Traffic of a dispatch by quotas."""
    return summed_traffic(dispatch.sums(), dispatch.topology)


@dataclass(frozen=True)
class TransferTraffic:
    """Traffic of one SparseAllGather. SparseReduceScatter has the same traffic in the other direction.

    Attributes:
        busiest: Number of experts on the busiest links.
        fill_hops: (hops inside a node, hops between nodes) before the last hop, on the path on which these
            hops take longest. A pipelined transfer takes this much longer than its busiest link.
        num_hops: Number of hops of the path with the most hops; the number of messages depends on it.
        num_experts: Number of experts that are moved, one for each replica.
        num_between_nodes: How many of these moves go from one node to another.
    """

    busiest: BusiestLinks = UNUSED
    fill_hops: tuple[int, int] = (0, 0)
    num_hops: int = 0
    num_experts: int = 0
    num_between_nodes: int = 0


NO_TRANSFER = TransferTraffic()


def transfer_traffic(plan: TransferPlan, topology: Topology) -> TransferTraffic:
    """Traffic of a transfer plan. The plan keeps it for the next call.

    Args:
        plan: The transfers from device to device, parents before children.
        topology: Nodes of the devices.
    """
    return kept_on(plan, topology, _transfer_traffic)


def _transfer_traffic(plan: TransferPlan, topology: Topology) -> TransferTraffic:
    """Compute :func:`transfer_traffic`."""
    if not plan.edges:
        return NO_TRANSFER
    found = np.empty((1, 7), np.int64)
    num_experts = int(plan.table[:, 0].max()) + 1
    sum_edges(plan.table, num_experts, topology.node_of_device_D, topology.num_nodes, found)
    return _traffic_of(found[0].tolist(), len(plan.edges), topology)


def two_level_traffic(owner_E: np.ndarray, replicas: ReplicaSets, topology: Topology) -> TransferTraffic:
    """Traffic of the two-level transfers of several placements, without their plans.

    Args:
        owner_E: Owner of every expert, int64 ``[E]``.
        replicas: Replicas of the placements.
        topology: Nodes of the devices.

    Returns:
        One object whose fields are arrays with an entry for each placement.
    """
    found = np.empty((len(replicas.ends), 7), np.int64)
    pairs = (replicas.expert_P, replicas.device_P, replicas.ends)
    sum_two_level_edges(*pairs, owner_E, *topology.arrays, found)
    return _traffic_of(found.T, replicas.sizes, topology)


def _traffic_of(found: Any, num_experts: Any, topology: Topology) -> TransferTraffic:
    """The traffic with the sums that a kernel has found.

    Args:
        found: The seven sums of :func:`megatron_fssdp.planning.kernels.transfer_trees.sum_edges`: numbers, or
            arrays with one entry for each case.
        num_experts: Number of experts that are moved.
        topology: Nodes of the devices.
    """
    near, far_of_device, far_of_node, num_between, far_hops, near_hops, depth = found
    busiest = BusiestLinks(
        1.0 * near, 1.0 * far_of_device, 1.0 * far_of_node, num_between / topology.num_nodes
    )
    return TransferTraffic(busiest, (near_hops, far_hops), depth + 1, num_experts, num_between)


def moves_traffic(source_P: np.ndarray, device_P: np.ndarray, topology: Topology) -> BusiestLinks:
    """Units on the busiest links, if one unit travels for each pair of devices.

    Args:
        source_P: Device that sends each unit, integers ``[P]``.
        device_P: Device that receives each unit, integers ``[P]``. Units that stay on their device are not
            counted.
        topology: Nodes of the devices.
    """
    node_D, num_devices, num_nodes = topology.node_of_device_D, topology.num_devices, topology.num_nodes
    near_P = (node_D[source_P] == node_D[device_P]) & (source_P != device_P)
    far_P = node_D[source_P] != node_D[device_P]

    def most(numbers_P: np.ndarray, counted_P: np.ndarray, size: int) -> int:
        return int(np.bincount(numbers_P[counted_P], minlength=size).max())

    near, far = (
        max(most(source_P, counted_P, num_devices), most(device_P, counted_P, num_devices))
        for counted_P in (near_P, far_P)
    )
    of_node = max(most(node_D[at_P], far_P, num_nodes) for at_P in (source_P, device_P))
    return BusiestLinks(float(near), float(far), float(of_node), int(far_P.sum()) / num_nodes)
