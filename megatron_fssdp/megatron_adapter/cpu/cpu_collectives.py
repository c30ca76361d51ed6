"""Makes torch's collectives on gloo accept what NCCL accepts.

In Megatron's expert tensor parallelism, every rank has another number of rows in an all-gather or a
reduce-scatter. NCCL accepts lists of tensors of different sizes and gloo does not. Here, gloo's uneven
all-to-all does the same work.
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
        fill_from_all(tensor_list, tensor, group)
        return None

    return all_gather


def uneven_reduce_scatter(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``reduce_scatter`` that also accepts a list of tensors of different sizes."""

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
        sum_of_own(output, input_list, group)
        return None

    return reduce_scatter


def fill_from_all(pieces: Sequence[torch.Tensor], own: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """All-gather into tensors of different sizes on gloo, whose own all-gather refuses different sizes.

    Args:
        pieces: torch.Tensors to fill, one for each rank, with the size of that rank's contribution.
        own: This rank's contribution.
        group: Process group of the ranks.
    """
    sizes = [piece.numel() for piece in pieces]
    copies = own.reshape(-1).repeat(len(pieces))
    received = copies.new_empty(sum(sizes))
    dist.all_to_all_single(received, copies, sizes, [own.numel()] * len(pieces), group=group)
    for piece, values in zip(pieces, received.split(sizes), strict=True):
        piece.copy_(values.view_as(piece))


def sum_of_own(output: torch.Tensor, pieces: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Reduce-scatter of tensors of different sizes on gloo, whose own one refuses different sizes.

    It adds in rank order. Half precision is added in fp32.

    Args:
        output: torch.Tensor to fill with the sum of all ranks' contributions to this rank.
        pieces: This rank's contributions to the sums, one for each rank.
        group: Process group of the ranks.
    """
    sizes = [piece.numel() for piece in pieces]
    parts = output.new_empty(len(pieces), *output.shape)
    rows = torch.cat([piece.reshape(-1) for piece in pieces])
    dist.all_to_all_single(parts.view(-1), rows, [output.numel()] * len(pieces), sizes, group=group)
    output.copy_(parts.sum(dim=0))


def _equal_sizes(tensors: Sequence[torch.Tensor]) -> bool:
    # All ranks have lists of the same sizes, so all of them take the same branch.
    return len({tensor.shape for tensor in tensors}) <= 1
