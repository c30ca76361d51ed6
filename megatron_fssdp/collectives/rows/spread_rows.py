"""Copies tokens to several rows, and sums the rows of a token: each is the other's backward pass.

Sums are formed in fp32 or better. torch's ``index_select`` and ``index_add`` would sum rows of bf16 in bf16.

Shape letters: T tokens, A rows that a rank sends (a token has none, one or several), M model dimension.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def spread_rows(tokens: Tensor, token_A: Tensor) -> Tensor:
    """Copies of tokens, one for each row: ``[A, M]``. The backward pass sums the gradients of a token's rows.

    Args:
        tokens: Hidden states, ``[T, M]``.
        token_A: Token of each row, int64 ``[A]``.
    """
    rows: Tensor = _Spread.apply(tokens, token_A)
    return rows


def sum_rows(rows: Tensor, token_A: Tensor, num_tokens: int) -> Tensor:
    """Sums of the rows of each token, ``[T, M]`` in the data type of ``rows``; zeros if a token has no row.

    Args:
        rows: Rows to sum, ``[A, M]``.
        token_A: Token to which each row belongs, int64 ``[A]``.
        num_tokens: Number of tokens, T.
    """
    sums: Tensor = _Sum.apply(rows, token_A, num_tokens)
    return sums


def _summed(rows: Tensor, token_A: Tensor, num_tokens: int) -> Tensor:
    wide = torch.promote_types(rows.dtype, torch.float32)
    sums = rows.new_zeros((num_tokens, *rows.shape[1:]), dtype=wide)
    return sums.index_add_(0, token_A, rows.to(wide)).to(rows.dtype)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, token_A: Tensor) -> Tensor:
        ctx.token_A, ctx.num_tokens = token_A, len(tokens)
        return tokens.index_select(0, token_A)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _summed(gradient, ctx.token_A, ctx.num_tokens), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, token_A: Tensor, num_tokens: int) -> Tensor:
        ctx.token_A = token_A
        return _summed(rows, token_A, num_tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.index_select(0, ctx.token_A), None, None
