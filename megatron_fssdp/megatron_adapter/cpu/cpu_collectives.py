"""Makes torch's collectives on gloo accept what NCCL accepts.

In Megatron's expert tensor parallelism, every rank has another number of rows in an all-gather or a
reduce-scatter, which gloo does not accept. Here, its uneven all-to-all does the same work.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist


def without_device_ids(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``torch.distributed.barrier`` without the argument ``device_ids``, which only NCCL accepts."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_ids", None)
        return original(*args, **kwargs)

    return call


def uneven_all_gather(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return an ``all_gather`` that also accepts a list of tensors of different sizes."""

    @functools.wraps(original)
    def all_gather(
        tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        if async_op or _equal_sizes(tensor_list):
            return original(tensor_list, tensor, group=group, async_op=async_op)
        sizes = [piece.numel() for piece in tensor_list]
        copies = tensor.reshape(-1).repeat(len(tensor_list))
        received = copies.new_empty(sum(sizes))
        dist.all_to_all_single(received, copies, sizes, [tensor.numel()] * len(sizes), group=group)
        for piece, values in zip(tensor_list, received.split(sizes), strict=True):
            piece.copy_(values.view_as(piece))
        return None

    return all_gather


def uneven_reduce_scatter(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``reduce_scatter`` that also accepts a list of tensors of different sizes.

    These are added in rank order, in fp32 if they have half precision.
    """

    @functools.wraps(original)
    def reduce_scatter(
        output: torch.Tensor,
        input_list: list[torch.Tensor],
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if async_op or op != dist.ReduceOp.SUM or _equal_sizes(input_list):
            return original(output, input_list, op=op, group=group, async_op=async_op)
        sizes = [piece.numel() for piece in input_list]
        parts = output.new_empty(len(sizes), *output.shape)
        rows = torch.cat([piece.reshape(-1) for piece in input_list])
        dist.all_to_all_single(parts.view(-1), rows, [output.numel()] * len(sizes), sizes, group=group)
        output.copy_(parts.sum(dim=0))
        return None

    return reduce_scatter


def _equal_sizes(tensors: Sequence[torch.Tensor]) -> bool:
    # All ranks have lists of the same sizes, so all of them take the same branch.
    return len({tensor.shape for tensor in tensors}) <= 1
