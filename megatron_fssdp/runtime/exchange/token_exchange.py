"""Works out where one micro-batch's rows go and come from, from what every rank knows.

What a micro-batch needs travels in a frozen :class:`DispatchRecord`, because micro-batches interleave under
pipeline parallelism. ``row_exchanges.py`` moves the rows. Where ranks share each expert (expert tensor
parallelism), they exchange tokens over groups of their own and then gather each other's rows.

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
        assignment_A: Index into the flattened ``[E, T]`` routing map of each row sent, in
            the order of sending: by device, then expert, then token.
        token_A: The row's token.
        num_tokens: T.
        send_D: Rows sent to each device.
        receive_D: Rows received from each device.
        rows_X: Rows received by each expert-tensor-parallel peer; one number where experts are whole.
        rows_per_expert: Rows of each present expert and of all peers, ascending by expert.
        received_SG: The same by source, of all peers one after another: int64 on the host.
        by_expert: Brings received rows (by peer, source, then expert) into order by expert.
        by_source: The inverse.
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
    """Work out one micro-batch's exchange from what every rank knows.

    Args:
        routing_map: bool ``[T, E]``, this rank's assignments.
        dispatch_of_peer: Who computes which assignments, for every expert-tensor-parallel peer.
        placement: Where the experts are.
        device: This rank's device number.
        peer: This rank's number among its expert-tensor-parallel peers.
    """
    send_ED = dispatch_of_peer[peer].from_source(device)
    present = np.array(placement.experts_on(device), dtype=np.int64)
    receive_XDG = np.stack([dispatch.to_device(device)[:, present] for dispatch in dispatch_of_peer])
    receive_SG = np.concatenate(list(receive_XDG))  # S sources: by peer, then device

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
    """Assignments by device, then expert, then token: index into the flattened ``[E, T]`` map, ``[A]``.

    Args:
        routing_map: bool ``[T, E]``.
        send_ED: How many of each expert's tokens, in their order, go to each device.
    """
    flat = true_positions(routing_map.t().reshape(-1), int(send_ED.sum()))
    return select(flat, chunk_permutation(send_ED.reshape(-1), transposed_order(*send_ED.shape), flat.device))


def true_positions(mask: torch.Tensor, num_true: int) -> torch.Tensor:
    """Where a mask is true, ascending, without the host waiting for the device.

    ``torch.nonzero_static`` would do, but on CUDA torch 2.6 has none and some later releases
    crash on a rank without tokens.

    Args:
        mask: bool, of any length.
        num_true: How many entries are true.

    Returns:
        int64 ``[num_true]``.
    """
    # Entries that are not true all go to one place behind the others.
    slots = torch.where(mask, mask.cumsum(0) - 1, num_true)
    positions = torch.arange(mask.numel(), device=mask.device)
    return positions.new_empty(num_true + 1).scatter_(0, slots, positions)[:num_true]


def sort_by_expert(
    rows: torch.Tensor, probs: torch.Tensor, record: DispatchRecord
) -> tuple[torch.Tensor, torch.Tensor]:
    """Received rows in the order of the present experts."""
    return select(rows, record.by_expert), select(probs, record.by_expert)


def sort_by_source(rows: torch.Tensor, record: DispatchRecord) -> torch.Tensor:
    """The experts' results in the order in which the rows came."""
    return select(rows, record.by_source)
