"""SparseAllGather and SparseReduceScatter: exact transposes, each other's backward.

A rank that owns nothing, or on which nothing is present, still has to take part in both
directions, or the others wait for it for ever. Autograd runs a node only when an output of
it leads to the loss, so both functions pass an ``anchor`` through: give them a tensor that
every rank differentiates (the layer's hidden states) and go on with the returned one::

    hidden, weights = sparse_all_gather(hidden, owned_rows, transfer, placement)

Shape letters: n_owned and n_present are this rank's numbers of owned and present experts.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_fssdp.collectives.sparse.sparse_transfer import SparseTransfer
from megatron_fssdp.planning.placement.placement import ExpertPlacement


class SparseAllGather(torch.autograd.Function):
    """Rows of the owned experts to rows of the present ones; backward is SparseReduceScatter.

    ``apply(anchor, owned_rows, transfer, placement) -> (anchor, present_rows)`` with
    ``owned_rows`` ``[n_owned, num_elements]`` and ``present_rows`` ``[n_present, num_elements]``,
    both in ascending order of the experts.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, owned_rows: Tensor, transfer: SparseTransfer, placement: ExpertPlacement
    ) -> tuple[Tensor, Tensor]:
        """Gather the rows."""
        ctx.transfer, ctx.placement = transfer, placement
        return anchor.view_as(anchor), _gather_rows(owned_rows, transfer, placement)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, anchor_grad: Tensor, present_grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Sum the rows' gradients at the owners."""
        return anchor_grad, _reduce_rows(present_grad, ctx.transfer, ctx.placement), None, None


class SparseReduceScatter(torch.autograd.Function):
    """Rows of the present experts to sums over the holders at the owners; backward is SparseAllGather.

    ``apply(anchor, present_rows, transfer, placement) -> (anchor, owned_rows)`` with shapes and
    order as in :class:`SparseAllGather`.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, present_rows: Tensor, transfer: SparseTransfer, placement: ExpertPlacement
    ) -> tuple[Tensor, Tensor]:
        """Sum the rows."""
        ctx.transfer, ctx.placement = transfer, placement
        return anchor.view_as(anchor), _reduce_rows(present_rows, transfer, placement)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, anchor_grad: Tensor, owned_grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Bring the sums' gradients to every holder."""
        return anchor_grad, _gather_rows(owned_grad, ctx.transfer, ctx.placement), None, None


def sparse_all_gather(
    anchor: Tensor, owned_rows: Tensor, transfer: SparseTransfer, placement: ExpertPlacement
) -> tuple[Tensor, Tensor]:
    """Bring every present expert's row here, differentiably.

    Args:
        anchor: Any tensor that leads to the loss on every rank and requires a gradient.
        owned_rows: ``[n_owned, num_elements]``, this rank's experts in ascending order.
        transfer: Bound to a plan for ``placement`` and to the rows' size and dtype.
        placement: Owners and holders.

    Returns:
        The anchor to go on with, and ``[n_present, num_elements]`` in ascending order.
    """
    return SparseAllGather.apply(anchor, owned_rows, transfer, placement)


def sparse_reduce_scatter(
    anchor: Tensor, present_rows: Tensor, transfer: SparseTransfer, placement: ExpertPlacement
) -> tuple[Tensor, Tensor]:
    """Sum every expert's rows over its holders, differentiably.

    Args:
        anchor: Any tensor that leads to the loss on every rank and requires a gradient.
        present_rows: ``[n_present, num_elements]``, the experts here in ascending order.
        transfer: Bound to a plan for ``placement`` and to the rows' size and dtype.
        placement: Owners and holders.

    Returns:
        The anchor to go on with, and ``[n_owned, num_elements]`` in ascending order.
    """
    return SparseReduceScatter.apply(anchor, present_rows, transfer, placement)


def _gather_rows(owned_rows: Tensor, transfer: SparseTransfer, placement: ExpertPlacement) -> Tensor:
    owned, present = placement.owned_by(transfer.rank), placement.experts_on(transfer.rank)
    _check_rows(owned_rows, len(owned), transfer.num_elements, "owned_rows")
    owned_rows = owned_rows.contiguous()
    present_rows = owned_rows.new_empty(len(present), transfer.num_elements)
    row_of = {expert: row for row, expert in enumerate(present)}
    sources = dict(zip(owned, owned_rows, strict=True))
    pending = transfer.start_all_gather(
        {expert: sources[expert] for expert in transfer.shared_experts},
        out={expert: present_rows[row_of[expert]] for expert in transfer.received_experts},
    )
    for expert, source in sources.items():
        present_rows[row_of[expert]].copy_(source)
    pending.wait()
    return present_rows


def _reduce_rows(present_rows: Tensor, transfer: SparseTransfer, placement: ExpertPlacement) -> Tensor:
    owned, present = placement.owned_by(transfer.rank), placement.experts_on(transfer.rank)
    _check_rows(present_rows, len(present), transfer.num_elements, "present_rows")
    present_rows = present_rows.contiguous()
    owned_rows = present_rows.new_empty(len(owned), transfer.num_elements)
    parts = dict(zip(present, present_rows, strict=True))
    targets = dict(zip(owned, owned_rows, strict=True))
    held = (*transfer.shared_experts, *transfer.received_experts)
    pending = transfer.start_reduce_scatter(
        {expert: parts[expert] for expert in held},
        out={expert: targets[expert] for expert in transfer.shared_experts},
    )
    for expert, target in targets.items():
        if expert not in transfer.shared_experts:
            target.copy_(parts[expert])
    pending.wait()
    return owned_rows


def _check_rows(rows: Tensor, num_rows: int, num_elements: int, what: str) -> None:
    if tuple(rows.shape) != (num_rows, num_elements):
        raise ValueError(
            f"{what} has shape {tuple(rows.shape)}, wanted {(num_rows, num_elements)}: one row for each of "
            "this rank's experts in the placement"
        )
