"""Computes where the rows of one micro-batch go and come from, from data that every rank has.

A frozen :class:`DispatchRecord` carries everything that a micro-batch needs, because micro-batches interleave
under pipeline parallelism. ``row_exchanges`` moves the rows. Under expert tensor parallelism, the ranks
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
from megatron_fssdp.runtime.exchange.selected_pairs import SelectedPairs


@dataclass(frozen=True, eq=False)
class DispatchRecord:
    """Where the rows of one micro-batch go and come from.

    Attributes:
        assignment_A: For each row that this rank sends, its index in the flattened ``[T, E]`` routing map,
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
    """

    assignment_A: torch.Tensor
    token_A: torch.Tensor
    num_tokens: int
    send_D: tuple[int, ...]
    receive_D: tuple[int, ...]
    rows_X: tuple[int, ...]
    rows_per_expert: tuple[int, ...]
    received_SG: np.ndarray


def plan_exchange(
    selected: SelectedPairs,
    dispatch_of_peer: Sequence[TokenDispatch],
    placement: ExpertPlacement,
    device: int,
    peer: int = 0,
) -> DispatchRecord:
    """Compute one micro-batch's exchange from data that every rank has.

    Args:
        selected: Pairs of token and selected expert of this rank.
        dispatch_of_peer: For every expert-tensor-parallel peer, the dispatch of its tokens to devices.
        placement: Owners and replicas of the experts.
        device: Device number of this rank.
        peer: Number of this rank among its expert-tensor-parallel peers.
    """
    rows = dispatch_of_peer[peer].rows_from(device)
    expert_G = placement.experts_on_G(device)
    receive_XDG = np.stack([dispatch.received_by(device, expert_G) for dispatch in dispatch_of_peer])
    receive_SG = np.concatenate(list(receive_XDG))  # The S sources are ordered by peer, then device.
    token_A, assignment_A = selected.to_send(rows.tokens_P, rows.order_P)
    return DispatchRecord(
        assignment_A=assignment_A,
        token_A=token_A,
        num_tokens=selected.num_tokens,
        send_D=tuple(rows.send_D.tolist()),
        receive_D=tuple(receive_XDG[peer].sum(axis=1).tolist()),
        rows_X=tuple(receive_XDG.sum(axis=(1, 2)).tolist()),
        rows_per_expert=tuple(receive_SG.sum(axis=0).tolist()),
        received_SG=receive_SG,
    )
