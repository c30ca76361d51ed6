"""Exact dispatch: what the device computes from a micro-batch's counts in place of even dispatch (ours).

``runtime/slots/exact_shares.py`` divides each expert's tokens among its holders so that device loads become
even. This module does the same on the host, for simulations and prices. The two can differ by single tokens,
because they add in another order.

Shape letters: E experts, D devices, P pairs of expert and device.
"""

import numpy as np

from megatron_fssdp.planning.dispatch.even_dispatch import EvenDispatch, expected_pair_loads
from megatron_fssdp.planning.dispatch.quota_dispatch import QuotaDispatch
from megatron_fssdp.planning.placement.holder_groups import HolderGroups, holder_groups
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology

EXPONENTS = (3, 1) * 4
"""Exponent of the correction in each round of levelling. 1 is Sinkhorn's iteration, stable but slow: it
leaves a part s of an error, 0 ≤ s < 1. The exponents 3 and 1 together leave s·(3s - 2)."""

ENOUGH = 1.005
"""Even dispatch stays if its highest device load divided by that of the exact shares is at most this."""

ANY_HOLDER = 0.02
"""Part of the prior for holders that even dispatch may give nothing."""

LEAST_LOAD = 1e-4
"""In mean loads; keeps the weights of devices without tokens finite."""

TOKEN_PARTS = 20
"""Bits below a whole token while parts are added up."""


def exact_dispatch(
    counts_DE: np.ndarray, placement: ExpertPlacement, topology: Topology
) -> QuotaDispatch | EvenDispatch:
    """The dispatch with level device loads, or even dispatch where its highest load is hardly higher.

    Args:
        counts_DE: (token, k) pairs by source device and expert, integers ``[D, E]``.
        placement: Owners and replicas of the experts.
        topology: Nodes of the devices.
    """
    counts = np.ascontiguousarray(counts_DE, np.int64)
    groups = holder_groups(placement, topology)
    quota_P = _whole(_levelled(counts, placement, topology, groups), groups)
    # Even dispatch gives each holder the whole part of its share at least.
    in_node_DE = groups.holders_EN.T[topology.node_of_device_D]
    num_chosen_DE = np.where(in_node_DE > 0, in_node_DE, groups.num_holders_E)
    whole_DE = np.where(placement.present_ED.T, counts, counts - counts % num_chosen_DE)
    least = expected_pair_loads(whole_DE, placement, topology)
    least_P = least.own_P + least.near_P + least.far_P
    highest, even_highest = (
        np.bincount(groups.device_P, weights=tokens_P, minlength=placement.num_devices).max()
        for tokens_P in (quota_P, least_P)
    )
    if highest * ENOUGH >= even_highest:
        return EvenDispatch(counts, placement, topology)
    return QuotaDispatch.filled(counts, groups.expert_P, groups.device_P, quota_P, topology)


def _levelled(
    counts: np.ndarray, placement: ExpertPlacement, topology: Topology, groups: HolderGroups
) -> np.ndarray:
    """Parts of the experts' tokens that level the loads of the devices, float64 ``[P]``."""
    expert_P, device_P, num_devices = groups.expert_P, groups.device_P, placement.num_devices
    even = expected_pair_loads(counts, placement, topology)
    total_E = counts.sum(axis=0).astype(np.float64)
    prior_P = even.own_P + even.near_P + even.far_P
    prior_P = prior_P + ((total_E + 1) * ANY_HOLDER / groups.num_holders_E)[expert_P]
    weight_D = np.ones(num_devices)

    def parts_P(load_E: np.ndarray) -> np.ndarray:
        """The prior as it is weighted now, with the sums of ``load_E``; without the weights of devices."""
        weighted_E = np.bincount(expert_P, weights=prior_P * weight_D[device_P], minlength=len(load_E))
        return np.asarray(prior_P * (load_E / weighted_E)[expert_P])

    mean_loads_E = total_E * (num_devices / max(total_E.sum(), 1.0))
    for exponent in EXPONENTS:
        summed_D = np.bincount(device_P, weights=parts_P(mean_loads_E), minlength=num_devices)
        weight_D = weight_D * (weight_D * (LEAST_LOAD + summed_D)) ** -exponent
    return parts_P(total_E) * weight_D[device_P]


def _whole(tokens_P: np.ndarray, groups: HolderGroups) -> np.ndarray:
    """Round parts along the devices; each expert's sum, a whole number, stays. int64 ``[P]``."""
    parts_P = (tokens_P * 2**TOKEN_PARTS).astype(np.int64)
    before_P = np.cumsum(parts_P) - parts_P
    ends_P = before_P + parts_P - before_P[groups.first_E][groups.expert_P]
    whole_P = (ends_P + 2 ** (TOKEN_PARTS - 1)) >> TOKEN_PARTS
    whole_P[1:] -= np.where(groups.expert_P[1:] == groups.expert_P[:-1], whole_P[:-1], 0)
    return whole_P
