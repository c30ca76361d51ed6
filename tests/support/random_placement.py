"""Random placements for property tests, and the simplest transfer that brings a placement about."""

import numpy as np

from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.transfer.transfer_plan import TransferPlan


def random_placement(rng, num_experts, num_devices):
    """Return a random placement.

    A device can own no expert or all experts. An expert can have replicas on all, some or no other devices.
    """
    # Only a random subset of the devices owns experts.
    candidates = rng.permutation(num_devices)[: rng.integers(1, num_devices + 1)]
    owner_E = rng.choice(candidates, num_experts)
    share_E = rng.choice([0.0, 0.4, 1.0], num_experts)
    present_ED = rng.random((num_experts, num_devices)) < share_E[:, None]
    if num_devices > 1 and rng.random() < 0.3:
        present_ED[:, rng.integers(num_devices)] = False  # a device without replicas
    present_ED[np.arange(num_experts), owner_E] = True
    return ExpertPlacement(owner_E.astype(np.int64), present_ED)


def with_replicas(placement, replicas):
    """A copy with more replicas, given as (expert, device) pairs."""
    present_ED = placement.present_ED.copy()
    for expert, device in replicas:
        present_ED[expert, device] = True
    return ExpertPlacement(placement.owner_E, present_ED)


def plain_transfer(placement):
    """Return the transfer in which owners send their experts directly to all holders (Hecate, §5.1).

    Each expert takes one hop, and the owner's link carries all copies.
    """
    expert_P, device_P = np.nonzero(placement.present_ED)
    source_P = placement.owner_E[expert_P]
    table = np.stack([expert_P, source_P, device_P, np.zeros_like(expert_P)], axis=1)
    return TransferPlan(placement.num_devices, table[source_P != device_P])
