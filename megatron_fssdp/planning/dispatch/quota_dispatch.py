"""Dispatch by quotas: the caller gives the number of tokens that each holder of an expert computes.

Which sources these tokens come from follows from the quotas: tokens and quotas are laid out along one line,
in the same way on every rank. A rank derives only its own row (what it sends). The full table of shape
``[D, E, D]`` is never built.

Shape letters: E experts, D devices, N nodes, P pairs of expert and device.
"""

from dataclasses import dataclass

import numpy as np

from megatron_fssdp.planning.dispatch.sent_rows import SentRows
from megatron_fssdp.planning.kernels import quota_rows, quota_sums
from megatron_fssdp.planning.native.kernel import Kernel
from megatron_fssdp.planning.placement.topology import Topology

are_fillable = Kernel(quota_sums.are_fillable)
fill_quotas = Kernel(quota_sums.fill_quotas)
quota_row = Kernel(quota_rows.quota_row)
sum_quota_tokens = Kernel(quota_sums.sum_quota_tokens)


@dataclass(frozen=True, eq=False)
class QuotaDispatch:
    """A dispatch that matches the tokens of sources with the quotas of holders.

    Example: one expert on the devices 2 and 3 of a node with four devices. The sources 0, 1 and 2 have 3, 5
    and 2 tokens for it. Holder 2 has a quota for its own 2 tokens. Both holders have quotas for
    4 tokens of other devices of the node. Along the line, each token goes to the holder whose
    quota is below it::

        source of each token    0 0 0 1 1 1 1 1
        holder of each quota    2 2 2 2 3 3 3 3

        tokens sent    to holder 2    to holder 3
        source 0            3              0
        source 1            1              4
        source 2          2 (own)          0
        source 3            0              0

    Tokens that go to other nodes are matched in the same way, along a line of all devices.

    Attributes:
        counts_DE: (token, k) pairs by source device and expert, int64 ``[D, E]``.
        quotas: Five rows with an entry for each pair of expert and device, sorted by expert, then device;
            int64 ``[5, P]``. The rows are experts, devices, quotas for own tokens (tokens of the expert that
            the device computes of its own tokens), quotas for tokens of other devices in the same node, and
            quotas for tokens of other nodes.
        topology: Nodes of the devices.

    Raises:
        ValueError: A quota is negative, or quotas do not add up to the tokens that are there.
    """

    counts_DE: np.ndarray
    quotas: np.ndarray
    topology: Topology

    def __post_init__(self) -> None:
        object.__setattr__(self, "counts_DE", np.ascontiguousarray(self.counts_DE, np.int64))
        if not are_fillable(*self._arrays):
            raise ValueError(self._fault())

    @classmethod
    def filled(
        cls,
        counts_DE: np.ndarray,
        expert_P: np.ndarray,
        device_P: np.ndarray,
        tokens_P: np.ndarray,
        topology: Topology,
    ) -> "QuotaDispatch":
        """The dispatch that fills each quota with the tokens that are nearest to its device.

        A quota is filled with the device's own tokens first, then with those of its node, then with those of
        other nodes.

        Args:
            counts_DE: (token, k) pairs by source device and expert, integers ``[D, E]``.
            expert_P: Experts with quotas, sorted by expert, then device; int64 ``[P]``.
            device_P: Device of each pair, int64 ``[P]``.
            tokens_P: Tokens of the expert that the device computes, integers ``[P]``.
            topology: Nodes of the devices.
        """
        counts = np.ascontiguousarray(counts_DE, np.int64)
        quotas = np.zeros((5, len(tokens_P)), np.int64)
        quotas[0], quotas[1], quotas[2] = expert_P, device_P, tokens_P
        fill_quotas(counts, quotas.reshape(-1), *topology.arrays)
        return cls(counts, quotas, topology)

    def _fault(self) -> str:
        """What is wrong with the quotas."""
        own_DE, near_DE, far_DE = np.zeros((3, *self.counts_DE.shape), np.int64)
        expert_P, device_P, *tokens = self.quotas
        for table_DE, quota_P in zip((own_DE, near_DE, far_DE), tokens, strict=True):
            table_DE[device_P, expert_P] = quota_P
        leaving_DE = self.counts_DE - own_DE
        left_NE = self.topology.sum_over_nodes(leaving_DE) - self.topology.sum_over_nodes(near_DE)
        far_NE = self.topology.sum_over_nodes(far_DE)
        lowest = min(part.min() for part in (leaving_DE, left_NE, own_DE, near_DE, far_DE))
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
        return (self.counts_DE, self.quotas.reshape(-1), *self.topology.arrays)

    def sums(self) -> np.ndarray:
        """Own tokens of each device, and tokens that it sends to and receives from other devices.

        The rows are own tokens, tokens sent to and received from its node, and tokens sent to and received
        from other nodes, int64 ``[5, D]``.
        """
        sums = np.zeros((5, self.topology.num_devices), np.int64)
        sum_quota_tokens(*self._arrays, sums)
        return sums

    def rows_from(self, source: int) -> SentRows:
        """Tokens that one source sends. They sum to ``counts_DE[source]`` for each expert."""
        chunks = np.empty((3, self.quotas.shape[1]), np.int64)
        num_chunks = quota_row(*self._arrays, source, *chunks)
        return SentRows(*chunks[:, :num_chunks])

    def device_tokens_D(self) -> np.ndarray:
        """(token, k) pairs that every device computes: int64 ``[D]``."""
        sums = self.sums()
        return np.asarray(sums[0] + sums[2] + sums[4])

    def cross_node_tokens(self) -> int:
        """Number of (token, k) pairs that are sent to another node."""
        return int(self.quotas[4].sum())
