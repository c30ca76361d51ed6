"""Dispatch by quotas: how many tokens of an expert each of its holders computes, given as numbers.

Which sources' tokens they are follows from the quotas, by laying tokens and quotas out along one
line, the same on every rank. A rank derives its own row (what it sends) and its own column (what it
receives); the [D, E, D] tensor is never built.

Shape letters: E experts, D devices, N nodes.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_fssdp.planning.placement.topology import Topology


@dataclass(frozen=True, eq=False)
class QuotaDispatch:
    """Sources' tokens matched with holders' quotas.

    Attributes:
        counts_DE: (token, k) pairs by source and expert, int64 [D, E].
        own_DE: Pairs of each expert that each device computes of its own tokens, int64 [D, E].
        near_DE: The same of tokens of other devices in its node.
        far_DE: The same of tokens of other nodes.
        topology: Nodes of the devices.

    Raises:
        ValueError: Quotas that are negative or for which there are not just as many tokens.
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
                "got quotas that are negative, or above the tokens that a device has or that leave the "
                "devices of a node: wanted 0 up to that many"
            )
        wrong_E = (left_NE.sum(axis=0) != far_NE.sum(axis=0)) | ((left_NE > 0) & (far_NE > 0)).any(axis=0)
        if wrong_E.any():
            expert = int(np.argmax(wrong_E))
            raise ValueError(
                f"nodes are left with {left_NE[:, expert].tolist()} tokens of expert {expert} and have "
                f"quotas for {far_NE[:, expert].tolist()}: wanted equal sums, and no node with both"
            )

    def from_source(self, source: int) -> np.ndarray:
        """What one source sends: int64 [E, D]; row ``e`` sums to ``counts_DE[source, e]``."""
        dispatch_DE = self._near.row(source) + self._far.row(source)
        dispatch_DE[source] += self.own_DE[source]
        return np.ascontiguousarray(dispatch_DE.T)

    def to_device(self, device: int) -> np.ndarray:
        """What one device receives: int64 [D, E], by source and expert."""
        dispatch_DE = self._near.column(device) + self._far.column(device)
        dispatch_DE[device] += self.own_DE[device]
        return dispatch_DE

    def device_tokens_D(self) -> np.ndarray:
        """Pairs every device computes: int64 [D]."""
        return np.asarray((self.own_DE + self.near_DE + self.far_DE).sum(axis=1))

    def cross_node_tokens(self) -> int:
        """Number of pairs sent to another node."""
        return int(self.far_DE.sum())

    @cached_property
    def _near(self) -> "_Matching":
        # Along the line the nodes follow each other, with as many tokens as quotas in each.
        by_node_D = np.argsort(self.topology.node_of_device_D, kind="stable")
        return _Matching(self.sent_near_DE, self.near_DE, by_node_D)

    @cached_property
    def _far(self) -> "_Matching":
        sent_DE = self.counts_DE - self.own_DE - self.sent_near_DE
        return _Matching(sent_DE, self.far_DE, np.arange(self.topology.num_devices))

    @cached_property
    def sent_near_DE(self) -> np.ndarray:
        """What each device sends to others of its node.

        Of what leaves the devices of a node, the first stays in it, as much as there are quotas.
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
    """Tokens and quotas of each expert laid out along one line; what overlaps belongs together."""

    def __init__(self, sent_DE: np.ndarray, taken_DE: np.ndarray, order_D: np.ndarray) -> None:
        self._sent_end_DE = _ends_along(sent_DE, order_D)
        self._taken_end_DE = _ends_along(taken_DE, order_D)
        self._sent_start_DE = self._sent_end_DE - sent_DE
        self._taken_start_DE = self._taken_end_DE - taken_DE

    def row(self, source: int) -> np.ndarray:
        return _overlap(
            self._sent_start_DE[source], self._sent_end_DE[source], self._taken_start_DE, self._taken_end_DE
        )

    def column(self, device: int) -> np.ndarray:
        return _overlap(
            self._taken_start_DE[device], self._taken_end_DE[device], self._sent_start_DE, self._sent_end_DE
        )


def _ends_along(values_DE: np.ndarray, order_D: np.ndarray) -> np.ndarray:
    ends_DE = np.empty_like(values_DE)
    ends_DE[order_D] = np.cumsum(values_DE[order_D], axis=0)
    return ends_DE


def _overlap(start_E: np.ndarray, end_E: np.ndarray, start_DE: np.ndarray, end_DE: np.ndarray) -> np.ndarray:
    """Length that two intervals share, int64 [D, E]."""
    return np.maximum(np.minimum(end_E, end_DE) - np.maximum(start_E, start_DE), 0)
