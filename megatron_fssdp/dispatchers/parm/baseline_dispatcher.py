"""Schedule ``baseline``, DeepSpeed-MoE's: the parts of an expert first gather the tokens of all their ranks.

ESP-AllGather, EP-AlltoAll, experts, ESP-AllReduce, EP-AlltoAll, ESP-Split (Parm, Fig. 3a, Eq. 1). It is here
to compare with; the automatic choice does not consider it.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from megatron_fssdp.dispatchers.parm.dual_collectives import call_with_dual, gather_rows


class BaselineDispatcher(MoEAlltoAllTokenDispatcher):
    """Megatron's dispatcher for whole experts, on the common tokens of all ranks that share an expert.

    After the gather these ranks have the same tokens, and each of them exchanges with the ranks of its own
    part as if it had whole experts. If sequence lengths vary, the host waits once more in each pass, for the
    numbers of tokens of the ranks. The arguments are those of Megatron's dispatchers, over slots.
    """

    def __init__(self, *arguments: Any) -> None:
        *slots, config, pg_collection = arguments
        self._parts = pg_collection.expt_tp
        whole = SimpleNamespace(ep=pg_collection.ep, expt_tp=None, tp_ep=pg_collection.ep)
        super().__init__(*slots, config, whole)
        # Experts sum the gradients of all copies of a token. The gradient is divided by the number of copies
        # where it enters the backward pass, and multiplied again where it leaves it.
        self._copies = 1 if config.sequence_parallel else pg_collection.tp.size()
        self._sizes: list[int] = []
        self._own_shape = torch.Size()

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> Any:
        """ESP-AllGather of tokens, probabilities and routing map; then Megatron's phase on all of them."""
        self._own_shape = hidden_states.shape
        hidden = hidden_states.view(-1, hidden_states.shape[-1])
        hidden, probs = (
            _changing_gradient(x, partial(torch.mul, other=self._copies)) for x in (hidden, probs)
        )
        group = self._parts
        if group.size() > 1:
            self._sizes = [len(hidden)] * group.size()
            if self.config.variable_seq_lengths:
                own = torch.tensor([len(hidden)], device=hidden.device)
                self._sizes = gather_rows(own, [1] * group.size(), group).tolist()
            hidden, probs = (
                # NCCL takes contiguous rows, and Megatron's backward pass passes on what it gets.
                _changing_gradient(
                    gather_from_sequence_parallel_region(
                        x.contiguous(), group=group, output_split_sizes=self._sizes
                    ),
                    Tensor.contiguous,
                )
                for x in (hidden, probs)
            )
            routing_map = gather_rows(routing_map.to(torch.uint8), self._sizes, group).bool()
        return super().dispatch_preprocess(hidden, routing_map, probs)

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Megatron's phase for whole experts, then ESP-AllReduce of the parts' results."""
        rows: Tensor = super().combine_preprocess(hidden_states)
        if self._parts.size() == 1:
            return rows
        summed = rows.to(self.probs.dtype, copy=True)  # Megatron's all-reduce writes into its argument.
        total: Tensor = reduce_from_tensor_model_parallel_region(summed, group=self._parts)
        return total.to(rows.dtype)

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Megatron's last phase, then ESP-Split: results of this rank's own tokens."""
        output: Tensor = super().combine_postprocess(hidden_states)
        if self._parts.size() > 1:
            group, sizes = self._parts, self._sizes
            (output,) = call_with_dual(
                lambda rows: (rows.split(sizes)[group.rank()],),
                lambda own: (gather_rows(own, sizes, group),),
                output,
            )
        output = _changing_gradient(output, partial(torch.mul, other=1 / self._copies))
        return output.view(self._own_shape)


def _changing_gradient(x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Return ``x``; the backward pass changes its gradient."""
    return call_with_dual(lambda x: (x.view_as(x),), lambda gradient: (change(gradient),), x)[0]
