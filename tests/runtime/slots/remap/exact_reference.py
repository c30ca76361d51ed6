"""Exact shares as plain arrays: what ``interval_kernel.py`` computes, without blocks, places and padding.

Shape letters: D devices, E experts.
"""

import numpy as np

from megatron_fssdp.planning.dispatch.token_dispatch import ANY_HOLDER, ENOUGH, EXPONENTS, LEAST_LOAD
from megatron_fssdp.planning.dispatch.whole_tokens import whole_tokens
from tests.planning.placement_cases import brute_force_dispatch_DED

PARTS = 2.0**20


def exact_sent_ED(counts_DE, placement, topology, source, enough=ENOUGH):
    """Tokens of a source by expert and receiving device, int64 ``[E, D]``."""
    node_D = topology.node_of_device_D
    counts, present = counts_DE.astype(float), placement.present_ED.T.astype(float)
    same_node = (node_D[:, None] == node_D).astype(float)
    in_node, holders_E = same_node @ present, present.sum(axis=0)
    far = in_node == 0
    near = ~far & (present == 0)

    def evenly(share):
        """What each holder computes if every source sends its share to each holder that it chooses."""
        return (share + same_node @ (share * near) + (share * far).sum(axis=0)) * present

    share, total_E = counts / np.where(present, 1, np.where(far, holders_E, in_node)), counts.sum(axis=0)
    prior = evenly(share) + present * ANY_HOLDER / holders_E * (total_E + 1)
    quota = _whole(_levelled(prior, total_E))
    if quota.sum(axis=1).max() * enough < evenly(np.floor(share)).sum(axis=1).max():
        return whole_tokens(counts_DE, quota.T.astype(np.int64), topology, source).sent_ED
    return brute_force_dispatch_DED(counts_DE, placement, topology)[source]


def _levelled(prior, total_E):
    """Parts of the experts' tokens that level the loads of the devices."""
    weight_D = np.ones(len(prior))
    load_E = total_E / (max(total_E.sum(), 1) / len(prior))
    for exponent in EXPONENTS:
        per_weight_D = LEAST_LOAD + prior @ (load_E / (weight_D @ prior))
        weight_D = weight_D * (per_weight_D * weight_D) ** -exponent
    return prior * np.outer(weight_D, total_E / (weight_D @ prior))


def _whole(tokens):
    ends = np.cumsum(np.floor(tokens * PARTS), axis=0) / PARTS
    return np.diff(np.rint(ends), axis=0, prepend=0)
