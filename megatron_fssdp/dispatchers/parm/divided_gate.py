"""The gate of a layer whose tensor-parallel ranks have the same tokens.

Without sequence parallelism, all tensor-parallel ranks have the same tokens. Megatron refuses to train MoE
layers in this case. Parm's schedules support it: S1 divides the tokens before the gate, S2 divides their rows
after it (Parm, §III-B)::

    s1, megatron    rank 0: tokens of part 0 -> gate -> dispatch      gradients of the gate are summed
                    rank 1: tokens of part 1 -> gate -> dispatch      over the tensor-parallel ranks
    s2, baseline    all ranks: all tokens -> gate -> dispatch

Gradients equal those of the layer on one rank, including the gradients of auxiliary losses.
"""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from torch import Tensor
from torch.func import functional_call

from megatron_fssdp.dispatchers.parm.parm_dispatcher import ParmDispatcher


class DividedGate:
    """Runs the layer's router on the tokens that all tensor-parallel ranks have, or on this rank's part."""

    def __init__(self, router: Any, pg_collection: Any) -> None:
        self._router, self._peers = router, pg_collection.tp
        self._divided_groups = router.tp_cp_group, router.tp_dp_cp_group
        # Where all ranks have the same tokens, an auxiliary loss must count every token once. It is then
        # computed over the context-parallel and data-parallel ranks only.
        data_parallel = getattr(pg_collection, "dp_cp", None)
        if data_parallel is None:
            data_parallel = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self._whole_groups = pg_collection.cp, data_parallel

    def route(
        self, dispatcher: ParmDispatcher, hidden: Tensor, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Begin a forward pass of the dispatcher and run the router.

        The layer's ``route`` calls it instead of the router and returns the last two results. The layer's
        ``preprocess`` then goes on with the first one in place of the hidden states that it is given. Shared
        experts compute with all tokens.

        Args:
            dispatcher: Dispatcher of the pass.
            hidden: Hidden states ``[sequence, batch, M]``, equal on all tensor-parallel ranks.
            padding_mask: Padding mask of the tokens, bool ``[sequence, batch]``.

        Returns:
            Tokens to dispatch ``[sequence, batch, M]``, their probabilities ``[T, E]`` and their routing map,
            bool ``[T, E]``. Under ``s1`` and ``megatron`` they are this rank's part of the sequence.
        """
        router = self._router
        if not dispatcher.begin(hidden):
            router.tp_cp_group, router.tp_dp_cp_group = self._whole_groups
            return hidden, *router(hidden, padding_mask)
        router.tp_cp_group, router.tp_dp_cp_group = self._divided_groups
        own = scatter_to_sequence_parallel_region(hidden, group=self._peers)
        if padding_mask is not None:
            padding_mask = padding_mask.chunk(self._peers.size())[self._peers.rank()]
        parameters = {name: self._summed(p) for name, p in router.named_parameters()}
        return own, *functional_call(router, parameters, (own, padding_mask))

    def _summed(self, parameter: Tensor) -> Tensor:
        """The parameter; its gradient, of own tokens only, is summed over the ranks, in fp32 or wider."""
        wide = parameter.to(torch.promote_types(parameter.dtype, torch.float32))
        summed: Tensor = copy_to_tensor_model_parallel_region(wide, group=self._peers)
        return summed.to(parameter.dtype)
