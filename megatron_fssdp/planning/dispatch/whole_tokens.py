"""A dispatch in whole tokens: where each token of a device goes, and how many every device gets (ours).

Quotas get the nearest tokens: their device's own, then those of its node, then others. Tokens that leave a
device and open quotas stand in line, device after device, first along each node, then along all devices, and
what stands at the same places of both lines goes together (``runtime/slots/remap/interval_kernel.py`` has the
same rule on the device). All numbers are whole, so all ranks find the same ones.

Shape letters: E experts, D devices, U slots of a device, S sources, H experts with several holders, N nodes,
G devices of the largest node.
"""

from functools import lru_cache
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
    sent_ED, got_ED = np.zeros_like(counts_ED), np.zeros_like(counts_ED)
    # Most experts have one holder, to which all tokens go.
    holder_E = tokens_ED.argmax(axis=1)
    sent_ED[np.arange(len(holder_E)), holder_E] = counts_ED[:, device]
    np.multiply(counts_ED, (holder_E == device)[:, None], out=got_ED)
    (shared,) = np.nonzero((tokens_ED > 0).sum(axis=1) > 1)
    if len(shared):
        sent_ED[shared], got_ED[shared] = _shared_out(counts_ED[shared], tokens_ED[shared], topology, device)
    return WholeTokens(sent_ED, got_ED)


def _shared_out(
    counts_HD: np.ndarray, tokens_HD: np.ndarray, topology: Topology, device: int
) -> tuple[np.ndarray, np.ndarray]:
    """What the device sends and gets of experts with several holders."""
    own_HD = np.minimum(counts_HD, tokens_HD)
    place_NG, node_D, number_D = _places(topology)
    # Both lines of each node: tokens that leave their device, and open quotas. Padding has none.
    lines = np.zeros((2, len(own_HD), own_HD.shape[1] + 1), np.int64)
    np.subtract(counts_HD, own_HD, out=lines[0, :, :-1])
    np.subtract(tokens_HD, own_HD, out=lines[1, :, :-1])
    until = _until(lines[:, :, place_NG])
    np.minimum(until, until[..., -1:].min(axis=0), out=until)  # as far as both lines of a node reach
    near = np.diff(until)[:, :, node_D, number_D]
    until_far = _until(lines[:, :, :-1] - near)
    node, number = node_D[device], number_D[device]
    in_node = place_NG[node][: (place_NG[node] >= 0).sum()]
    sides = []
    for line in (1, 0):
        met_HD = _met(until_far[line], until_far[1 - line], device)
        here = _met(until[line, :, node], until[1 - line, :, node], number)
        met_HD[:, in_node] += here[:, : len(in_node)]
        met_HD[:, device] += own_HD[:, device]
        sides.append(met_HD)
    return sides[0], sides[1]


@lru_cache(maxsize=8)
def _places(topology: Topology) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The devices of each node, -1 as padding, and each device's node and number in it."""
    place_NG = np.full((topology.num_nodes, max(map(len, topology.devices_by_node))), -1)
    number_D = np.zeros(topology.num_devices, np.int64)
    for node, devices in enumerate(topology.devices_by_node):
        place_NG[node, : len(devices)] = devices
        number_D[list(devices)] = np.arange(len(devices))
    return place_NG, topology.node_of_device_D, number_D


def _until(lengths: np.ndarray) -> np.ndarray:
    """Where each piece of lines along the last axis begins, and the last one ends."""
    ends = np.zeros((*lengths.shape[:-1], lengths.shape[-1] + 1), np.int64)
    np.cumsum(lengths, axis=-1, out=ends[..., 1:])
    return ends


def _met(pieces: np.ndarray, others: np.ndarray, number: int) -> np.ndarray:
    """How much of each piece of a line stands beside one piece of the other line."""
    begin, end = others[:, number, None], others[:, number + 1, None]
    return np.maximum(np.minimum(pieces[:, 1:], end) - np.maximum(pieces[:, :-1], begin), 0)
