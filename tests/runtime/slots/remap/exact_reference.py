"""Exact shares as plain arrays: what ``interval_kernel.py`` computes, without blocks, places and padding.

Shape letters: D devices, E experts.
"""

import numpy as np

from megatron_fssdp.planning.dispatch.token_dispatch import ANY_HOLDER, ENOUGH, EXPONENTS, LEAST_LOAD

PARTS = 2.0**20


def exact_ends_ED(counts_DE, slot_ED, node_D, source, enough=ENOUGH):
    """Where each device's interval of a source's tokens of each expert ends, int64 ``[E, D]``."""
    counts, present, node_D = counts_DE.astype(float), (slot_ED.T >= 0).astype(float), np.asarray(node_D)
    same_node = (node_D[:, None] == node_D).astype(float)
    in_node, holders_E = same_node @ present, present.sum(axis=0)
    far = in_node == 0
    near = ~far & (present == 0)
    num_chosen = np.where(present, 1, np.where(far, holders_E, in_node))

    def evenly(share):
        """What each holder computes if every source sends its share to each holder that it chooses."""
        return (share + same_node @ (share * near) + (share * far).sum(axis=0)) * present

    share, total_E = counts / num_chosen, counts.sum(axis=0)
    prior = evenly(share) + present * ANY_HOLDER / holders_E * (total_E + 1)
    quota = _whole(_levelled(prior, total_E))
    if quota.sum(axis=1).max() * enough < evenly(np.floor(share)).sum(axis=1).max():
        sent = _filled(counts, quota, same_node, source)
    else:
        chosen = present * np.where(far[source], 1, same_node[source][:, None])
        chosen = np.where(near[source] | far[source], chosen, 0)
        chosen[source] = present[source]
        whole_E = np.floor(share[source])
        turn = np.cumsum(chosen, axis=0) - chosen - source - np.arange(counts.shape[1])
        is_turn = turn % num_chosen[source] < counts[source] - whole_E * num_chosen[source]
        sent = chosen * (whole_E + is_turn)
    return np.cumsum(sent, axis=0).T.astype(np.int64)


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


def _filled(counts, quota, same_node, source):
    """Tokens that a source sends to each device if quotas get the nearest tokens."""
    own = np.minimum(counts, quota)
    left = np.stack([counts - own, quota - own])  # two lines in each node, and then of all devices
    begin = np.tril(same_node, -1) @ left
    near = np.clip((same_node @ left).min(axis=0) - begin, 0, left)
    far = left - near
    sent = _overlap(begin, near, source) * same_node[:, [source]]
    sent += _overlap(np.cumsum(far, axis=1) - far, far, source)
    sent[source] += own[source]
    return sent


def _overlap(begin, length, source):
    """The part of the source's interval of tokens in each interval of the quotas."""
    end = begin + length
    return np.maximum(np.minimum(end[0, source], end[1]) - np.maximum(begin[0, source], begin[1]), 0)
