"""Reorders runs of rows whose sizes the host knows: no sort, no synchronisation."""

import numpy as np
import torch


def chunk_permutation(sizes: np.ndarray, order: np.ndarray, device: torch.device) -> torch.Tensor | None:
    """Row index that brings consecutive chunks into another order.

    ``x.index_select(0, index)`` holds chunk ``order[0]`` first, then ``order[1]``, ...

    Args:
        sizes: Rows of each chunk as the rows stand now, int64.
        order: The chunks' new order, a permutation of ``range(len(sizes))``.
        device: Where the index is needed.

    Returns:
        int64 index of all rows, or ``None`` where every row stays in its place.
    """
    starts = np.cumsum(sizes) - sizes
    moved = sizes[order]
    filled = np.flatnonzero(moved)
    shift = (starts[order] - (np.cumsum(moved) - moved))[filled]
    if not shift.any():
        return None
    num_rows = int(sizes.sum())
    table = torch.from_numpy(np.stack([shift, moved[filled]])).to(device, non_blocking=True)
    offsets = torch.repeat_interleave(table[0], table[1], output_size=num_rows)
    return offsets + torch.arange(num_rows, device=device)


def transposed_order(rows: int, columns: int) -> np.ndarray:
    """Order that turns row-major chunks of a ``[rows, columns]`` grid into column-major ones."""
    return np.arange(rows * columns).reshape(rows, columns).T.reshape(-1)


def select(x: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    """Rows of ``x`` by an index of :func:`chunk_permutation`."""
    return x if index is None else x.index_select(0, index)
