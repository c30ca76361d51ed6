"""All-gather and reduce-scatter of rows, whose number may differ from rank to rank."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fssdp.collectives.messages import exchange, wait_for
from megatron_fssdp.collectives.rows.dual_collective import call_with_dual

_GATHER_TAG = 3 << 16  # Differs from the tags of other exchanges of the same ranks.
_SCATTER_TAG = _GATHER_TAG + 1


def uneven_all_gather(x: Tensor, splits: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Gather the rows of all ranks in rank order; the backward pass is :func:`uneven_reduce_scatter`.

    Every rank must call it, even without rows. The same holds for the backward pass, so ``x`` must require a
    gradient on all ranks or on none.

    Args:
        x: Rows of this rank, ``[splits[rank], ...]``.
        splits: Number of rows of each rank.
        group: Process group of the ranks.

    Returns:
        ``[sum(splits), ...]``.

    Raises:
        ValueError: ``splits`` does not have one number >= 0 for each rank, or does not fit the rows of ``x``.
    """
    checked = _check(splits, group)
    if x.shape[0] != checked[group.rank()]:
        raise ValueError(
            f"x: got {x.shape[0]} rows on rank {group.rank()}, wanted {checked[group.rank()]}, the number in "
            "splits"
        )
    return x if len(checked) == 1 else call_with_dual(gather_rows, scatter_rows, x, checked, group)


def uneven_reduce_scatter(x: Tensor, splits: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Sum every row over the ranks, and give each rank its rows; backward is :func:`uneven_all_gather`.

    Every rank must call it, under the conditions of :func:`uneven_all_gather`.

    Args:
        x: This rank's summand of every row, ``[sum(splits), ...]``, by the rank that receives the sum.
        splits: Number of rows that each rank receives.
        group: Process group of the ranks.

    Returns:
        Sums of this rank's rows, ``[splits[rank], ...]``.

    Raises:
        ValueError: ``splits`` does not have one number >= 0 for each rank, or does not fit the rows of ``x``.
    """
    checked = _check(splits, group)
    if x.shape[0] != sum(checked):
        raise ValueError(f"x: got {x.shape[0]} rows, wanted {sum(checked)}, the sum of the splits {checked}")
    return x if len(checked) == 1 else call_with_dual(scatter_rows, gather_rows, x, checked, group)


def fill_from_all(pieces: Sequence[Tensor], own: Tensor, group: dist.ProcessGroup | None) -> None:
    """All-gather into tensors of different sizes on gloo, whose own all-gather refuses different sizes.

    Args:
        pieces: Tensors to fill, one for each rank, with the size of that rank's contribution.
        own: This rank's contribution.
        group: Process group of the ranks.
    """
    sizes = [piece.numel() for piece in pieces]
    copies = own.reshape(-1).repeat(len(pieces))
    received = copies.new_empty(sum(sizes))
    dist.all_to_all_single(received, copies, sizes, [own.numel()] * len(pieces), group=group)
    for piece, values in zip(pieces, received.split(sizes), strict=True):
        piece.copy_(values.view_as(piece))


def sum_of_own(output: Tensor, pieces: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """Reduce-scatter of tensors of different sizes on gloo, whose own one refuses different sizes.

    It adds in rank order. Half precision is added in fp32.

    Args:
        output: Tensor to fill with the sum of all ranks' contributions to this rank.
        pieces: This rank's contributions to the sums, one for each rank.
        group: Process group of the ranks.
    """
    sizes = [piece.numel() for piece in pieces]
    parts = output.new_empty(len(pieces), *output.shape)
    rows = torch.cat([piece.reshape(-1) for piece in pieces])
    dist.all_to_all_single(parts.view(-1), rows, [output.numel()] * len(pieces), sizes, group=group)
    output.copy_(parts.sum(dim=0))


def gather_rows(x: Tensor, splits: list[int], group: dist.ProcessGroup) -> Tensor:
    """Do the same as :func:`uneven_all_gather`, without autograd and without checks."""
    x = x.contiguous()
    out = x.new_empty(sum(splits), *x.shape[1:])
    pieces = list(out.split(splits))
    if dist.get_backend(group) == "gloo":
        wait_for(exchange(dict.fromkeys(range(len(pieces)), x), dict(enumerate(pieces)), group, _GATHER_TAG))
    else:
        dist.all_gather(pieces, x, group=group)
    return out


def scatter_rows(x: Tensor, splits: list[int], group: dist.ProcessGroup) -> Tensor:
    """Do the same as :func:`uneven_reduce_scatter`, without autograd and without checks."""
    pieces = list(x.contiguous().split(splits))
    out = x.new_empty(pieces[group.rank()].shape)
    if dist.get_backend(group) == "gloo":
        parts = out.new_empty(len(pieces), *out.shape)
        wait_for(exchange(dict(enumerate(pieces)), dict(enumerate(parts)), group, _SCATTER_TAG))
        torch.sum(parts, dim=0, out=out)
    else:
        dist.reduce_scatter(out, pieces, group=group)
    return out


def _check(splits: Sequence[int], group: dist.ProcessGroup) -> list[int]:
    numbers = [int(split) for split in splits]
    if len(numbers) != group.size() or min(numbers) < 0:
        raise ValueError(
            f"splits: got {numbers}, wanted {group.size()} numbers >= 0, one for each rank of the group"
        )
    return numbers
