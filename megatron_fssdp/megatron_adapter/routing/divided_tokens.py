"""Which tokens a layer's gate sees if tensor-parallel ranks have the same tokens.

Without sequence parallelism, all tensor-parallel ranks have the same tokens. Megatron refuses MoE layers in
this case. Parm's schedules support it: S1 divides the tokens before the gate, S2 divides them after the gate
(Parm, §III-B)::

    s1, megatron    rank 0: tokens of part 0 -> gate -> dispatch      gradients of the gate are summed
                    rank 1: tokens of part 1 -> gate -> dispatch      over the tensor-parallel ranks
    s2              all ranks: all tokens -> gate -> dispatch divides them

Gradients equal those of the layer on one rank, including the gradients of auxiliary losses.
"""

from typing import Any

import torch
from megatron.core import parallel_state
from torch.func import functional_call

from megatron_fssdp.collectives.rows.model_parallel import split_tokens, sum_gradient
from megatron_fssdp.planning.cost.tensor_schedules import Schedule


class OneRank:
    """Replaces the process group that Megatron asks how many ranks have a layer's tokens.

    Megatron refuses more than one rank without sequence parallelism. Our layer supports it.
    """

    def size(self) -> int:
        """Always 1."""
        return 1


class DividedTokens:
    """Runs a router on the tokens that all tensor-parallel ranks have, or on this rank's part of them.

    Args:
        router: Megatron's router of the layer.
        pg_collection: Process groups of the layer.
    """

    def __init__(self, router: Any, pg_collection: Any) -> None:
        self._router = router
        self.group = pg_collection.tp
        self._split_groups = router.tp_cp_group, router.tp_dp_cp_group
        # Where all ranks have the same tokens, an auxiliary loss must count every token once. It is then
        # computed over the context-parallel and data-parallel ranks only.
        data_parallel = getattr(pg_collection, "dp_cp", None)
        if data_parallel is None:
            data_parallel = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self._whole_groups = pg_collection.cp, data_parallel

    @staticmethod
    def divides_first(schedule: Schedule) -> bool:
        """Whether each rank's gate sees only this rank's part of the tokens.

        Args:
            schedule: Order of collectives of the forward pass.
        """
        return schedule in ("s1", "megatron")

    def route(
        self, hidden: torch.Tensor, padding_mask: torch.Tensor | None, schedule: Schedule
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Run the router and return the tokens to dispatch, their probabilities and their routing map.

        Args:
            hidden: Hidden states ``[sequence, batch, M]``, equal on all tensor-parallel ranks.
            padding_mask: Padding mask of the tokens, bool ``[sequence, batch]``.
            schedule: Order of collectives of this forward pass.

        Returns:
            Tokens ``[sequence, batch, M]``, and their probabilities ``[T, E]`` and routing map bool
            ``[T, E]``. If :meth:`divides_first`, they are this rank's part of the sequence.
        """
        router = self._router
        if not self.divides_first(schedule):
            router.tp_cp_group, router.tp_dp_cp_group = self._whole_groups
            return hidden, *router(hidden, padding_mask)
        router.tp_cp_group, router.tp_dp_cp_group = self._split_groups
        own = split_tokens(hidden, self.group)
        if padding_mask is not None:
            padding_mask = padding_mask.chunk(self.group.size())[self.group.rank()]
        # Each rank has gradients from its own tokens only, so they are summed over the ranks. Megatron does
        # this at the end of an iteration, but only under sequence parallelism.
        parameters = {name: sum_gradient(p, self.group) for name, p in router.named_parameters()}
        return own, *functional_call(router, parameters, (own, padding_mask))
