"""Traffic of a layer's dispatch and transfers on the busiest device, link and NIC.

The functions do not build the table of shape ``[D, E, D]``. They only count which tokens stay on their
device, stay in their node, or leave it.

Shape letters: E experts, D devices, N nodes, P pairs of expert and device.
"""

from dataclasses import dataclass, fields

import numpy as np

from megatron_fssdp.planning.dispatch.even_dispatch import even_pair_tokens
from megatron_fssdp.planning.dispatch.quota_dispatch import QuotaDispatch
from megatron_fssdp.planning.dispatch.token_dispatch import DispatchPolicy, plan_dispatch
from megatron_fssdp.planning.kernels import transfer_trees
from megatron_fssdp.planning.native.kernel import Kernel
from megatron_fssdp.planning.placement.holder_groups import holder_groups
from megatron_fssdp.planning.placement.kept_results import kept_on
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.transfer.transfer_plan import TransferPlan

sum_edges = Kernel(transfer_trees.sum_edges)


@dataclass(frozen=True)
class BusiestLinks:
    """Number of units (tokens or experts) on the busiest link of each kind, in its busier direction.

    Attributes:
        near: Units between the busiest device and other devices of its node.
        far_of_device: Units between the busiest device and other nodes.
        far_of_node: Units between the busiest node and other nodes.
        far_of_mean_node: Units between an average node and other nodes.
    """

    near: float = 0.0
    far_of_device: float = 0.0
    far_of_node: float = 0.0
    far_of_mean_node: float = 0.0

    def times(self, number: int) -> "BusiestLinks":
        """A copy with all fields multiplied by ``number``."""
        return BusiestLinks(**{field.name: number * getattr(self, field.name) for field in fields(self)})


@dataclass(frozen=True, eq=False)
class DispatchTraffic:
    """Traffic of one dispatch. Combine has the same traffic in the other direction.

    Attributes:
        tokens_D: (token, k) pairs that each device computes, int64 ``[D]``.
        busiest: (token, k) pairs on the busiest links.
        cross_node: Number of (token, k) pairs that are sent to another node.
    """

    tokens_D: np.ndarray
    busiest: BusiestLinks
    cross_node: int

    def times(self, number: int) -> "DispatchTraffic":
        """Traffic of ``number`` dispatches like this one."""
        return DispatchTraffic(number * self.tokens_D, self.busiest.times(number), number * self.cross_node)


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
    if not placement.num_replicas:
        return _of_owners(counts_DE, placement.owner_E, topology)
    dispatch = plan_dispatch(policy, counts_DE, placement, topology)
    if isinstance(dispatch, QuotaDispatch):
        return quota_traffic(dispatch)
    groups = holder_groups(placement, topology)
    pairs = even_pair_tokens(counts_DE, placement, topology)
    own_D, near_in_D, far_in_D = (
        np.bincount(groups.device_P, weights=tokens_P, minlength=topology.num_devices)
        for tokens_P in (pairs.own_P, pairs.near_P, pairs.far_P)
    )
    return _summed(own_D, pairs.near_out_D, near_in_D, pairs.far_out_D, far_in_D, topology)


def quota_traffic(dispatch: QuotaDispatch) -> DispatchTraffic:
    """Traffic of a dispatch by quotas."""
    own_D, near_in_D, far_in_D = (
        tokens_DE.sum(axis=1).astype(float)
        for tokens_DE in (dispatch.own_DE, dispatch.near_DE, dispatch.far_DE)
    )
    far_out_D = dispatch.counts_DE.sum(axis=1) - own_D - dispatch.near_out_D
    return _summed(own_D, dispatch.near_out_D, near_in_D, far_out_D, far_in_D, dispatch.topology)


