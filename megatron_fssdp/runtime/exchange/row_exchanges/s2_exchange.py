"""Schedule ``s2`` of Parm: tensor-parallel ranks with the same tokens divide the rows among themselves.

Shape letters: T tokens, R rows that a rank receives, M model dimension, E experts, D devices, Y
tensor-parallel ranks.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_fssdp.collectives.rows.sharded_all_to_all import send_to_parts
from megatron_fssdp.collectives.rows.simultaneous_gather import SharedRoute, results_for_all
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.runtime.exchange.expert_groups import ExpertGroups
from megatron_fssdp.runtime.exchange.row_exchanges.s1_exchange import S1Exchange
from megatron_fssdp.runtime.exchange.selected_pairs import SelectedPairs
from megatron_fssdp.runtime.exchange.token_exchange import DispatchRecord


class S2Exchange(S1Exchange):
    """Schedule ``s2``: tensor-parallel ranks with the same tokens and gate divide the rows (§III-B, Fig. 3c).

    A rank sends every Y-th token of each expert, and all ranks receive all results. The placement must have
    no replicas, because only then each rank knows the order in which the other ranks send.

    Args:
        groups: The layer's process groups, including the tensor-parallel one.
        simultaneous: Whether to pass results on slice by slice (SAA) or after all of them have arrived.
    """

    def __init__(self, groups: ExpertGroups, *, simultaneous: bool = True) -> None:
        super().__init__(groups)
        assert groups.tensor_parallel is not None
        self._peers = groups.tensor_parallel
        self._simultaneous = simultaneous

    def gather(self, hidden: Tensor, probs: Tensor, routing_map: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """All tokens, and this rank's share of the pairs of token and selected expert."""
        self._load = routing_map.sum(dim=0)
        numbers = torch.arange(routing_map.shape[1], device=routing_map.device)
        # The first token of each expert goes to another rank; otherwise rank 0 would get every remainder.
        turn = (routing_map.cumsum(dim=0) - 1 + numbers) % self._peers.size()
        parts_Y = [routing_map & (turn == peer) for peer in range(self._peers.size())]
        own = self._peers.rank()
        self._pairs_Y = [None if peer == own else SelectedPairs.of(part) for peer, part in enumerate(parts_Y)]
        return hidden, probs, parts_Y[own]

    @property
    def needed_on_host(self) -> Sequence[Tensor]:
        """Load of each expert by the common tokens, ``[E]``."""
        return (self._load,)

    def start(
        self, record: DispatchRecord, placement: ExpertPlacement, on_host: Sequence[np.ndarray] = ()
    ) -> None:
        """Compute how many rows every tensor-parallel rank sends.

        Raises:
            RuntimeError: The placement has replicas.
        """
        super().start(record, placement, on_host)
        if placement.num_replicas:
            raise RuntimeError(
                f"schedule s2: got {placement.num_replicas} replicas, wanted none; use another schedule for "
                "a placement with replicas"
            )
        (load_E,) = on_host
        size = self._peers.size()
        # Number of the expert's first token that each peer sends.
        first_YE = (np.arange(size)[:, None] - np.arange(len(load_E))) % size
        self._send_YE = np.maximum(0, -((first_YE - load_E) // size))
        self._by_owner_E = np.argsort(placement.owner_E, kind="stable")
        send_YD = [
            np.bincount(placement.owner_E, weights=send_E, minlength=self.groups.num_devices)
            .astype(np.int64)
            .tolist()
            for send_E in self._send_YE
        ]
        self._shared = SharedRoute(self._route, self._peers, send_YD, self.groups.devices_of_peers)

    @cached_property
    def _common_order(self) -> tuple[Tensor, Tensor]:
        """Token and assignment of the rows that all tensor-parallel ranks send, in the order of the ranks.

        The order is made when the first results return, so that the dispatch does not wait for it.
        """
        own = self.record.token_A, self.record.assignment_A
        orders = [
            own if pairs is None else pairs.to_send(send_E, self._by_owner_E)
            for pairs, send_E in zip(self._pairs_Y, self._send_YE, strict=True)
        ]
        for pairs in self._pairs_Y:
            if pairs is not None:
                pairs.note_current_stream()  # The gate may have made them on another stream.
        self._pairs_Y = []  # They are not needed again and take memory.
        tokens, assignments = zip(*orders, strict=True)
        return torch.cat(tokens), torch.cat(assignments)

    def permute(self, hidden: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens ``[T, M]`` and flat probabilities ``[T * E]``; :meth:`dispatch` forms the rows."""
        return hidden, probs.reshape(-1)

    def dispatch(
        self, rows: Tensor, probs: Tensor, meanwhile: Callable[[], object] | None
    ) -> tuple[Tensor, Tensor]:
        """Run MP-Split and EP&ESP-AlltoAll; the backward pass gives all ranks the same gradients."""
        found: tuple[Tensor, Tensor] = _S2Dispatch.apply(self, meanwhile, rows, probs)
        return found

    def combine(self, rows: Tensor) -> Tensor:
        """Rows unchanged: :meth:`unpermute` sends the results back."""
        return rows

    def dispatch_in_two(self) -> None:
        """There is no such form: SAA passes results on slice by slice, which keeps the host of a CPU busy."""

    def combine_in_two(self) -> None:
        """There is no such form, see :meth:`dispatch_in_two`."""

    def unpermute(self, rows: Tensor) -> Tensor:
        """Run EP&ESP-AlltoAll and MP-AllGather, and sum the results of each token, ``[T, M]``."""
        output: Tensor = _S2Combine.apply(self, rows)
        return output

    def send_own(
        self, hidden: Tensor, probs: Tensor | None = None, meanwhile: Callable[[], object] | None = None
    ) -> tuple[Tensor, ...]:
        """Send this rank's share of the rows to all parts of the experts.

        Args:
            hidden: Hidden states of the common tokens, ``[T, M]``.
            probs: Flat probabilities ``[T * E]``, to be sent with the rows; ``None`` sends rows alone.
            meanwhile: Work for the host to do while the rows travel.
        """
        record = self.record
        sent = [hidden.index_select(0, record.token_A)]
        if probs is not None:
            sent.append(probs.index_select(0, record.assignment_A))
        return send_to_parts(sent, self._route, meanwhile)

    def collect(self, rows: Tensor | None, probs: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Return results, or gradients, to the common tokens of all tensor-parallel ranks.

        Args:
            rows: Results of this rank's part of the experts, ``[R, M]``; ``None`` if not needed.
            probs: Gradients of the probabilities of these rows, ``[R]``; ``None`` if not needed.

        Returns:
            Sums over parts and selected experts for each token, ``[T, M]``, and sums over parts of the
            probabilities' gradients, flat ``[T * E]``; ``None`` for each argument that is ``None``.
        """
        given = [x for x in (rows, probs) if x is not None]
        found = iter(results_for_all(given, self._shared, simultaneous=self._simultaneous))
        token, assignment = self._common_order
        tokens = scores = None
        if rows is not None:
            tokens = rows.new_zeros(self.record.num_tokens, rows.shape[-1]).index_add_(0, token, next(found))
        if probs is not None:
            size = self.record.num_tokens * self._send_YE.shape[1]
            scores = probs.new_zeros(size).index_copy_(0, assignment, next(found))
        return tokens, scores


class _S2Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        exchange: S2Exchange,
        meanwhile: Callable[[], object] | None,
        hidden: Tensor,
        probs: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        return exchange.send_own(hidden, probs, meanwhile)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, rows: Tensor, probs: Tensor) -> tuple[Tensor | None, ...]:
        *_, needs_hidden, needs_probs = ctx.needs_input_grad
        found = ctx.exchange.collect(rows if needs_hidden else None, probs if needs_probs else None)
        return None, None, *found


class _S2Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: S2Exchange, rows: Tensor) -> Tensor:
        ctx.exchange = exchange
        output, _ = exchange.collect(rows, None)
        assert output is not None
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, ctx.exchange.send_own(gradient)[0]
