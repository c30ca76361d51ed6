"""Orders of the rows that have arrived at a device: as they came, or by expert for the experts' compute.

Shape letters: R rows that a rank receives, M model dimension, G experts present on a device, S ranks that
send rows.
"""

from functools import cached_property

import numpy as np
import torch

from megatron_fssdp.runtime.exchange.chunk_permutation import chunk_permutation, select, transposed_order


class ArrivalOrder:
    """Brings rows from the order of arrival (by source, then expert) into order by expert, and back.

    Both row indices are made at their first use, so that the dispatch does not wait for them.

    Args:
        received_SG: Number of rows of each present expert from each source, int64 ``[S, G]`` on the host.
        device: Device of the rows.
    """

    def __init__(self, received_SG: np.ndarray, device: torch.device) -> None:
        self._received_SG = received_SG
        self._device = device

    @cached_property
    def by_expert(self) -> torch.Tensor | None:
        """Row index that brings received rows into order by expert, int64 ``[R]``; ``None`` for no change."""
        return self._transposing(self._received_SG)

    @cached_property
    def by_source(self) -> torch.Tensor | None:
        """Row index of the inverse reordering, int64 ``[R]``; ``None`` for no change."""
        return self._transposing(self._received_SG.T)

    def sort_by_expert(self, rows: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Received rows ``[R, M]`` and their probabilities ``[R]`` in the order of the present experts."""
        return select(rows, self.by_expert), select(probs, self.by_expert)

    def sort_by_source(self, rows: torch.Tensor) -> torch.Tensor:
        """The experts' results ``[R, M]`` in the order in which the rows arrived."""
        return select(rows, self.by_source)

    def _transposing(self, sizes: np.ndarray) -> torch.Tensor | None:
        return chunk_permutation(sizes.reshape(-1), transposed_order(*sizes.shape), self._device)
