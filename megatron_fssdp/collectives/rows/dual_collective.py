"""Pairs of collectives on rows, each of which is the backward pass of the other."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

RowCollective = Callable[[Tensor, list[int], dist.ProcessGroup], Tensor]
"""A collective: from rows, the number of rows of each rank, and the process group, to other rows."""


class _Dual(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        splits: list[int],
        group: dist.ProcessGroup,
        collective: RowCollective,
        dual: RowCollective,
    ) -> Tensor:
        ctx.splits, ctx.group, ctx.dual = splits, group, dual
        return collective(x, splits, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ctx.dual(grad, ctx.splits, ctx.group), None, None, None, None


def call_with_dual(
    collective: RowCollective, dual: RowCollective, x: Tensor, splits: list[int], group: dist.ProcessGroup
) -> Tensor:
    """``collective(x, splits, group)``, whose backward pass is ``dual`` of the gradient with the same splits.

    Args:
        collective: Collective of the forward pass.
        dual: Collective of the backward pass, applied to the gradient. All ranks must take part in it, so
            ``x`` must require a gradient on all ranks or on none.
        x: Rows of this rank, ``[rows, ...]``.
        splits: Number of rows of each rank.
        group: Process group of the ranks.
    """
    result: Tensor = _Dual.apply(x, splits, group, collective, dual)
    return result
