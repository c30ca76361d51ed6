"""Functions on rows with their backward passes, which may contain collectives."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

OnRows = Callable[..., tuple[Tensor, ...]]
"""A function from tensors to new tensors or views, without autograd."""


class _Dual(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, there: OnRows, back: OnRows, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.back = back
        return there(*tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.back(*gradients)


def call_with_dual(there: OnRows, back: OnRows, *tensors: Tensor) -> tuple[Tensor, ...]:
    """``there(*tensors)``; the backward pass is ``back`` of the results' gradients.

    With collectives in them, the tensors must require a gradient on all ranks or on none.
    """
    results: tuple[Tensor, ...] = _Dual.apply(there, back, *tensors)
    return results


def gather_rows(x: Tensor, sizes: list[int], group: dist.ProcessGroup) -> Tensor:
    """The rows of all ranks, ``sizes[rank]`` of each, in rank order: ``[sum(sizes), ...]``; no autograd."""
    gathered = x.new_empty(sum(sizes), *x.shape[1:])
    dist.all_gather(list(gathered.split(sizes)), x.contiguous(), group=group)
    return gathered
