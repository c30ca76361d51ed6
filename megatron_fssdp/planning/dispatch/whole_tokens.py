"""A dispatch in whole tokens: where each token of a device goes, and how many every device gets (ours).

Quotas get the nearest tokens: their device's own, then those of its node, then others. Tokens that leave a
device and open quotas stand in line, device after device, first along each node, then along all devices, and
what stands at the same places of both lines goes together (``runtime/slots/remap/exact_shares.py`` has the
same rule on the device). All numbers are whole, so all ranks find the same ones.

Shape letters: E experts, D devices, U slots of a device, S sources.
"""

from typing import NamedTuple

import numpy as np

from megatron_fssdp.planning.placement.topology import Topology


class WholeTokens(NamedTuple):
    """Pairs that go from one device to each, and from each to that device, both int64 ``[E, D]``."""

    sent_ED: np.ndarray
    got_ED: np.ndarray


class KnownSplits(NamedTuple):
    """Rows of an exchange that the host knows: a dispatcher need neither gather nor copy them."""

    sent_D: np.ndarray  # to each device, int64
    received_SU: np.ndarray  # from each device for each slot of this one, int64

    @classmethod
    def of(cls, tokens: WholeTokens, expert_U: np.ndarray) -> "KnownSplits":
        """The rows of a dispatch, where this device has these experts in its slots, -1 without one."""
        return cls(tokens.sent_ED.sum(axis=0), np.where(expert_U < 0, 0, tokens.got_ED[expert_U].T))


def whole_tokens(
    counts_DE: np.ndarray, tokens_ED: np.ndarray, topology: Topology, device: int
) -> WholeTokens:
    """What ``device`` sends and gets of the pairs ``[D, E]`` under the quotas ``[E, D]``, both int64.

    Raises:
        ValueError: The quotas of an expert are not as many as its pairs.
    """
    counts_ED = np.ascontiguousarray(counts_DE.T)
    if (wrong_E := counts_ED.sum(axis=1) != tokens_ED.sum(axis=1)).any():
        wrong = int(np.argmax(wrong_E))
        raise ValueError(
            f"expert {wrong}: got quotas of {int(tokens_ED[wrong].sum())} tokens, wanted quotas of all its "
            f"{int(counts_ED[wrong].sum())} tokens; plan the quotas by these counts"
        )
    own_ED = np.minimum(counts_ED, tokens_ED)
    left_ED, open_ED = counts_ED - own_ED, tokens_ED - own_ED
    sent_ED, got_ED = np.zeros_like(own_ED), np.zeros_like(own_ED)
    sent_ED[:, device] = got_ED[:, device] = own_ED[:, device]
    home = topology.devices_by_node[topology.node_of_device[device]]
    for devices in topology.devices_by_node:
        members = list(devices)
        left, wanted = _until(left_ED[:, members]), _until(open_ED[:, members])
        shared = np.minimum(left[:, -1:], wanted[:, -1:])  # as far as both lines of the node reach
        left, wanted = np.minimum(left, shared), np.minimum(wanted, shared)
        if devices == home:
            here = members.index(device)
            sent_ED[:, members] += _met(wanted, left, here)
            got_ED[:, members] += _met(left, wanted, here)
        left_ED[:, members] -= np.diff(left)
        open_ED[:, members] -= np.diff(wanted)
    left, wanted = _until(left_ED), _until(open_ED)
    sent_ED += _met(wanted, left, device)
    got_ED += _met(left, wanted, device)
    return WholeTokens(sent_ED, got_ED)


def _until(lengths_ED: np.ndarray) -> np.ndarray:
    """Where each piece of a line begins and the last one ends, ``[E, D + 1]``."""
    ends = np.zeros((lengths_ED.shape[0], lengths_ED.shape[1] + 1), np.int64)
    np.cumsum(lengths_ED, axis=1, out=ends[:, 1:])
    return ends


def _met(pieces: np.ndarray, others: np.ndarray, number: int) -> np.ndarray:
    """How much of each piece of a line stands beside one piece of the other line, ``[E, D]``."""
    begin, end = others[:, number, None], others[:, number + 1, None]
    return np.maximum(np.minimum(pieces[:, 1:], end) - np.maximum(pieces[:, :-1], begin), 0)
