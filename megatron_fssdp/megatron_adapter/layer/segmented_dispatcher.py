"""The dispatcher's phases under Megatron's combined 1F1B schedule (``--overlap-moe-expert-parallel-comm``).

That schedule runs a layer's forward pass in four segments, between which it runs segments of another
micro-batch's backward pass. Each segment has an autograd graph of its own with detached inputs::

    segment      pre_dispatch_computation      moe_dispatch        mlp                        moe_combine
    forward      attention, gate, phase 1      phase 2             phases 3 and 4, experts    phases 5 and 6
    replicas                                                       materialize, release
    backward     spRS ends                                         (spAG), spRS starts

Weights are tensors that pass from the node ``materialize`` to the experts. Both must therefore be in one
segment, which is the experts' one. Re-materialization (in parentheses) starts to gather a layer's replicas
again when the experts of the layer above have run backward. Megatron also frees the memory of a segment's
inputs when the segment's forward pass is over. A segment's results, and what it keeps for its backward pass,
must not share it.

Shape letters: T tokens, M model dimension, E experts, A rows that a rank sends, R rows that a rank receives.
"""

import torch

from megatron_fssdp.megatron_adapter.layer.placement_dispatcher import PlacementTokenDispatcher
from megatron_fssdp.runtime.exchange.smart_schedule import ExpertCompute


class SegmentedTokenDispatcher(PlacementTokenDispatcher):
    """A dispatcher whose experts are materialized in the segment in which they compute."""

    def _materialize_before(self, tokens: torch.Tensor) -> torch.Tensor:
        materialization = self.micro_batch.materialization
        if materialization.in_turn and not self.has_smart_schedule:
            materialization.await_weights()
        return tokens

    def _materialize_after(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Phase 1: exchange counts, permute the tokens.

        Args:
            hidden_states: Hidden states, ``[sequence, batch, M]``.
            routing_map: Whether a token is routed to an expert, bool ``[T, E]``.
            probs: Routing probabilities, ``[T, E]``.

        Returns:
            Permuted tokens ``[A, M]`` and their probabilities ``[A]``.
        """
        rows, row_probs = super().dispatch_preprocess(hidden_states, routing_map, probs)
        return _apart(rows, hidden_states), _apart(row_probs, probs)

    def token_dispatch(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Phase 2: send rows to the experts' devices; nothing under the smart schedule."""
        rows, row_probs = super().token_dispatch(hidden_states, probs)
        return _apart(rows, hidden_states), _apart(row_probs, probs)

    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Phase 3: pass the node that materializes the experts, sort the rows by expert, await the replicas.

        Returns:
            Sorted rows, the number of rows of each expert on this device (int64, on the host), and the
            probabilities of the rows.
        """
        order = self.micro_batch.arrivals.by_expert
        if order is not None and order.is_cuda:
            # It was made beside the dispatch, on the stream of messages, and is kept for the backward pass.
            order.record_stream(torch.cuda.current_stream())
        rows, self._experts = self.micro_batch.materialization.apply(hidden_states, wait=False)
        rows, rows_per_expert, probs = super().dispatch_postprocess(rows, probs)
        return self._kept(rows, hidden_states), rows_per_expert, probs

    def run_smart_schedule(
        self, hidden_states: torch.Tensor, probs: torch.Tensor, compute: ExpertCompute
    ) -> torch.Tensor:
        """Pass the node that materializes the experts, and run phases 2 to 5 as FasterMoE's smart schedule.

        Args:
            hidden_states: Rows in the order in which this rank sends them, ``[A, M]``.
            probs: Routing probabilities of these rows, ``[A]``.
            compute: Forward pass of the experts.

        Returns:
            Results of these rows, ``[A, M]``.
        """
        rows, self._experts = self.micro_batch.materialization.apply(hidden_states)
        # The experts keep rows of this device for their backward pass, and these are views of the input.
        rows = super().run_smart_schedule(self._kept(rows, hidden_states), probs, compute)
        return self.micro_batch.materialization.release(rows)

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Phase 4: sort rows back, sum the parts of the peers, release the replicas.

        Replicas are released, and gathered again in the backward pass, on the stream on which they are used.
        """
        rows = super().combine_preprocess(hidden_states)
        return self.micro_batch.materialization.release(rows)

    def _release_after(self, output: torch.Tensor) -> torch.Tensor:
        return output

    def _kept(self, rows: torch.Tensor, freed: torch.Tensor) -> torch.Tensor:
        """Rows that the experts keep for their backward pass, while Megatron frees the input."""
        # With one expert on a device, Megatron keeps the input itself (should_free_input).
        return rows if self.config.num_moe_experts == self.ep_size else _apart(rows, freed)


def _apart(tensor: torch.Tensor, freed: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy if it shares its memory with a tensor whose memory will be freed."""
    is_shared = tensor.untyped_storage().data_ptr() == freed.untyped_storage().data_ptr()
    return tensor.clone() if is_shared else tensor
