"""Plain reference for traffic: units on the busiest links from a table of all pairs of devices."""

import numpy as np

from megatron_fssdp.planning.cost.link_seconds import BusiestLinks
from megatron_fssdp.planning.placement.topology import Topology


def pairs_traffic(traffic_DD: np.ndarray, topology: Topology) -> BusiestLinks:
    """Units on the busiest links, from what each device sends to each, ``[D, D]``, itself not counted."""
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
