"""Copies rows to several places, and sums the rows that belong together: each is the other's backward pass.

Sums are formed in fp32 or better. torch's ``index_select`` and ``index_add`` would sum rows of bf16 in bf16.

Shape letters: U rows, P places (a row has none, one or several), M model dimension.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def spread_rows(rows: Tensor, row_P: Tensor) -> Tensor:
    """The row of each place, ``[P, M]``. The backward pass sums the gradients of a row's places.

    Args:
        rows: Rows, ``[U, M]``.
        row_P: Row of each place, int64 ``[P]``.
    """
    spread: Tensor = _Spread.apply(rows, row_P)
    return spread


def sum_places(places: Tensor, row_P: Tensor, num_rows: int) -> Tensor:
    """Sums of the places of each row, ``[U, M]`` in the data type of ``places``; zeros for rows without any.

    Args:
        places: Values of the places, ``[P, M]``.
        row_P: Row to which each place belongs, int64 ``[P]``.
        num_rows: Number of rows, U.
    """
    sums: Tensor = _Sum.apply(places, row_P, num_rows)
    return sums


def _summed(places: Tensor, row_P: Tensor, num_rows: int) -> Tensor:
    wide = torch.promote_types(places.dtype, torch.float32)
    sums = places.new_zeros((num_rows, *places.shape[1:]), dtype=wide)
    return sums.index_add_(0, row_P, places.to(wide)).to(places.dtype)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, row_P: Tensor) -> Tensor:
        ctx.row_P, ctx.num_rows = row_P, len(rows)
        return rows.index_select(0, row_P)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _summed(gradient, ctx.row_P, ctx.num_rows), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, places: Tensor, row_P: Tensor, num_rows: int) -> Tensor:
        ctx.row_P = row_P
        return _summed(places, row_P, num_rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.index_select(0, ctx.row_P), None, None
