"""Collectives of torch as NCCL understands them, on gloo.

Megatron's expert tensor parallelism gathers and reduce-scatters as many rows as each rank
happens to have. NCCL serves lists of tensors of different sizes, gloo refuses them; its
uneven all-to-all does the same work.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist


def without_device_ids(original: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.distributed.barrier`` without an argument that only NCCL takes."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_ids", None)
        return original(*args, **kwargs)

    return call


def uneven_all_gather(original: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.distributed.all_gather`` that also fills a list of tensors of different sizes."""

    @functools.wraps(original)
    def all_gather(
        tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        if async_op or _equal_sizes(tensor_list):
            return original(tensor_list, tensor, group=group, async_op=async_op)
        copies = tensor.reshape(-1).repeat(len(tensor_list))
        _fill(tensor_list, _exchange(copies, [tensor.numel()] * len(tensor_list), tensor_list, group))
        return None

    return all_gather


def uneven_reduce_scatter(original: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.distributed.reduce_scatter`` that also sums a list of tensors of different sizes.

    The contributions are summed in the order of the ranks and, in half precision, in fp32.
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
        rows = torch.cat([piece.reshape(-1) for piece in input_list])
        received = [output] * len(input_list)
        parts = _exchange(rows, [piece.numel() for piece in input_list], received, group)
        output.copy_(parts.view(len(input_list), *output.shape).sum(dim=0))
        return None

    return reduce_scatter


def _equal_sizes(tensors: Sequence[torch.Tensor]) -> bool:
    # All ranks have lists of the same sizes and decide alike.
    return len({tensor.shape for tensor in tensors}) <= 1


def _exchange(
    send: torch.Tensor, send_splits: list[int], received: Sequence[torch.Tensor], group: Any
) -> torch.Tensor:
    receive_splits = [tensor.numel() for tensor in received]
    out = send.new_empty(sum(receive_splits))
    dist.all_to_all_single(out, send, receive_splits, send_splits, group=group)
    return out


def _fill(tensors: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
    for tensor, values in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(values.view_as(tensor))
