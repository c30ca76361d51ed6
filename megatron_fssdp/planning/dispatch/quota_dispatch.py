"""Dispatch by quotas: the caller gives the number of tokens that each holder of an expert computes.

Which sources these tokens come from follows from the quotas: tokens and quotas are laid out along one line,
in the same way on every rank. A rank derives only its own row (what it sends) and its own column (what it
receives). The full table of shape ``[D, E, D]`` is never built.

Shape letters: E experts, D devices, N nodes, G experts present on a device.
"""

from dataclasses import dataclass, field

import numpy as np

from megatron_fssdp.planning.dispatch.dispatch_tables import DispatchTables
from megatron_fssdp.planning.dispatch.sent_rows import SentRows
from megatron_fssdp.planning.kernels import quota_tables
from megatron_fssdp.planning.native.kernel import Kernel
from megatron_fssdp.planning.placement.topology import Topology

sum_quotas = Kernel(quota_tables.sum_quotas)
quota_row = Kernel(quota_tables.quota_row)
quota_column = Kernel(quota_tables.quota_column)


@dataclass(frozen=True, eq=False)
class QuotaDispatch(DispatchTables):
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
        near_out_D: Tokens that each device sends to other devices of its node, int64 ``[D]``.

    Raises:
        ValueError: A quota is negative, or quotas do not add up to the tokens that are there.
    """

    counts_DE: np.ndarray
    own_DE: np.ndarray
    near_DE: np.ndarray
    far_DE: np.ndarray
    topology: Topology
    near_out_D: np.ndarray = field(init=False)
    _near_NE: np.ndarray = field(init=False, repr=False)  # near quotas of each node

    def __post_init__(self) -> None:
        for name in ("counts_DE", "own_DE", "near_DE", "far_DE"):
            object.__setattr__(self, name, np.ascontiguousarray(getattr(self, name), np.int64))
        near_NE, left_NE, far_NE = np.zeros((3, self.topology.num_nodes, self.counts_DE.shape[1]), np.int64)
        near_out_D = np.zeros(self.topology.num_devices, np.int64)
        if not sum_quotas(*self._arrays, near_NE, left_NE, far_NE, near_out_D):
            raise ValueError(self._fault())
        object.__setattr__(self, "_near_NE", near_NE)
        object.__setattr__(self, "near_out_D", near_out_D)

    def _fault(self) -> str:
        """What is wrong with the quotas."""
        leaving_DE = self.counts_DE - self.own_DE
        left_NE = self.topology.sum_over_nodes(leaving_DE) - self.topology.sum_over_nodes(self.near_DE)
        far_NE = self.topology.sum_over_nodes(self.far_DE)
        lowest = min(part.min() for part in (leaving_DE, left_NE, self.own_DE, self.near_DE, self.far_DE))
        if lowest < 0:
            return (
                "got quotas that are negative, or above the tokens that a device has or that the devices of "
                "a node send away: wanted quotas of at least 0 and at most these numbers of tokens"
            )
        wrong_E = (left_NE.sum(axis=0) != far_NE.sum(axis=0)) | ((left_NE > 0) & (far_NE > 0)).any(axis=0)
        expert = int(np.argmax(wrong_E))
        return (
            f"nodes are left with {left_NE[:, expert].tolist()} tokens of expert {expert} and have "
            f"quotas for {far_NE[:, expert].tolist()}: wanted equal sums, and no node with both"
        )

    @property
    def _arrays(self) -> tuple[np.ndarray, ...]:
        """Tokens, quotas and nodes, as kernels take them."""
        return self.counts_DE, self.own_DE, self.near_DE, self.far_DE, self.topology.node_of_device_D

    def rows_from(self, source: int) -> SentRows:
        """Tokens that one source sends. They sum to ``counts_DE[source]`` for each expert."""
        size = self.counts_DE.size
        send_D = np.zeros(self.topology.num_devices, np.int64)
        chunks = tuple(np.empty((4, size), np.int64))
        num_chunks = quota_row(
            *self._arrays, self._near_NE, source, np.empty((size, 3), np.int64), *chunks, send_D
        )
        expert_P, device_P, tokens_P, order_P = (chunk[:num_chunks].copy() for chunk in chunks)
        return SentRows(expert_P, device_P, tokens_P, order_P, send_D)

    def received_by(self, device: int, expert_G: np.ndarray) -> np.ndarray:
        """Tokens that one device receives, by source and expert present there: int64 ``[D, G]``."""
        received_DG = np.empty((self.topology.num_devices, len(expert_G)), np.int64)
        quota_column(*self._arrays, self._near_NE, device, expert_G, received_DG)
        return received_DG

    def _experts_on(self, device: int) -> np.ndarray:
        return np.flatnonzero(self.own_DE[device] + self.near_DE[device] + self.far_DE[device])

    def device_tokens_D(self) -> np.ndarray:
        """(token, k) pairs that every device computes: int64 ``[D]``."""
        return np.asarray((self.own_DE + self.near_DE + self.far_DE).sum(axis=1))

    def cross_node_tokens(self) -> int:
        """Number of (token, k) pairs that are sent to another node."""
        return int(self.far_DE.sum())
