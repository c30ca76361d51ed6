"""A collective on rows and its dual, each the other's backward pass."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

RowCollective = Callable[[Tensor, list[int], dist.ProcessGroup], Tensor]
"""From rows, the rows of each rank and the ranks to other rows."""


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
        collective: What is called.
        dual: What takes the gradient back; all ranks call it if ``x`` requires a gradient on all of them.
        x: The rows.
        splits: Rows of each rank.
        group: The ranks.
    """
    result: Tensor = _Dual.apply(x, splits, group, collective, dual)
    return result
