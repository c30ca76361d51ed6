"""What a layer's gate sees where tensor-parallel ranks have the same tokens: without sequence parallelism.

Megatron trains no MoE layer there. Parm's schedules do: S1 divides the tokens before the gate, S2 behind it
(Parm, §III-B). Gradients come out as in a layer on one rank, auxiliary losses' included.
"""

from typing import Any

import torch
from megatron.core import parallel_state
from torch.func import functional_call

from megatron_fssdp.collectives.rows.model_parallel import split_tokens, sum_gradient
from megatron_fssdp.planning.cost.tensor_schedules import Schedule


class OneRank:
    """Stands where Megatron asks how many ranks share a layer's tokens, to refuse more than one."""

    def size(self) -> int:
        """This layer sees to it itself."""
        return 1


class DividedTokens:
    """Runs a router on equal tokens of all ranks, or on each rank's part of them.

    Args:
        router: Megatron's.
        pg_collection: The layer's process groups.
    """

    def __init__(self, router: Any, pg_collection: Any) -> None:
        self._router = router
        self.group = pg_collection.tp
        self._split_groups = router.tp_cp_group, router.tp_dp_cp_group
        # Ranks with the same tokens count them once: auxiliary losses are over the other ranks only.
        data_parallel = getattr(pg_collection, "dp_cp", None)
        if data_parallel is None:
            data_parallel = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self._whole_groups = pg_collection.cp, data_parallel

    @staticmethod
    def divides_first(schedule: Schedule) -> bool:
        """Whether each rank's gate sees its part of the tokens only."""
        return schedule in ("s1", "megatron")

    def route(
        self, hidden: torch.Tensor, padding_mask: torch.Tensor | None, schedule: Schedule
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The tokens to dispatch, and the router's probabilities and map for them.

        Args:
            hidden: ``[S, B, M]``, the same on all tensor-parallel ranks.
            padding_mask: bool ``[S, B]``.
            schedule: Of this forward pass.
        """
        router = self._router
        if not self.divides_first(schedule):
            router.tp_cp_group, router.tp_dp_cp_group = self._whole_groups
            return hidden, *router(hidden, padding_mask)
        router.tp_cp_group, router.tp_dp_cp_group = self._split_groups
        own = split_tokens(hidden, self.group)
        if padding_mask is not None:
            padding_mask = padding_mask.chunk(self.group.size())[self.group.rank()]
        # Megatron sums such gradients at the end of an iteration, but only under sequence parallelism.
        parameters = {name: sum_gradient(p, self.group) for name, p in router.named_parameters()}
        return own, *functional_call(router, parameters, (own, padding_mask))