def _of_owners(counts_DE: np.ndarray, owner_E: np.ndarray, topology: Topology) -> DispatchTraffic:
    """Traffic of a dispatch without replicas."""
    node_D = topology.node_of_device_D
    num_devices, num_experts = counts_DE.shape
    experts = np.arange(num_experts)
    own_E = counts_DE[owner_E, experts]
    of_node_E = topology.sum_over_nodes(counts_DE)[node_D[owner_E], experts]
    far_out_D = np.where(node_D[:, None] == node_D[owner_E][None, :], 0, counts_DE).sum(axis=1)
    own_D, near_in_D, far_in_D = (
        np.bincount(owner_E, weights=values_E, minlength=num_devices)
        for values_E in (own_E, of_node_E - own_E, counts_DE.sum(axis=0) - of_node_E)
    )
    near_out_D = counts_DE.sum(axis=1) - far_out_D - own_D
    return _summed(own_D, near_out_D, near_in_D, far_out_D, far_in_D, topology)


def _summed(
    own_D: np.ndarray,
    near_out_D: np.ndarray,
    near_in_D: np.ndarray,
    far_out_D: np.ndarray,
    far_in_D: np.ndarray,
    topology: Topology,
) -> DispatchTraffic:
    """Traffic of a dispatch from the tokens of every device.

    Args:
        own_D: Own tokens that each device computes, ``[D]``.
        near_out_D: Tokens that each device sends to other devices of its node, ``[D]``.
        near_in_D: Tokens that each device receives from other devices of its node, ``[D]``.
        far_out_D: Tokens that each device sends to other nodes, ``[D]``.
        far_in_D: Tokens that each device receives from other nodes, ``[D]``.
        topology: Nodes of the devices.
    """
    node_D = topology.node_of_device_D
    of_node = max(
        np.bincount(node_D, weights=far_out_D).max(),
        np.bincount(node_D, weights=far_in_D).max(),
    )
    busiest = BusiestLinks(
        near=float(max(near_out_D.max(), near_in_D.max())),
        far_of_device=float(max(far_out_D.max(), far_in_D.max())),
        far_of_node=float(of_node),
        far_of_mean_node=float(far_out_D.sum()) / topology.num_nodes,
    )
    tokens_D = np.rint(own_D + near_in_D + far_in_D).astype(np.int64)
    return DispatchTraffic(tokens_D, busiest, int(far_out_D.sum()))


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

    busiest: BusiestLinks = BusiestLinks()
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
    found = np.zeros(7, np.int64)
    num_experts = int(plan.table[:, 0].max()) + 1
    sum_edges(plan.table, num_experts, topology.node_of_device_D, topology.num_nodes, found)
    near, far_of_device, far_of_node, num_between, far_hops, near_hops, depth = found.tolist()
    busiest = BusiestLinks(
        float(near), float(far_of_device), float(far_of_node), num_between / topology.num_nodes
    )
    return TransferTraffic(busiest, (near_hops, far_hops), depth + 1, len(plan.edges), num_between)


def pairs_traffic(traffic_DD: np.ndarray, topology: Topology) -> BusiestLinks:
    """Units on the busiest links, from what each device sends to each device.

    Args:
        traffic_DD: Units that each device sends to each device, ``[D, D]``. The diagonal is not counted.
        topology: Nodes of the devices.
    """
    node_D = topology.node_of_device_D
    same_DD = node_D[:, None] == node_D[None, :]
    near_DD = np.where(same_DD & ~np.eye(len(node_D), dtype=bool), traffic_DD, 0)
    far_DD = np.where(same_DD, 0, traffic_DD)
    far_out_D, far_in_D = far_DD.sum(axis=1), far_DD.sum(axis=0)
    return BusiestLinks(
        float(max(near_DD.sum(axis=1).max(), near_DD.sum(axis=0).max())),
        float(max(far_out_D.max(), far_in_D.max())),
        float(max(np.bincount(node_D, weights=far_out_D).max(), np.bincount(node_D, weights=far_in_D).max())),
        float(far_out_D.sum()) / topology.num_nodes,
    )
