"""Splits and gathers of tokens that all tensor-parallel ranks have, with their gradients (Parm, §III-B).

Without sequence parallelism, the ranks of a tensor-parallel group have the same tokens. After a gather, all
of them compute the same. The backward pass of the gather is therefore a split, which needs no messages. The
backward pass of a split is a gather.
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
    """This rank's part of a tensor that all ranks of the group have (MP-Split).

    The backward pass gathers the gradients of all parts.

    Args:
        x: Tokens ``[T, ...]``, equal on all ranks; T is a multiple of the group's size.
        group: Process group of the tensor-parallel ranks.

    Returns:
        ``[T / Y, ...]`` for Y ranks.
    """
    return split_rows(x, [len(x) // group.size()] * group.size(), group)


def split_rows(x: Tensor, splits: list[int], group: dist.ProcessGroup) -> Tensor:
    """This rank's rows of a tensor that all ranks of the group have.

    The backward pass gathers the gradients of all rows.

    Args:
        x: Rows ``[sum(splits), ...]``, equal on all ranks.
        splits: Number of rows of each rank.
        group: Process group of the ranks.

    Returns:
        ``[splits[rank], ...]``.
    """
    return call_with_dual(_own_rows, gather_rows, x, splits, group)


def gather_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The parts of all ranks, concatenated (MP-AllGather).

    The backward pass takes this rank's part of the gradient.

    Args:
        x: This rank's part of the tokens, ``[T / Y, ...]``.
        group: Process group of the Y tensor-parallel ranks; all of them must compute the same from the
            result.

    Returns:
        ``[T, ...]``, in rank order.
    """
    return call_with_dual(gather_rows, _own_rows, x, [len(x)] * group.size(), group)


def sum_over(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum of a tensor over the ranks of a group.

    All ranks must compute the same from the sum. Its gradient is then the gradient of every rank's ``x``, and
    the backward pass needs no messages.

    Args:
        x: Summand of this rank; any shape, which is equal on all ranks.
        group: Process group of the ranks.
    """
    total: Tensor = _SumOver.apply(x, group)
    return total


def sum_gradient(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return ``x``; the backward pass sums its gradient over the ranks, in fp32 or wider.

    Use it where each rank computes only the part of the gradient that comes from its own tokens.

    Args:
        x: Tensor that is equal on all ranks.
        group: Process group of the ranks whose gradients are summed.
    """
    same: Tensor = _SumGradient.apply(x, group)
    return same


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """Return ``x``; the backward pass multiplies its gradient by ``factor``."""
    same: Tensor = _ScaleGradient.apply(x, factor)
    return same


def _own_rows(x: Tensor, splits: list[int], group: dist.ProcessGroup) -> Tensor:
    return x.split(splits)[group.rank()].clone()
