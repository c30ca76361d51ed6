"""Megatron's six dispatcher phases for any placement of the experts.

Shape letters: T tokens, M model dimension, E experts, A rows
that a rank sends.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher

from megatron_fssdp.collectives.rows.model_parallel import gather_tokens
from megatron_fssdp.megatron_adapter.layer.overlapped_shared_experts import (
    OverlappedSharedExperts,
    tell_without_overlap,
)
from megatron_fssdp.runtime.exchange.row_exchanges.megatron_exchange import MegatronExchange
from megatron_fssdp.runtime.exchange.smart_schedule import ExpertCompute
from megatron_fssdp.runtime.execution.layer_executor import LayerExecutor, MicroBatch
from megatron_fssdp.runtime.experts.expert_layout import ExpertWeights


class PlacementTokenDispatcher(MoETokenDispatcher):
    """Sends tokens to the devices that have their experts under the current placement.

    Megatron calls the phases of one forward pass one after the other. What the phases share is kept in this
    object from the first phase to the last. The backward pass has its own copies in the autograd graph.

    Args:
        executor: Executor of the layer on this rank.
        config: Megatron's ``TransformerConfig``.
        pg_collection: Process groups of the layer.
    """

    def __init__(self, executor: LayerExecutor, config: Any, pg_collection: Any) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self.executor = executor
        self._next_exchange: MegatronExchange | None = None
        self._exchange: MegatronExchange | None = None
        self._divided_among: dist.ProcessGroup | None = None
        self._micro_batch: MicroBatch | None = None
        self._experts: list[ExpertWeights] = []
        self._hidden_shape = torch.Size()
        self._probs_dtype = torch.float32
        self._shared: OverlappedSharedExperts | None = None

    def set_shared_experts(self, shared_experts: Any) -> None:
        """Compute shared experts while rows travel, and add their results in the last phase.

        Args:
            shared_experts: Megatron's ``SharedExpertMLP``.
        """
        super().set_shared_experts(shared_experts)
        self._shared = OverlappedSharedExperts(shared_experts)

    @property
    def has_smart_schedule(self) -> bool:
        """Whether the current forward pass runs in steps (FasterMoE's smart schedule).

        Layers may differ, and a layer may change between two iterations.
        """
        return self.micro_batch.plan.in_steps

    def use(self, exchange: MegatronExchange, divided_among: dist.ProcessGroup | None = None) -> None:
        """Set how the next forward pass exchanges its rows.

        Args:
            exchange: Exchange for the next forward pass only.
            divided_among: Group of the tensor-parallel ranks if each of them dispatches a part of their
                common tokens. All of them get all results at the end.
        """
        self._next_exchange, self._divided_among = exchange, divided_among

    @property
    def exchange(self) -> MegatronExchange:
        """The exchange of the current forward pass."""
        return _of_pass(self._exchange)

    @property
    def micro_batch(self) -> MicroBatch:
        """The micro-batch of the current forward pass."""
        return _of_pass(self._micro_batch)

    def share(self, hidden_states: torch.Tensor) -> None:
        """Give the next forward pass the input of its shared experts, if they compute while rows travel.

        Args:
            hidden_states: Input of the layer, ``[sequence, batch, M]``. Tensor-parallel ranks that divide
                their common tokens give all of them.
        """
        if self._shared is not None:
            self._shared.begin(hidden_states)

    def take_experts(self) -> list[ExpertWeights]:
        """Return the weights of this device's experts in this forward pass, by ascending expert number.

        A second call in the same forward pass returns an empty list.
        """
        experts, self._experts = self._experts, []
        return experts

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Phase 1: exchange counts, pass the node that materializes the experts, permute the tokens.

        Args:
            hidden_states: Hidden states, ``[sequence, batch, M]``.
            routing_map: Whether a token is routed to an expert, bool ``[T, E]``.
            probs: Routing probabilities, ``[T, E]``.

        Returns:
            Permuted tokens ``[A, M]`` and their probabilities ``[A]``.
        """
        self._hidden_shape = hidden_states.shape
        # Megatron sums the parts of an expert's results in this data type.
        self._probs_dtype = probs.dtype
        exchange, self._next_exchange = self._next_exchange or MegatronExchange(self.executor.groups), None
        known = self.executor.recall()
        if known is not None:
            exchange = known.exchange
        self._exchange = exchange
        # A tensor of the dispatch alone: the gradient of the hidden states waits for the gate, too.
        own = hidden_states.reshape(-1, hidden_states.shape[-1])
        self.executor.timer.passes(own, "dispatch", "other")
        tokens, probs, routing_map = exchange.gather(own, probs, routing_map)
        self._micro_batch = self.executor.begin_micro_batch(routing_map, exchange, known)
        return exchange.permute(self._materialize_before(tokens), probs)

    def _materialize_before(self, tokens: torch.Tensor) -> torch.Tensor:
        """Pass the node that materializes the experts, unless their gather starts with the dispatch."""
        materialization = self.micro_batch.materialization
        if self.has_smart_schedule or not materialization.beside_dispatch:
            tokens, self._experts = materialization.apply(tokens)
        return tokens

    def _materialize_after(self, rows: torch.Tensor) -> torch.Tensor:
        """Pass the node that materializes the experts, if their gather has started with the dispatch."""
        if self.micro_batch.materialization.beside_dispatch:
            rows, self._experts = self.micro_batch.materialization.apply(rows)
        return rows

    def token_dispatch(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Phase 2: send rows to the experts' devices, beside the first half of overlapped shared experts.

        Under the smart schedule this does nothing, because :meth:`run_smart_schedule` does phases 2 to 5.
        """
        shared = self._shared
        if self.has_smart_schedule:
            if shared is not None:
                self._compute_before_exchange(shared, "the smart schedule")
            return hidden_states, probs
        meanwhile = partial(self.executor.while_rows_travel, self.micro_batch)
        in_two = None if shared is None else self.exchange.dispatch_in_two()
        if shared is None or in_two is None:
            if shared is not None:
                self._compute_before_exchange(shared, "schedule s2")
            rows, probs = self.exchange.dispatch(hidden_states, probs, meanwhile)
        else:
            ticket = in_two.depart(hidden_states, probs)
            meanwhile()
            shared.first_half()
            rows, probs = in_two.arrive(ticket)
        return self._materialize_after(rows), probs

    def _compute_before_exchange(self, shared: OverlappedSharedExperts, why: str) -> None:
        tell_without_overlap(why)
        shared.first_half()
        shared.second_half()

    def run_smart_schedule(
        self, hidden_states: torch.Tensor, probs: torch.Tensor, compute: ExpertCompute
    ) -> torch.Tensor:
        """Run phases 2 to 5 group by group, as FasterMoE's smart schedule.

        Args:
            hidden_states: Rows in the order in which this rank sends them, ``[A, M]``.
            probs: Routing probabilities of these rows, ``[A]``.
            compute: Forward pass of the experts.

        Returns:
            Results of these rows, ``[A, M]``.
        """
        smart_schedule = self.executor.smart_schedule(self.micro_batch, compute)
        assert smart_schedule is not None
        return smart_schedule.run(hidden_states, probs, self.take_experts())

    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Phase 3: gather the rows of expert-tensor-parallel peers, sort them by expert, await the replicas.

        Returns:
            Sorted rows, the number of rows of each expert on this device (int64, on the host), and the
            probabilities of the rows.
        """
        micro_batch = self.micro_batch
        rows, probs = micro_batch.arrivals.sort_by_expert(*self.exchange.gather_peers(hidden_states, probs))
        micro_batch.materialization.await_weights()
        # Megatron's dispatcher also returns these numbers as int64 on the CPU.
        rows_per_expert = torch.tensor(micro_batch.exchange.rows_per_expert, dtype=torch.long, device="cpu")
        return rows, rows_per_expert, probs

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Phase 4: sort rows back into the order of arrival, and sum the parts of the peers."""
        rows = self.micro_batch.materialization.end_use(hidden_states)
        rows = self.micro_batch.arrivals.sort_by_source(rows)
        return self.exchange.sum_peers(rows, self._probs_dtype)

    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Phase 5: send results back to the tokens' ranks, beside overlapped shared experts' second half."""
        if self.has_smart_schedule:
            return hidden_states
        in_two = None if self._shared is None else self.exchange.combine_in_two()
        if self._shared is None or in_two is None:
            return self.exchange.combine(hidden_states)
        ticket = in_two.depart(hidden_states)
        self._shared.second_half()
        return in_two.arrive(ticket)[0]

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Phase 6: sum each token's results, restore the input's shape, add overlapped shared experts."""
        output = self._release_after(self.exchange.unpermute(hidden_states))
        self._exchange = self._micro_batch = None
        output = output.view(self._hidden_shape)
        self.executor.timer.passes(output, None, "combine")
        if self._divided_among is not None:
            output = gather_tokens(output, self._divided_among)
        return output if self._shared is None else output + self._shared.output()

    def _release_after(self, output: torch.Tensor) -> torch.Tensor:
        """Pass the node that releases the replicas' memory, under re-materialization."""
        return self.micro_batch.materialization.release(output)


def _of_pass[T](value: T | None) -> T:
    """Return a value that exists only during a forward pass.

    Raises:
        RuntimeError: No forward pass is running.
    """
    if value is None:
        raise RuntimeError(
            "dispatcher: got a phase outside a forward pass, wanted all phases between dispatch_preprocess, "
            "which begins it, and combine_postprocess, which ends it; call the phases in Megatron's order"
        )
    return value
