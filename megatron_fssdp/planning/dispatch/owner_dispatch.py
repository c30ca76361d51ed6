"""Dispatch in which replicas serve only their own device (FasterMoE, §4.1; Pro-Prophet, §IV-A).

Shape letters: E experts, D devices, P pairs of expert and device.
"""

import numpy as np

from megatron_fssdp.planning.dispatch.quota_dispatch import QuotaDispatch
from megatron_fssdp.planning.placement.holder_groups import holder_groups
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology


def owner_dispatch(counts_DE: np.ndarray, placement: ExpertPlacement, topology: Topology) -> QuotaDispatch:
    """Tokens stay on their device if it has their expert. All other tokens go to the expert's owner.

    Args:
        counts_DE: (token, k) pairs by source device and expert, integers ``[D, E]``.
        placement: Owners and replicas of the experts.
        topology: Nodes of the devices.
    """
    groups = holder_groups(placement, topology)
    expert_P, device_P = groups.expert_P, groups.device_P
    tokens_P = np.asarray(counts_DE)[device_P, expert_P]
    elsewhere_E = np.asarray(counts_DE).sum(axis=0) - np.bincount(expert_P, tokens_P).astype(np.int64)
    tokens_P = tokens_P + np.where(device_P == placement.owner_E[expert_P], elsewhere_E[expert_P], 0)
    return QuotaDispatch.filled(counts_DE, expert_P, device_P, tokens_P, topology)
