"""Whole tables of one rank's part of a dispatch, made from the parts that the runtime uses.

Shape letters: E experts, D devices, G experts present on a device.
"""

import numpy as np

from megatron_fssdp.planning.dispatch.sent_rows import SentRows


class DispatchTables:
    """A dispatch whose row and column can also be read as tables of all experts.

    Attributes:
        counts_DE: (token, k) pairs by source device and expert, integers ``[D, E]``.
    """

    counts_DE: np.ndarray

    def rows_from(self, source: int) -> SentRows:
        """Tokens that one source sends."""
        raise NotImplementedError

    def received_by(self, device: int, expert_G: np.ndarray) -> np.ndarray:
        """Tokens that one device receives, by source and expert present there: int64 ``[D, G]``."""
        raise NotImplementedError

    def _experts_on(self, device: int) -> np.ndarray:
        """The experts that may be computed on a device, ascending, int64 ``[G]``."""
        raise NotImplementedError

    def from_source(self, source: int) -> np.ndarray:
        """Tokens that one source sends, by expert and receiving device: int64 ``[E, D]``.

        Row ``e`` sums to ``counts_DE[source, e]``.
        """
        return self.rows_from(source).table_ED(self.counts_DE.shape[1])

    def to_device(self, device: int) -> np.ndarray:
        """Tokens that one device receives, by source and expert: int64 ``[D, E]``.

        The result equals ``[from_source(s)[:, device] for s in devices]``.
        """
        expert_G = self._experts_on(device)
        table_DE = np.zeros(self.counts_DE.shape, np.int64)
        table_DE[:, expert_G] = self.received_by(device, expert_G)
        return table_DE
