"""All-to-all of rows whose number may differ for every pair of ranks."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_fssdp.collectives.messages import exchange, wait_for
from megatron_fssdp.collectives.rows.two_node_exchange import Arrival


class UnevenAllToAll(torch.autograd.Function):
    """All-to-all of rows; its backward pass is the same all-to-all with swapped splits."""

    @staticmethod
    def forward(
        ctx: Any,
        output_splits: list[int],
        input_splits: list[int],
        group: dist.ProcessGroup,
        meanwhile: Callable[[], object] | None,
        *rows: Tensor,
    ) -> tuple[Tensor, ...]:
        """Exchange the rows; the arguments are those of :func:`exchange_rows`."""
        ctx.output_splits, ctx.input_splits, ctx.group = output_splits, input_splits, group
        return exchange_rows(rows, output_splits, input_splits, group, meanwhile)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Send the gradients of the rows back to the ranks that sent the rows."""
        wanted = ctx.needs_input_grad[4:]
        sent = [gradient for gradient, is_wanted in zip(gradients, wanted, strict=True) if is_wanted]
        received = iter(exchange_rows(sent, ctx.input_splits, ctx.output_splits, ctx.group))
        return None, None, None, None, *(next(received) if is_wanted else None for is_wanted in wanted)


def uneven_all_to_all(
    rows: Sequence[Tensor],
    output_splits: Sequence[int],
    input_splits: Sequence[int],
    group: dist.ProcessGroup,
    *,
    meanwhile: Callable[[], object] | None = None,
) -> tuple[Tensor, ...]:
    """Send ``input_splits[d]`` rows of each tensor to rank ``d`` and receive ``output_splits[d]`` from it.

    Every rank of the group must call it, even without rows. The same holds for the backward pass, so each
    tensor of ``rows`` must require a gradient on all ranks or on none.

    Args:
        rows: Tensors whose rows travel together, ``[sum(input_splits), ...]`` each, in the order of
            destinations.
        output_splits: Number of rows to receive from each rank.
        input_splits: Number of rows to send to each rank.
        group: Process group of the ranks.
        meanwhile: Work for the host to do while the rows travel, in the forward pass only.

    Returns:
        The same number of tensors, ``[sum(output_splits), ...]`` each, with rows in the order of sources.

    Raises:
        ValueError: The splits do not fit the group or the rows.
    """
    world_size = dist.get_world_size(group)
    output_list = [int(split) for split in output_splits]
    input_list = [int(split) for split in input_splits]
    if len(output_list) != world_size or len(input_list) != world_size:
        raise ValueError(
            f"got {len(output_list)} output splits and {len(input_list)} input splits, wanted {world_size} "
            "of each: one for each rank of the group"
        )
    num_rows = [x.shape[0] for x in rows]
    if min(*output_list, *input_list) < 0 or any(sum(input_list) != number for number in num_rows):
        raise ValueError(
            f"input splits {input_list} and output splits {output_list} do not fit tensors of {num_rows} "
            "rows; wanted numbers >= 0 and input splits that sum to the rows"
        )
    if world_size == 1:
        if output_list != input_list:
            raise ValueError(
                f"the only rank of the group sends {input_list[0]} rows and expects {output_list[0]}: wanted "
                "equal numbers"
            )
        if meanwhile is not None:
            meanwhile()
        return tuple(rows)
    received: tuple[Tensor, ...] = UnevenAllToAll.apply(output_list, input_list, group, meanwhile, *rows)
    return received


def exchange_rows(
    rows: Sequence[Tensor],
    output_splits: list[int],
    input_splits: list[int],
    group: dist.ProcessGroup,
    meanwhile: Callable[[], object] | None = None,
) -> tuple[Tensor, ...]:
    """Do the same as :func:`uneven_all_to_all`, without autograd and checks, for two ranks or more."""
    arrival = start_exchange(rows, output_splits, input_splits, group)
    if meanwhile is not None:
        meanwhile()
    return arrival()


def start_exchange(
    rows: Sequence[Tensor], output_splits: list[int], input_splits: list[int], group: dist.ProcessGroup
) -> Arrival:
    """Start what :func:`exchange_rows` does, and return the function that waits for its result."""
    sent = [x.contiguous() for x in rows]
    received = tuple(x.new_empty(sum(output_splits), *x.shape[1:]) for x in rows)
    # All exchanges run at the same time. One after the other, each small one would add its latency.
    works: list[dist.Work] = []
    for tag, (out, x) in enumerate(zip(received, sent, strict=True)):
        works += _start_one(out, x, output_splits, input_splits, group, tag)

    def arrive() -> tuple[Tensor, ...]:
        wait_for(works)
        sent.clear()  # Messages read this memory until here.
        return received

    return arrive


def _start_one(
    out: Tensor,
    x: Tensor,
    output_splits: list[int],
    input_splits: list[int],
    group: dist.ProcessGroup,
    tag: int,
) -> list[dist.Work]:
    if x.device.type != "cpu":
        work = dist.all_to_all_single(out, x, output_splits, input_splits, group=group, async_op=True)
        assert work is not None  # It is None only on ranks outside the group.
        return [work]
    return exchange(
        dict(enumerate(x.split(input_splits))), dict(enumerate(out.split(output_splits))), group, tag
    )
