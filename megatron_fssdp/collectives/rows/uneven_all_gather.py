"""Everybody's rows to everybody, and sums of rows back, in numbers that differ by rank."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fssdp.collectives.messages import exchange, wait_for
from megatron_fssdp.collectives.rows.dual_collective import call_with_dual

_GATHER_TAG = 3 << 16  # apart from other exchanges of the same ranks
_SCATTER_TAG = _GATHER_TAG + 1


def uneven_all_gather(x: Tensor, splits: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Rows of all ranks, in rank order; backward is :func:`uneven_reduce_scatter`.

    Every rank has to call it, also with no rows, and in backward too: ``x`` must require a
    gradient on all ranks or on none.

    Args:
        x: This rank's rows, ``[splits[rank], ...]``.
        splits: Rows of each rank.
        group: The ranks.

    Returns:
        ``[sum(splits), ...]``.
    """
    checked = _check(splits, group)
    if x.shape[0] != checked[group.rank()]:
        raise ValueError(
            f"got {x.shape[0]} rows on rank {group.rank()}, wanted {checked[group.rank()]} as its split says"
        )
    return x if len(checked) == 1 else call_with_dual(gather_rows, scatter_rows, x, checked, group)


def uneven_reduce_scatter(x: Tensor, splits: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Sums over the ranks of the rows that belong to this rank; backward is :func:`uneven_all_gather`.

    Every rank has to call it, under the same terms as :func:`uneven_all_gather`.

    Args:
        x: This rank's part of every row, by the rank it belongs to, ``[sum(splits), ...]``.
        splits: Rows that belong to each rank.
        group: The ranks.

    Returns:
        ``[splits[rank], ...]``.
    """
    checked = _check(splits, group)
    if x.shape[0] != sum(checked):
        raise ValueError(f"got {x.shape[0]} rows, wanted {sum(checked)}, the sum of the splits {checked}")
    return x if len(checked) == 1 else call_with_dual(scatter_rows, gather_rows, x, checked, group)


def fill_from_all(pieces: Sequence[Tensor], own: Tensor, group: dist.ProcessGroup | None) -> None:
    """All-gather into tensors of different sizes on a backend that refuses it: gloo.

    Args:
        pieces: One tensor a rank to fill, of that rank's size.
        own: This rank's contribution.
        group: The ranks.
    """
    sizes = [piece.numel() for piece in pieces]
    copies = own.reshape(-1).repeat(len(pieces))
    received = copies.new_empty(sum(sizes))
    dist.all_to_all_single(received, copies, sizes, [own.numel()] * len(pieces), group=group)
    for piece, values in zip(pieces, received.split(sizes), strict=True):
        piece.copy_(values.view_as(piece))


def sum_of_own(output: Tensor, pieces: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """Reduce-scatter of tensors of different sizes on a backend that refuses it: gloo.

    Sums are formed in rank order and, in half precision, in fp32.

    Args:
        output: Takes the sum of the ranks' pieces for this rank.
        pieces: This rank's contribution to each rank's sum.
        group: The ranks.
    """
    sizes = [piece.numel() for piece in pieces]
    parts = output.new_empty(len(pieces), *output.shape)
    rows = torch.cat([piece.reshape(-1) for piece in pieces])
    dist.all_to_all_single(parts.view(-1), rows, [output.numel()] * len(pieces), sizes, group=group)
    output.copy_(parts.sum(dim=0))


def gather_rows(x: Tensor, splits: list[int], group: dist.ProcessGroup) -> Tensor:
    """:func:`uneven_all_gather` without gradients and without checks."""
    x = x.contiguous()
    out = x.new_empty(sum(splits), *x.shape[1:])
    pieces = list(out.split(splits))
    if dist.get_backend(group) == "gloo":
        wait_for(exchange(dict.fromkeys(range(len(pieces)), x), dict(enumerate(pieces)), group, _GATHER_TAG))
    else:
        dist.all_gather(pieces, x, group=group)
    return out


def scatter_rows(x: Tensor, splits: list[int], group: dist.ProcessGroup) -> Tensor:
    """:func:`uneven_reduce_scatter` without gradients and without checks."""
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
        raise ValueError(f"got splits {numbers}, wanted {group.size()} numbers >= 0: one a rank of the group")
    return numbers
