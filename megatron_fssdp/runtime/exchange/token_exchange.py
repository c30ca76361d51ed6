"""Computes where the rows of one micro-batch go and come from, from data that every rank has.

A frozen :class:`DispatchRecord` carries everything that a micro-batch needs, because micro-batches interleave
under pipeline parallelism. ``row_exchanges.py`` moves the rows. Under expert tensor parallelism, the ranks
that share an expert exchange tokens over different expert-parallel groups, and then gather each other's rows.

Shape letters: T tokens of this rank, A rows that a rank sends, R rows that a rank receives,
M model dimension, E experts, D devices, G experts present on a device, S ranks that send rows,
X expert-tensor-parallel peers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_fssdp.planning.dispatch.token_dispatch import TokenDispatch
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.runtime.exchange.chunk_permutation import chunk_permutation, select, transposed_order


@dataclass(frozen=True, eq=False)
class DispatchRecord:
    """Where the rows of one micro-batch go and come from.

    Attributes:
        assignment_A: For each row that this rank sends, its index in the flattened ``[E, T]`` routing map,
            int64 ``[A]``. The order is the order of sending: by device, then expert, then token.
        token_A: Token of each of these rows, int64 ``[A]``.
        num_tokens: Number of tokens of this rank, T.
        send_D: Number of rows that this rank sends to each device, ``[D]``.
        receive_D: Number of rows that this rank receives from each device, ``[D]``.
        rows_X: Number of rows that each expert-tensor-parallel peer receives, ``[X]``; X is 1 if experts are
            whole.
        rows_per_expert: Number of rows of each present expert from all sources, ``[G]``, ascending by expert.
        received_SG: Number of rows of each present expert from each source, int64 ``[S, G]`` on the host. The
            S = X * D sources are ordered by peer, then device.
        by_expert: Row index that brings received rows (by peer, source, then expert) into order by expert,
            int64; ``None`` if the rows have this order already.
        by_source: Row index of the inverse reordering, int64 or ``None``.
    """

    assignment_A: torch.Tensor
    token_A: torch.Tensor
    num_tokens: int
    send_D: tuple[int, ...]
    receive_D: tuple[int, ...]
    rows_X: tuple[int, ...]
    rows_per_expert: tuple[int, ...]
    received_SG: np.ndarray
    by_expert: torch.Tensor | None
    by_source: torch.Tensor | None


def plan_exchange(
    routing_map: torch.Tensor,
    dispatch_of_peer: Sequence[TokenDispatch],
    placement: ExpertPlacement,
    device: int,
    peer: int = 0,
) -> DispatchRecord:
    """Compute one micro-batch's exchange from data that every rank has.

    Args:
        routing_map: Experts that each token of this rank selected, bool ``[T, E]``.
        dispatch_of_peer: For every expert-tensor-parallel peer, the dispatch of its tokens to devices.
        placement: Owners and replicas of the experts.
        device: Device number of this rank.
        peer: Number of this rank among its expert-tensor-parallel peers.
    """
    send_ED = dispatch_of_peer[peer].from_source(device)
    present = np.array(placement.experts_on(device), dtype=np.int64)
    receive_XDG = np.stack([dispatch.to_device(device)[:, present] for dispatch in dispatch_of_peer])
    receive_SG = np.concatenate(list(receive_XDG))  # The S sources are ordered by peer, then device.

    assignment = order_of_sending(routing_map, send_ED)
    tensors = assignment.device
    receive_GS = receive_SG.T
    return DispatchRecord(
        assignment_A=assignment,
        token_A=assignment % len(routing_map),
        num_tokens=len(routing_map),
        send_D=tuple(send_ED.sum(axis=0).tolist()),
        receive_D=tuple(receive_XDG[peer].sum(axis=1).tolist()),
        rows_X=tuple(receive_XDG.sum(axis=(1, 2)).tolist()),
        rows_per_expert=tuple(receive_SG.sum(axis=0).tolist()),
        received_SG=receive_SG,
        by_expert=chunk_permutation(receive_SG.reshape(-1), transposed_order(*receive_SG.shape), tensors),
        by_source=chunk_permutation(receive_GS.reshape(-1), transposed_order(*receive_GS.shape), tensors),
    )


def order_of_sending(routing_map: torch.Tensor, send_ED: np.ndarray) -> torch.Tensor:
    """The order in which a rank sends its rows: by device, then expert, then token.

    Args:
        routing_map: Experts that each token of this rank selected, bool ``[T, E]``.
        send_ED: Number of each expert's tokens that go to each device, int64 ``[E, D]``. The first device
            gets the first tokens of an expert, the next device the following ones, and so on.

    Returns:
        Indices into the flattened ``[E, T]`` routing map, int64 ``[A]``.
    """
    flat = true_positions(routing_map.t().reshape(-1), int(send_ED.sum()))
    return select(flat, chunk_permutation(send_ED.reshape(-1), transposed_order(*send_ED.shape), flat.device))


def true_positions(mask: torch.Tensor, num_true: int) -> torch.Tensor:
    """Positions at which a mask is true, ascending; the host does not wait for the device.

    ``torch.nonzero_static`` does the same, but torch 2.6 does not have it on CUDA, and some later releases
    crash on a rank without tokens.

    Args:
        mask: One-dimensional bool tensor of any length.
        num_true: Number of true entries.

    Returns:
        Positions, int64 ``[num_true]``.
    """
    # All false entries write to one extra position at the end, which is then cut off.
    slots = torch.where(mask, mask.cumsum(0) - 1, num_true)
    positions = torch.arange(mask.numel(), device=mask.device)
    return positions.new_empty(num_true + 1).scatter_(0, slots, positions)[:num_true]


def sort_by_expert(
    rows: torch.Tensor, probs: torch.Tensor, record: DispatchRecord
) -> tuple[torch.Tensor, torch.Tensor]:
    """Received rows ``[R, M]`` and their probabilities ``[R]`` in the order of the present experts."""
    return select(rows, record.by_expert), select(probs, record.by_expert)


def sort_by_source(rows: torch.Tensor, record: DispatchRecord) -> torch.Tensor:
    """The experts' results ``[R, M]`` in the order in which the rows arrived."""
    return select(rows, record.by_source)
