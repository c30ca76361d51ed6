"""Tensor-parallel ranks that divide their common tokens, and what that means for gradients (Parm, §III-B).

Without sequence parallelism the ranks of a tensor-parallel group have the same tokens. What follows a
gather is then the same on all of them, so its backward pass is a split and needs no messages; the backward
pass of a split is a gather.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_fssdp.collectives.rows.dual_collective import call_with_dual
from megatron_fssdp.collectives.rows.uneven_all_gather import gather_rows


class _SumOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.to(torch.promote_types(grad.dtype, torch.float32), copy=True)
        dist.all_reduce(total, group=ctx.group)
        return total.to(grad.dtype), None


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


def split_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's part of a tensor that all ranks of the group have (MP-Split); backward gathers.

    Args:
        x: The same tensor on all ranks, ``[T, ...]``; the size of the group must divide T.
        group: The tensor-parallel ranks.
    """
    return split_rows(x, [len(x) // group.size()] * group.size(), group)


def split_rows(x: Tensor, splits: list[int], group: dist.ProcessGroup) -> Tensor:
    """This rank's rows of a tensor that all ranks of the group have; backward gathers.

    Args:
        x: ``[sum(splits), ...]``, the same on all ranks.
        splits: Rows of each rank.
        group: The ranks.
    """
    return call_with_dual(_own_rows, gather_rows, x, splits, group)


def gather_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All ranks' parts one after another (MP-AllGather); backward takes this rank's part.

    Args:
        x: This rank's part, ``[T / Y, ...]``.
        group: The tensor-parallel ranks, which all go on with the result in the same way.
    """
    return call_with_dual(gather_rows, _own_rows, x, [len(x)] * group.size(), group)


def sum_over(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum over the ranks, which all go on with it in the same way: the backward pass needs no messages.

    Args:
        x: Of the same shape on all ranks.
        group: The ranks.
    """
    total: Tensor = _SumOver.apply(x, group)
    return total


def sum_gradient(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``x`` itself, for a use in which each rank finds only its tokens' part of the gradient.

    Args:
        x: The same on all ranks.
        group: The ranks whose gradients are summed, in fp32 or wider.
    """
    same: Tensor = _SumGradient.apply(x, group)
    return same


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """``x`` itself, its gradient multiplied."""
    same: Tensor = _ScaleGradient.apply(x, factor)
    return same


def _own_rows(x: Tensor, splits: list[int], group: dist.ProcessGroup) -> Tensor:
    return x.split(splits)[group.rank()].clone()
