"""Traffic of a layer's transfers on the busiest device, link and NIC.

Shape letters: E experts, D devices, P pairs of expert and device.
"""

from dataclasses import dataclass

import numpy as np

from megatron_fssdp.planning.dispatch.token_dispatch import BusiestLinks
from megatron_fssdp.planning.placement.topology import Topology, kept_on
from megatron_fssdp.planning.transfer.transfer_plan import TransferPlan

UNUSED = BusiestLinks()


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
    if not len(plan.table):
        return NO_TRANSFER
    expert_P, source_P, device_P, depth_P = plan.table.T
    node_D = topology.node_of_device_D
    is_far_P = node_D[source_P] != node_D[device_P]
    # Hops between nodes take longer than those inside, so they count first.
    path_ED = np.zeros((int(expert_P.max()) + 1, plan.num_devices, 2), np.int64)
    longest = (0, 0)
    for depth in range(plan.max_depth + 1):
        at = depth_P == depth
        before = path_ED[expert_P[at], source_P[at]]
        longest = max(longest, max(map(tuple, before.tolist())))
        steps = np.stack([is_far_P[at], ~is_far_P[at]], axis=1)
        path_ED[expert_P[at], device_P[at]] = before + steps
    return TransferTraffic(
        moves_traffic(source_P, device_P, topology),
        (longest[1], longest[0]),
        plan.max_depth + 1,
        len(plan.table),
        int(is_far_P.sum()),
    )


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
