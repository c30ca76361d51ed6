"""How one micro-batch's rows get to all parts of their experts, and the results back: four orders.

The adapter's dispatcher calls the same steps of each, in Megatron's order: gather, permute, dispatch,
gather_peers, (experts), sum_peers, combine, unpermute. What differs is which tokens a rank brings and
which collectives carry their rows (Parm, §III, Fig. 3 and 4).

Shape legend: T tokens of this rank, A assignments (token, k), R received rows, M model dim, E experts,
N tensor-parallel ranks.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_fssdp.collectives.rows.model_parallel import scale_gradient, split_rows, sum_over
from megatron_fssdp.collectives.rows.sharded_all_to_all import (
    ShardedRoute,
    results_from_parts,
    rows_to_parts,
    send_to_parts,
)
from megatron_fssdp.collectives.rows.simultaneous_gather import SharedRoute, results_for_all
from megatron_fssdp.collectives.rows.uneven_all_gather import uneven_all_gather
from megatron_fssdp.collectives.rows.uneven_all_to_all import gather_counts
from megatron_fssdp.planning.cost.tensor_schedules import Schedule
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.runtime.exchange import token_exchange
from megatron_fssdp.runtime.exchange.expert_groups import ExpertGroups
from megatron_fssdp.runtime.exchange.token_exchange import DispatchRecord, order_of_sending


class TwoStepExchange:
    """Megatron's order: all-to-all among the devices, then a gather among the parts of each expert.

    One object serves one forward pass; the backward pass has its own copies in the autograd graph.

    Args:
        groups: The layer's process groups.
    """

    def __init__(self, groups: ExpertGroups) -> None:
        self.groups = groups
        self._record: DispatchRecord | None = None

    @property
    def record(self) -> DispatchRecord:
        """Where the rows go and come from."""
        if self._record is None:
            raise RuntimeError("exchange out of order: start follows gather and comes before everything else")
        return self._record

    def gather(self, hidden: Tensor, probs: Tensor, routing_map: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The tokens and assignments whose counts are exchanged.

        Args:
            hidden: ``[T, M]``.
            probs: ``[T, E]``.
            routing_map: bool ``[T, E]``.
        """
        return hidden, probs, routing_map

    def start(self, record: DispatchRecord, placement: ExpertPlacement) -> None:
        """Take what followed from the counts."""
        self._record = record

    def permute(self, hidden: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Rows ``[A, M]`` and probabilities ``[A]`` in the order of sending."""
        return token_exchange.permute(hidden, probs, self.record)

    def dispatch(
        self, rows: Tensor, probs: Tensor, meanwhile: Callable[[], object] | None
    ) -> tuple[Tensor, Tensor]:
        """Rows and probabilities to the experts' devices."""
        return token_exchange.dispatch(
            rows, probs, self.record, self.groups.expert_parallel, meanwhile=meanwhile
        )

    def gather_peers(self, rows: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """What the other parts of the experts have received as well: ``[R, M]`` and ``[R]``."""
        return token_exchange.gather_peers(rows, probs, self.record, self.groups.expert_tensor_parallel)

    def sum_peers(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Sums of the parts' results, where this rank has to form them.

        Args:
            rows: This part's results, ``[R, M]`` in the order in which rows came.
            dtype: In which to sum.
        """
        return token_exchange.sum_over_peers(rows, self.record, self.groups.expert_tensor_parallel, dtype)

    def combine(self, rows: Tensor) -> Tensor:
        """Results back to the tokens' ranks."""
        return token_exchange.combine(rows, self.record, self.groups.expert_parallel)

    def unpermute(self, rows: Tensor) -> Tensor:
        """Sums of each token's results, ``[T, M]``."""
        return token_exchange.unpermute(rows, self.record)


class FusedExchange(TwoStepExchange):
    """Parm's EP&ESP-AlltoAll: every rank sends to all parts itself (§III-C, Fig. 4c and d)."""

    def start(self, record: DispatchRecord, placement: ExpertPlacement) -> None:
        """Take what followed from the counts."""
        super().start(record, placement)
        self._route = ShardedRoute(
            self.groups.parts or self.groups.expert_parallel,
            self.groups.num_parts,
            record.send_D,
            tuple(record.received_SG.sum(axis=1).tolist()),
        )

    def dispatch(
        self, rows: Tensor, probs: Tensor, meanwhile: Callable[[], object] | None
    ) -> tuple[Tensor, Tensor]:
        """Rows and probabilities to all parts of the experts' devices."""
        rows, probs = rows_to_parts((rows, probs), self._route, meanwhile=meanwhile)
        return rows, probs

    def gather_peers(self, rows: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Nothing is missing."""
        return rows, probs

    def sum_peers(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """The tokens' ranks add up."""
        return rows

    def combine(self, rows: Tensor) -> Tensor:
        """Results back to the tokens' ranks, and their sums."""
        return results_from_parts(rows, self._route)


class DividedExchange(FusedExchange):
    """Parm's S2: tensor-parallel ranks with the same tokens and gate divide the rows (§III-B, Fig. 3c).

    Of each expert's tokens a rank sends every N-th; all ranks get all results. Needs experts that are with
    their owners only, because then each rank knows in which order the others send.

    Args:
        groups: The layer's process groups, with the tensor-parallel one.
        simultaneous: Whether results are handed on slice by slice (SAA) or when all are there.
    """

    def __init__(self, groups: ExpertGroups, *, simultaneous: bool = True) -> None:
        super().__init__(groups)
        assert groups.tensor_parallel is not None
        self._peers = groups.tensor_parallel
        self._simultaneous = simultaneous

    def gather(self, hidden: Tensor, probs: Tensor, routing_map: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """This rank's part of the assignments, and all tokens."""
        self._load_E = routing_map.sum(dim=0).cpu().numpy()
        numbers = torch.arange(routing_map.shape[1], device=routing_map.device)
        # Begun elsewhere for each expert, or the first rank would get every rest.
        turn = (routing_map.cumsum(dim=0) - 1 + numbers) % self._peers.size()
        self._parts_N = [routing_map & (turn == peer) for peer in range(self._peers.size())]
        return hidden, probs, self._parts_N[self._peers.rank()]

    def start(self, record: DispatchRecord, placement: ExpertPlacement) -> None:
        """Work out what every tensor-parallel rank sends, and in which order."""
        super().start(record, placement)
        if placement.num_replicas:
            raise RuntimeError(f"schedule s2: got {placement.num_replicas} replicas, wanted owners only")
        size = self._peers.size()
        num_experts = len(self._load_E)
        experts = np.arange(num_experts)
        send_NED = np.zeros((size, num_experts, self.groups.num_devices), np.int64)
        for peer in range(size):
            first_E = (peer - experts) % size  # the first of the expert's tokens whose turn is this rank's
            send_NED[peer, experts, placement.owner_E] = np.maximum(0, -((first_E - self._load_E) // size))
        orders = [order_of_sending(part, sent) for part, sent in zip(self._parts_N, send_NED, strict=True)]
        self._assignment = torch.cat(orders)
        self._token = self._assignment % record.num_tokens
        send_ND = send_NED.sum(axis=1).tolist()
        self._shared = SharedRoute(self._route, self._peers, send_ND, self.groups.devices_of_peers)

    def permute(self, hidden: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens and flat probabilities as they are; rows are formed when they are sent."""
        return hidden, probs.t().reshape(-1)

    def dispatch(
        self, rows: Tensor, probs: Tensor, meanwhile: Callable[[], object] | None
    ) -> tuple[Tensor, Tensor]:
        """MP-Split and EP&ESP-AlltoAll; backward, the same results for all ranks as :meth:`unpermute`."""
        found: tuple[Tensor, Tensor] = _DividedDispatch.apply(self, meanwhile, rows, probs)
        return found

    def combine(self, rows: Tensor) -> Tensor:
        """Nothing yet."""
        return rows

    def unpermute(self, rows: Tensor) -> Tensor:
        """EP&ESP-AlltoAll, MP-AllGather and the sum of each token's results."""
        output: Tensor = _DividedCombine.apply(self, rows)
        return output

    def send_own(
        self, hidden: Tensor, probs: Tensor | None = None, meanwhile: Callable[[], object] | None = None
    ) -> tuple[Tensor, ...]:
        """This rank's rows of ``[T, M]``, and flat probabilities if given, to all parts of the experts."""
        record = self.record
        sent = [hidden.index_select(0, record.token_A)]
        if probs is not None:
            sent.append(probs.index_select(0, record.assignment_A))
        return send_to_parts(sent, self._route, meanwhile)

    def collect(self, rows: Tensor | None, probs: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Sums over parts and tokens of all ranks' rows ``[T, M]``; and probabilities, flat ``[E * T]``."""
        given = [x for x in (rows, probs) if x is not None]
        found = iter(results_for_all(given, self._shared, simultaneous=self._simultaneous))
        num_tokens, num_experts = self.record.num_tokens, len(self._load_E)
        tokens = scores = None
        if rows is not None:
            tokens = rows.new_zeros(num_tokens, rows.shape[-1]).index_add_(0, self._token, next(found))
        if probs is not None:
            scores = probs.new_zeros(num_tokens * num_experts).index_copy_(0, self._assignment, next(found))
        return tokens, scores


class _DividedDispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        exchange: DividedExchange,
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


class _DividedCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: DividedExchange, rows: Tensor) -> Tensor:
        ctx.exchange = exchange
        output, _ = exchange.collect(rows, None)
        assert output is not None
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, ctx.exchange.send_own(gradient)[0]


class GatheredExchange(TwoStepExchange):
    """DeepSpeed-MoE's order, Parm's baseline: the parts of an expert share all their tokens first (Fig. 3a).

    ESP-AllGather, EP-AlltoAll, experts, ESP-AllReduce, EP-AlltoAll, ESP-Split. Where tensor-parallel ranks
    have the same tokens, everything is done as often as there are such ranks.

    Args:
        groups: The layer's process groups.
    """

    def __init__(self, groups: ExpertGroups) -> None:
        # After the gather the parts' ranks have the same tokens, and look like whole experts.
        super().__init__(replace(groups, expert_tensor_parallel=None, parts=None))
        self._parts = groups.expert_tensor_parallel
        self._repeats = 1 if groups.tensor_parallel is None else groups.tensor_parallel.size()
        self._tokens_X: list[int] = []

    def gather(self, hidden: Tensor, probs: Tensor, routing_map: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The tokens of all parts' ranks, by rank."""
        # Of equal tokens each rank finds the whole gradient; experts, which meet them all, must not.
        hidden, probs = (scale_gradient(x, float(self._repeats)) for x in (hidden, probs))
        if self._parts is None:
            return hidden, probs, routing_map
        counts = gather_counts(torch.tensor([len(hidden)], device=hidden.device), self._parts)
        self._tokens_X = counts.view(-1).tolist()
        gather: Callable[[Tensor], Tensor] = partial(
            uneven_all_gather, splits=self._tokens_X, group=self._parts
        )
        return gather(hidden), gather(probs), gather(routing_map.to(torch.uint8)).bool()

    def sum_peers(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """ESP-AllReduce."""
        return rows if self._parts is None else sum_over(rows.to(dtype), self._parts).to(rows.dtype)

    def unpermute(self, rows: Tensor) -> Tensor:
        """Sums of each token's results, and of these the own ones: ESP-Split."""
        output = super().unpermute(rows)
        if self._parts is not None:
            output = split_rows(output, self._tokens_X, self._parts)
        return scale_gradient(output, 1 / self._repeats)


def exchange_of(schedule: Schedule, groups: ExpertGroups, *, simultaneous: bool = True) -> TwoStepExchange:
    """The exchange of a forward pass under a schedule.

    Args:
        schedule: Which order. ``s2`` is ``s1`` where the tensor-parallel ranks have different tokens.
        groups: The layer's process groups.
        simultaneous: For ``s2``: SAA, or one collective after the other.
    """
    if schedule == "baseline":
        return GatheredExchange(groups)
    if schedule == "megatron":
        return TwoStepExchange(groups)
    if schedule == "s2" and groups.tensor_parallel is not None:
        return DividedExchange(groups, simultaneous=simultaneous)
    return FusedExchange(groups)
