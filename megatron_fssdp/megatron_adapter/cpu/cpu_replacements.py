"""Replacements for the few functions of Megatron and of torch's collectives that fail on the CPU."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist


def without_device_ids(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``torch.distributed.barrier`` without the argument ``device_ids``, which only NCCL accepts."""

    @functools.wraps(original)
    def call(*args: Any, device_ids: object = None, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    return call


def uneven_all_gather(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return an ``all_gather`` that also accepts tensors of different sizes, like NCCL's.

    In Megatron's expert tensor parallelism, every rank has another number of rows. gloo refuses them, but its
    all-to-all does not.
    """

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
    """Return a ``reduce_scatter`` that also accepts tensors of different sizes, which it adds in rank order.

    Sums of half precision are formed in fp32.
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


def move_to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Return the tensor, which is on the host already; the signature is Megatron's."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def norm_under_sequence_parallelism(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a constructor of torch's norms that accepts sequence parallelism.

    Megatron refuses it, although only the attribute ``sequence_parallel`` of their parameters is missing, by
    which it sums the gradients over the tensor-parallel ranks.
    """

    def build(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> Any:
        sequence_parallel, config.sequence_parallel = config.sequence_parallel, False
        try:
            norm = original(cls, config, hidden_size, eps, **kwargs)
        finally:
            config.sequence_parallel = sequence_parallel
        for parameter in norm.parameters():
            parameter.sequence_parallel = sequence_parallel
        return norm

    return build


def attention_of_other_widths(original: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor of Megatron's attention that accepts the widths of multi-latent attention.

    The class computes with any width, but takes that of its result from the config, as for ordinary heads.
    """

    @functools.wraps(original)
    def build(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        k_channels, v_channels = kwargs.pop("k_channels", None), kwargs.pop("v_channels", None)
        original(self, config, *args, **kwargs)
        if v_channels is not None:
            self.hidden_size_per_partition = self.num_attention_heads_per_partition * v_channels
        if k_channels is not None:
            self.hidden_size_per_attention_head = k_channels

    return build
