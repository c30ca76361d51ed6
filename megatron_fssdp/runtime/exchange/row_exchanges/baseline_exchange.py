"""Schedule ``baseline``: the parts of an expert first gather the tokens of all their ranks."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from megatron_fssdp.collectives.rows.gathered_counts import gather_counts
from megatron_fssdp.collectives.rows.model_parallel import scale_gradient, split_rows, sum_over
from megatron_fssdp.collectives.rows.uneven_all_gather import uneven_all_gather
from megatron_fssdp.runtime.exchange.expert_groups import ExpertGroups
from megatron_fssdp.runtime.exchange.row_exchanges.megatron_exchange import MegatronExchange


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
