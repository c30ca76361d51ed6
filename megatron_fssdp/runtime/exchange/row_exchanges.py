"""Parm's four schedules: how a micro-batch's rows reach all parts of their experts, and the results return.

There is one class for each schedule: baseline, megatron, S1 and S2. The adapter's dispatcher calls the same
steps of each. Schedules differ in the tokens that a rank brings and in the collectives that carry their rows
(Parm, §III, Fig. 3 and 4)::

    step            baseline         megatron             s1                 s2
    gather          ESP-AllGather
    permute
    dispatch        EP-AlltoAll      EP-AlltoAll          EP&ESP-AlltoAll    MP-Split, EP&ESP-AlltoAll
    gather_peers                     ESP-AllGather
    (experts)
    sum_peers       ESP-AllReduce    ESP-ReduceScatter
    combine         EP-AlltoAll      EP-AlltoAll          EP&ESP-AlltoAll
    unpermute       ESP-Split                                                EP&ESP-AlltoAll, MP-AllGather

EP is among devices, ESP among the parts of an expert, and MP among tensor-parallel ranks with the same
tokens.

Shape letters: T tokens, A rows that a rank sends, R rows that a rank receives, M model dimension, E
experts, X expert-tensor-parallel peers, D devices, G experts present on a device, S ranks that send rows, Y
tensor-parallel ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_fssdp.collectives.rows.gathered_counts import gather_counts
from megatron_fssdp.collectives.rows.model_parallel import scale_gradient, split_rows, sum_over
from megatron_fssdp.collectives.rows.sharded_all_to_all import (
    ShardedRoute,
    results_from_parts,
    rows_to_parts,
    send_to_parts,
    start_from_parts,
    start_to_parts,
)
from megatron_fssdp.collectives.rows.simultaneous_gather import SharedRoute, results_for_all
from megatron_fssdp.collectives.rows.two_node_exchange import Start, TwoNodeExchange
from megatron_fssdp.collectives.rows.uneven_all_gather import uneven_all_gather, uneven_reduce_scatter
from megatron_fssdp.collectives.rows.uneven_all_to_all import start_exchange, uneven_all_to_all
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.runtime.exchange.expert_groups import ExpertGroups
from megatron_fssdp.runtime.exchange.selected_pairs import SelectedPairs
from megatron_fssdp.runtime.exchange.token_exchange import DispatchRecord


class MegatronExchange:
    """Schedule ``megatron``: all-to-all among the devices, then a gather among the parts of each expert.

    One object serves one forward pass, and the same forward pass if activation recomputation runs it again.
    The backward pass has its own copies in the autograd graph.

    Args:
        groups: Process groups of the layer's expert, expert-tensor and tensor parallelism.
    """

    announces = False
    """Whether ranks tell each other more than their counts (:meth:`numbers_for_all`)."""

    def __init__(self, groups: ExpertGroups) -> None:
        self.groups = groups
        self._record: DispatchRecord | None = None

    @property
    def needed_on_host(self) -> Sequence[Tensor]:
        """Tensors that :meth:`start` needs on the host. They travel together with the counts."""
        return ()

    def numbers_for_all(
        self, selected: SelectedPairs, load_E: Tensor, placement: ExpertPlacement | None
    ) -> Tensor | None:
        """Numbers of this rank that all ranks need, and which travel together with the counts.

        Args:
            selected: Pairs of token and selected expert of this rank.
            load_E: Counts of this rank, ``[E]``.
            placement: Placement of the pass; ``None`` if the dispatch is not even, or if it depends
                on the counts of all ranks.
        """
        return None

    @property
    def record(self) -> DispatchRecord:
        """Ranks to which this rank's rows go and ranks from which it receives rows."""
        if self._record is None:
            raise RuntimeError(
                "the exchange has no dispatch record: got a step before start, wanted gather, then start, "
                "then the other steps"
            )
        return self._record

    @property
    def arrival_SG(self) -> np.ndarray:
        """Number of rows of each present expert, by source, in the order in which rows arrive, ``[S, G]``."""
        return self.record.received_SG

    def gather(self, hidden: Tensor, probs: Tensor, routing_map: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The tokens that this rank brings to the exchange, with their probabilities and selected experts.

        Args:
            hidden: Hidden states of this rank's tokens, ``[T, M]``.
            probs: Routing probabilities, ``[T, E]``.
            routing_map: Experts that each token selected, bool ``[T, E]``.

        Returns:
            Hidden states, routing probabilities and routing map for the tokens to exchange. The schedule
            decides which these are.
        """
        return hidden, probs, routing_map

    def start(
        self, record: DispatchRecord, placement: ExpertPlacement, on_host: Sequence[np.ndarray] = ()
    ) -> None:
        """Set the dispatch record for the steps that follow; it results from the exchanged counts.

        Args:
            record: Ranks to which this rank's rows go and ranks from which it receives rows.
            placement: Owners and replicas of the experts.
            on_host: The tensors of :attr:`needed_on_host`, on the host, and then what the devices returned
                from :meth:`numbers_for_all`, if they did.
        """
        self._record = record

    def permute(self, hidden: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Rows ``[A, M]`` and probabilities ``[A]`` in the order of sending.

        Args:
            hidden: Hidden states, ``[T, M]``.
            probs: Routing probabilities, ``[T, E]``; entries outside the routing map are ignored.
        """
        return (
            hidden.index_select(0, self.record.token_A),
            probs.reshape(-1).index_select(0, self.record.assignment_A),
        )

    def dispatch(
        self, rows: Tensor, probs: Tensor, meanwhile: Callable[[], object] | None
    ) -> tuple[Tensor, Tensor]:
        """Send rows and probabilities to the experts' devices: ``[R, M]`` and ``[R]``, by source and expert.

        Args:
            rows: Rows in the order of sending, ``[A, M]``.
            probs: Probabilities of these rows, ``[A]``.
            meanwhile: Work for the host to do while the rows travel.
        """
        record, group = self.record, self.groups.expert_parallel
        rows, probs = uneven_all_to_all(
            (rows, probs), record.receive_D, record.send_D, group, meanwhile=meanwhile
        )
        return rows, probs

    def gather_peers(self, rows: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Rows and probabilities that all parts of the experts have received, ``[R, M]`` and ``[R]``."""
        group, rows_X = self.groups.expert_tensor_parallel, self.record.rows_X
        if group is None:
            return rows, probs
        return uneven_all_gather(rows, rows_X, group), uneven_all_gather(probs, rows_X, group)

    def sum_peers(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Sums of the parts' results, if the schedule forms them before the results travel back.

        Args:
            rows: Results of this rank's parts of the experts, in the order in which rows came, ``[R, M]``.
            dtype: Data type in which to sum; the result has the data type of ``rows``.
        """
        group = self.groups.expert_tensor_parallel
        if group is None:
            return rows
        return uneven_reduce_scatter(rows.to(dtype), self.record.rows_X, group).to(rows.dtype)

    def combine(self, rows: Tensor) -> Tensor:
        """Send the results back to the tokens' ranks, ``[A, M]``."""
        record, group = self.record, self.groups.expert_parallel
        return uneven_all_to_all((rows,), record.send_D, record.receive_D, group)[0]

    def dispatch_in_two(self) -> TwoNodeExchange | None:
        """:meth:`dispatch` as two autograd nodes, between which other compute runs.

        Returns:
            An exchange of rows ``[A, M]`` and probabilities ``[A]``; ``None`` if the schedule has no such
            form of :meth:`dispatch` and :meth:`combine`.
        """
        to_experts, to_tokens = self._directions()
        return TwoNodeExchange(to_experts, to_tokens)

    def combine_in_two(self) -> TwoNodeExchange | None:
        """:meth:`combine` as two autograd nodes, an exchange of the results ``[R, M]``; or ``None``."""
        to_experts, to_tokens = self._directions()
        return TwoNodeExchange(to_tokens, to_experts)

    def _directions(self) -> tuple[Start, Start]:
        """Functions that start to send tensors to the experts, and back to the tokens' ranks."""
        record, group = self.record, self.groups.expert_parallel
        send_D, receive_D = list(record.send_D), list(record.receive_D)
        return (
            partial(start_exchange, output_splits=receive_D, input_splits=send_D, group=group),
            partial(start_exchange, output_splits=send_D, input_splits=receive_D, group=group),
        )

    def unpermute(self, rows: Tensor) -> Tensor:
        """Sums of each token's results, ``[T, M]`` in the data type of ``rows``."""
        output = rows.new_zeros((self.record.num_tokens, rows.shape[-1]))
        return output.index_add(0, self.record.token_A, rows)


class S1Exchange(MegatronExchange):
    """Schedule ``s1``: each rank sends to all parts of experts, EP&ESP-AlltoAll (Parm §III-C, Fig. 4c, d)."""

    def start(
        self, record: DispatchRecord, placement: ExpertPlacement, on_host: Sequence[np.ndarray] = ()
    ) -> None:
        """Set the dispatch record, and compute the route to all parts of the experts."""
        super().start(record, placement, on_host)
        self._route = ShardedRoute(
            self.groups.parts or self.groups.expert_parallel,
            self.groups.num_parts,
            record.send_D,
            tuple(record.received_SG.sum(axis=1).tolist()),
        )

    def dispatch(
        self, rows: Tensor, probs: Tensor, meanwhile: Callable[[], object] | None
    ) -> tuple[Tensor, Tensor]:
        """Send rows and probabilities to all parts of the experts' devices."""
        rows, probs = rows_to_parts((rows, probs), self._route, meanwhile=meanwhile)
        return rows, probs

    def gather_peers(self, rows: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Rows and probabilities unchanged: each part of an expert has received all of them."""
        return rows, probs

    def sum_peers(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Results unchanged: the ranks that sent the rows add up the parts' results."""
        return rows

    def combine(self, rows: Tensor) -> Tensor:
        """Send the results back to the tokens' ranks, which add the results of all parts."""
        return results_from_parts(rows, self._route)

    def _directions(self) -> tuple[Start, Start]:
        return partial(start_to_parts, route=self._route), partial(start_from_parts, route=self._route)


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


class BaselineExchange(MegatronExchange):
    """Schedule ``baseline``, DeepSpeed-MoE's: the parts of an expert first share all their tokens (Fig. 3a).

    ESP-AllGather, EP-AlltoAll, experts, ESP-AllReduce, EP-AlltoAll, ESP-Split. Tensor-parallel ranks with the
    same tokens all do the same work.

    Args:
        groups: Process groups of the layer's expert, expert-tensor and tensor parallelism.
    """

    def __init__(self, groups: ExpertGroups) -> None:
        # After the gather, the ranks of an expert's parts have the same tokens. The exchange is then the same
        # as if each of them had a whole expert.
        super().__init__(replace(groups, expert_tensor_parallel=None, parts=None))
        self._parts = groups.expert_tensor_parallel
        self._repeats = 1 if groups.tensor_parallel is None else groups.tensor_parallel.size()
        self._tokens_X: list[int] = []

    def gather(self, hidden: Tensor, probs: Tensor, routing_map: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The tokens of all ranks that hold parts of the same experts, in the order of ranks."""
        # The experts receive every copy of tokens that several tensor-parallel ranks have, and would sum the
        # weights' gradients of all copies. The gradient that enters the backward pass is therefore divided by
        # the number of copies (in unpermute), and the gradient that leaves it is multiplied again (here).
        hidden, probs = (scale_gradient(x, float(self._repeats)) for x in (hidden, probs))
        if self._parts is None:
            return hidden, probs, routing_map
        if not self._tokens_X:  # A recomputed forward pass has the same numbers of tokens.
            counts = gather_counts(torch.tensor([len(hidden)], device=hidden.device), self._parts)
            self._tokens_X = counts.view(-1).tolist()
        gather: Callable[[Tensor], Tensor] = partial(
            uneven_all_gather, splits=self._tokens_X, group=self._parts
        )
        return gather(hidden), gather(probs), gather(routing_map.to(torch.uint8)).bool()

    def sum_peers(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Sums of the parts' results, on the ranks of all parts: ESP-AllReduce."""
        return rows if self._parts is None else sum_over(rows.to(dtype), self._parts).to(rows.dtype)

    def unpermute(self, rows: Tensor) -> Tensor:
        """Sums of the results of each of this rank's own tokens: ESP-Split."""
        output = super().unpermute(rows)
        if self._parts is not None:
            output = split_rows(output, self._tokens_X, self._parts)
        return scale_gradient(output, 1 / self._repeats)
