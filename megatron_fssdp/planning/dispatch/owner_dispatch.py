"""Dispatch in which replicas serve only their own device (FasterMoE, §4.1; Pro-Prophet, §IV-A).

Shape letters: E experts, D devices.
"""

import numpy as np

from megatron_fssdp.planning.dispatch.quota_dispatch import QuotaDispatch
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology


def owner_dispatch(counts_DE: np.ndarray, placement: ExpertPlacement, topology: Topology) -> QuotaDispatch:
    """Tokens stay on their device if it has their expert. All other tokens go to the expert's owner.

    Args:
        counts_DE: (token, k) pairs by source device and expert, integers ``[D, E]``.
        placement: Owners and replicas of the experts.
        topology: Nodes of the devices.
    """
    counts = np.asarray(counts_DE, dtype=np.int64)
    owner_E, experts = placement.owner_E, np.arange(placement.num_experts)
    own_DE = np.where(placement.present_ED.T, counts, 0)
    leaving_DE = counts - own_DE
    in_node_E = topology.sum_over_nodes(leaving_DE)[topology.node_of_device_D[owner_E], experts]
    near_DE, far_DE = np.zeros((2, *counts.shape), np.int64)
    near_DE[owner_E, experts] = in_node_E
    far_DE[owner_E, experts] = leaving_DE.sum(axis=0) - in_node_E
    return QuotaDispatch(counts, own_DE, near_DE, far_DE, topology)
