"""Megatron's six dispatcher phases for any placement of the experts.

Shape legend: S sequence, B batch, T tokens of this rank, M model dim, E experts.
"""

from typing import Any

import torch
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher

from megatron_fssdp.runtime import token_exchange
from megatron_fssdp.runtime.expert_layout import ExpertWeights
from megatron_fssdp.runtime.layer_executor import LayerExecutor, MicroBatch
from megatron_fssdp.runtime.materialization import Materialization
from megatron_fssdp.runtime.pipelined_experts import ExpertCompute
from megatron_fssdp.runtime.token_exchange import DispatchRecord


class PlacementTokenDispatcher(MoETokenDispatcher):
    """Sends tokens to wherever the running placement has their experts.

    Megatron calls the phases of one forward pass one after the other, so what they share
    lives here between the first and the last, and nowhere longer; the backward pass has
    its own copies in the autograd graph.
    """

    def __init__(self, executor: LayerExecutor, config: Any, pg_collection: Any) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self.executor = executor
        self._record: DispatchRecord | None = None
        self._materialization: Materialization | None = None
        self._micro_batch: MicroBatch | None = None
        self._experts: list[ExpertWeights] = []
        self._hidden_shape = torch.Size()
        self._probs_dtype = torch.float32
        self._peers = executor.groups.expert_tensor_parallel

    @property
    def is_pipelined(self) -> bool:
        """Whether dispatch, experts and combine run in steps."""
        return self.executor.groups.ring is not None

    @property
    def record(self) -> DispatchRecord:
        """The exchange of the forward pass under way."""
        if self._record is None:
            raise RuntimeError(
                "dispatcher phases out of order: dispatch_preprocess starts a forward pass, "
                "combine_postprocess ends it"
            )
        return self._record

    def take_experts(self) -> list[ExpertWeights]:
        """Weights of the experts present in this forward pass, ascending; once a pass."""
        experts, self._experts = self._experts, []
        return experts

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Phase 1: exchange counts, materialize the experts, permute the tokens.

        Args:
            hidden_states: ``[S, B, M]``.
            routing_map: bool ``[T, E]``.
            probs: ``[T, E]``.
        """
        self._hidden_shape = hidden_states.shape
        self._probs_dtype = probs.dtype  # in which Megatron sums the parts of an expert's results
        self._micro_batch = micro_batch = self.executor.begin_micro_batch(routing_map)
        self._materialization = micro_batch.materialization
        if self.is_pipelined:
            hidden_states, self._experts = self._materialization.apply(hidden_states, wait=False)
        elif not self._materialization.beside_dispatch:
            hidden_states, self._experts = self._materialization.apply(hidden_states)
        self._record = micro_batch.exchange
        return token_exchange.permute(hidden_states.reshape(-1, self._hidden_shape[-1]), probs, self._record)

    def token_dispatch(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Phase 2: all-to-all to the experts' devices; in :meth:`run_pipeline` if that is in steps."""
        if self.is_pipelined:
            return hidden_states, probs
        rows, probs = token_exchange.dispatch(
            hidden_states, probs, self.record, self.ep_group, meanwhile=self.executor.plan_following
        )
        if self._materialization is not None and self._materialization.beside_dispatch:
            rows, self._experts = self._materialization.apply(rows)
        return rows, probs

    def run_pipeline(
        self, hidden_states: torch.Tensor, probs: torch.Tensor, compute: ExpertCompute
    ) -> torch.Tensor:
        """Phases 2 to 5 in steps: results of the rows that this rank sends.

        Args:
            hidden_states: ``[A, M]`` in the order of sending.
            probs: ``[A]``.
            compute: The experts.
        """
        assert self._micro_batch is not None
        pipeline = self.executor.pipeline(self._micro_batch, compute)
        assert pipeline is not None
        return pipeline.run(hidden_states, probs, self.take_experts())

    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Phase 3: gather the peers' rows, sort by present expert; also the rows of each, on the host."""
        rows, probs = token_exchange.gather_peers(hidden_states, probs, self.record, self._peers)
        rows, probs = token_exchange.sort_by_expert(rows, probs, self.record)
        # The CPU dtype and device that Megatron's dispatcher returns.
        rows_per_expert = torch.tensor(self.record.rows_per_expert, dtype=torch.long, device="cpu")
        return rows, rows_per_expert, probs

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Phase 4: back into the order of arrival, and the sum of the peers' parts."""
        if self._materialization is not None:
            hidden_states = self._materialization.end_use(hidden_states)
        rows = token_exchange.sort_by_source(hidden_states, self.record)
        return token_exchange.sum_over_peers(rows, self.record, self._peers, self._probs_dtype)

    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Phase 5: all-to-all back to the tokens' ranks."""
        if self.is_pipelined:
            return hidden_states
        return token_exchange.combine(hidden_states, self.record, self.ep_group)

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Phase 6: sum each token's results, in the shape of the input."""
        output = token_exchange.unpermute(hidden_states, self.record)
        if self._materialization is not None:
            output = self._materialization.release(output)
        self._record = self._materialization = self._micro_batch = None
        return output.view(self._hidden_shape)
