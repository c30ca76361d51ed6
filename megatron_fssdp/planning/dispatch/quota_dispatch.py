"""Dispatch by quotas: the caller gives the number of tokens that each holder of an expert computes.

Which sources these tokens come from follows from the quotas: tokens and quotas are laid out along one line,
in the same way on every rank. A rank derives only its own row (what it sends) and its own column (what it
receives). The full table of shape ``[D, E, D]`` is never built.

Shape letters: E experts, D devices, N nodes.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_fssdp.planning.placement.topology import Topology


@dataclass(frozen=True, eq=False)
class QuotaDispatch:
    """A dispatch that matches the tokens of sources with the quotas of holders.

    Example: one expert on the devices 2 and 3 of a node with four devices. The sources 0, 1 and 2 have 3, 5
    and 2 tokens for it. Holder 2 has a quota for its own 2 tokens (``own_DE``). Both holders have quotas for
    4 tokens of other devices of the node (``near_DE``). Along the line, each token goes to the holder whose
    quota is below it::

        source of each token    0 0 0 1 1 1 1 1
        holder of each quota    2 2 2 2 3 3 3 3

        tokens sent    to holder 2    to holder 3
        source 0            3              0
        source 1            1              4
        source 2          2 (own)          0
        source 3            0              0

    Tokens that go to other nodes are matched with ``far_DE`` in the same way, along a line of all devices.

    Attributes:
        counts_DE: (token, k) pairs by source device and expert, int64 ``[D, E]``.
        own_DE: Quotas for own tokens: pairs of each expert that each device computes of its own tokens, int64
            ``[D, E]``.
        near_DE: Quotas for tokens of other devices in the same node, int64 ``[D, E]``.
        far_DE: Quotas for tokens of other nodes, int64 ``[D, E]``.
        topology: Nodes of the devices.

    Raises:
        ValueError: A quota is negative, or quotas do not add up to the tokens that are there.
    """

    counts_DE: np.ndarray
    own_DE: np.ndarray
    near_DE: np.ndarray
    far_DE: np.ndarray
    topology: Topology

    def __post_init__(self) -> None:
        leaving_DE = self.counts_DE - self.own_DE
        left_NE = self.topology.sum_over_nodes(leaving_DE) - self.topology.sum_over_nodes(self.near_DE)
        far_NE = self.topology.sum_over_nodes(self.far_DE)
        if min(leaving_DE.min(), left_NE.min(), self.own_DE.min(), self.near_DE.min(), far_NE.min()) < 0:
            raise ValueError(
                "got quotas that are negative, or above the tokens that a device has or that the devices of "
                "a node send away: wanted quotas of at least 0 and at most these numbers of tokens"
            )
        wrong_E = (left_NE.sum(axis=0) != far_NE.sum(axis=0)) | ((left_NE > 0) & (far_NE > 0)).any(axis=0)
        if wrong_E.any():
            expert = int(np.argmax(wrong_E))
            raise ValueError(
                f"nodes are left with {left_NE[:, expert].tolist()} tokens of expert {expert} and have "
                f"quotas for {far_NE[:, expert].tolist()}: wanted equal sums, and no node with both"
            )

    def from_source(self, source: int) -> np.ndarray:
        """Tokens that one source sends, by expert and receiving device: int64 ``[E, D]``.

        Row ``e`` sums to ``counts_DE[source, e]``.
        """
        dispatch_DE = self._near.row(source) + self._far.row(source)
        dispatch_DE[source] += self.own_DE[source]
        return np.ascontiguousarray(dispatch_DE.T)

    def to_device(self, device: int) -> np.ndarray:
        """Tokens that one device receives, by source and expert: int64 ``[D, E]``."""
        dispatch_DE = self._near.column(device) + self._far.column(device)
        dispatch_DE[device] += self.own_DE[device]
        return dispatch_DE

    def device_tokens_D(self) -> np.ndarray:
        """(token, k) pairs that every device computes: int64 ``[D]``."""
        return np.asarray((self.own_DE + self.near_DE + self.far_DE).sum(axis=1))

    def cross_node_tokens(self) -> int:
        """Number of (token, k) pairs that are sent to another node."""
        return int(self.far_DE.sum())

    @cached_property
    def _near(self) -> "_Matching":
        """Tokens and near quotas along a line of all devices, node by node."""
        # The line holds the devices node by node. Each node has equally many tokens and quotas, so they
        # overlap.
        by_node_D = np.argsort(self.topology.node_of_device_D, kind="stable")
        return _Matching(self.sent_near_DE, self.near_DE, by_node_D)

    @cached_property
    def _far(self) -> "_Matching":
        """Tokens that leave their node, and far quotas, along a line of all devices."""
        sent_DE = self.counts_DE - self.own_DE - self.sent_near_DE
        return _Matching(sent_DE, self.far_DE, np.arange(self.topology.num_devices))

    @cached_property
    def sent_near_DE(self) -> np.ndarray:
        """Tokens that each device sends to other devices of its node, int64 ``[D, E]``.

        Of the tokens that the devices of a node send away, the first ones stay in the node, up to the sum of
        its near quotas. The others go to other nodes.
        """
        leaving_DE, node_D = self.counts_DE - self.own_DE, self.topology.node_of_device_D
        near_NE = self.topology.sum_over_nodes(self.near_DE)
        sums_NE = self.topology.sum_over_nodes(leaving_DE)
        if (near_NE == sums_NE).all():
            return leaving_DE
        before_DE = _ends_along(leaving_DE, np.argsort(node_D, kind="stable")) - leaving_DE
        before_DE -= (np.cumsum(sums_NE, axis=0) - sums_NE)[node_D]
        return np.clip(near_NE[node_D] - before_DE, 0, leaving_DE)


class _Matching:
    """Tokens and quotas of each expert, laid out along one line.

    A source sends to a holder as many tokens as the source's part of the line overlaps with the holder's
    part.

    Args:
        sent_DE: Tokens that each source sends, int64 ``[D, E]``.
        taken_DE: Quotas of each holder, int64 ``[D, E]``.
        order_D: The devices in their order along the line, int64 ``[D]``.
    """

    def __init__(self, sent_DE: np.ndarray, taken_DE: np.ndarray, order_D: np.ndarray) -> None:
        self._sent_end_DE = _ends_along(sent_DE, order_D)
        self._taken_end_DE = _ends_along(taken_DE, order_D)
        self._sent_start_DE = self._sent_end_DE - sent_DE
        self._taken_start_DE = self._taken_end_DE - taken_DE

    def row(self, source: int) -> np.ndarray:
        """Tokens that one source sends, by receiving device and expert: int64 ``[D, E]``."""
        return _overlap(
            self._sent_start_DE[source], self._sent_end_DE[source], self._taken_start_DE, self._taken_end_DE
        )

    def column(self, device: int) -> np.ndarray:
        """Tokens that one device receives, by source and expert: int64 ``[D, E]``."""
        return _overlap(
            self._taken_start_DE[device], self._taken_end_DE[device], self._sent_start_DE, self._sent_end_DE
        )


def _ends_along(values_DE: np.ndarray, order_D: np.ndarray) -> np.ndarray:
    """Where each device's part of the line ends, int64 ``[D, E]``: running sums in the order of the line."""
    ends_DE = np.empty_like(values_DE)
    ends_DE[order_D] = np.cumsum(values_DE[order_D], axis=0)
    return ends_DE


def _overlap(start_E: np.ndarray, end_E: np.ndarray, start_DE: np.ndarray, end_DE: np.ndarray) -> np.ndarray:
    """Length of the overlap of one device's interval with every device's interval, int64 ``[D, E]``."""
    return np.maximum(np.minimum(end_E, end_DE) - np.maximum(start_E, start_DE), 0)
