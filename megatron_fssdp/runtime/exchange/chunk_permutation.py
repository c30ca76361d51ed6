"""Reorders chunks of consecutive rows whose sizes the host knows, without a sort or a synchronisation."""

import numpy as np
import torch


def chunk_permutation(sizes: np.ndarray, order: np.ndarray, device: torch.device) -> torch.Tensor | None:
    """Row index that brings consecutive chunks of rows into another order.

    ``x.index_select(0, index)`` has chunk ``order[0]`` first, then chunk ``order[1]``, and so on.

    Args:
        sizes: Number of rows of each chunk in the present order, int64 ``[chunks]``.
        order: New order of the chunks, int64 ``[chunks]``: a permutation of ``range(len(sizes))``.
        device: Device of the index.

    Returns:
        int64 index ``[sum(sizes)]``, or ``None`` if every row stays in its place.
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
    """Order, int64 ``[rows * columns]``, that turns row-major chunks of a grid into column-major chunks."""
    return np.arange(rows * columns).reshape(rows, columns).T.reshape(-1)


def select(x: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    """Rows of ``x`` in the order of an index from :func:`chunk_permutation`."""
    return x if index is None else x.index_select(0, index)
