"""Reorders chunks of consecutive rows whose sizes the host knows, without a sort or a synchronisation."""

import numpy as np
import torch


def chunk_permutation(
    sizes: np.ndarray, order: np.ndarray, device: torch.device, *, ones: torch.Tensor | None = None
) -> torch.Tensor | None:
    """Row index that brings consecutive chunks of rows into another order.

    ``x.index_select(0, index)`` has chunk ``order[0]`` first, then chunk ``order[1]``, and so on. Within a
    chunk, the index grows by one from row to row. It is therefore the running sum of ones, with another
    summand where a chunk begins::

        sizes 3, 2; order 1, 0      summands   3  1 | -4  1  1
                                    index      3  4 |  0  1  2

    Args:
        sizes: Number of rows of each chunk in the present order, int64 ``[chunks]``.
        order: New order of the chunks, int64 ``[chunks]``: a permutation of ``range(len(sizes))``.
        device: Device of the index.
        ones: Ones on the device, int64 ``[sum(sizes)]`` or longer; ``None`` makes them. A caller can queue
            them before it knows the sizes.

    Returns:
        int64 index ``[sum(sizes)]``, or ``None`` if every row stays in its place.
    """
    starts = np.cumsum(sizes) - sizes
    moved = order[sizes[order] > 0]
    first, size = starts[moved], sizes[moved]
    position = np.cumsum(size) - size
    if np.array_equal(first, position):
        return None
    summand = first.copy()
    summand[1:] -= (first + size - 1)[:-1]
    num_rows = int(sizes.sum())
    if ones is None:
        ones = torch.ones(num_rows, dtype=torch.int64, device=device)
    table = torch.from_numpy(np.stack([position, summand])).to(device, non_blocking=True)
    return ones[:num_rows].scatter(0, table[0], table[1]).cumsum(0)


def transposed_order(rows: int, columns: int) -> np.ndarray:
    """Order, int64 ``[rows * columns]``, that turns row-major chunks of a grid into column-major chunks."""
    return np.arange(rows * columns).reshape(rows, columns).T.reshape(-1)


def select(x: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    """Rows of ``x`` in the order of an index from :func:`chunk_permutation`."""
    return x if index is None else x.index_select(0, index)
