"""Schedule ``s1``: each rank sends its rows to all parts of an expert at once, EP&ESP-AlltoAll.

Expert tensor parallelism divides each expert into X parts on X ranks. Megatron runs an all-to-all among the
ranks of one part and then a gather among the parts. Here every rank sends one copy of a row to each part
(Parm's local dump), and adds the partial results that come back (local combine; §III-C, Fig. 4c and d).

This is Megatron's own dispatcher with other numbers: the D * X ranks of all parts take the place of D
devices, and a slot of a device counts as X slots, one on each part. Local dump and combine then are
Megatron's permutations.

Shape letters: D devices, M model dimension, T tokens, W slots, X expert-tensor-parallel peers.
"""

from copy import copy
from types import SimpleNamespace
from typing import Any

from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor


class S1Dispatcher(MoEAlltoAllTokenDispatcher):
    """Megatron's dispatcher over the ranks of all parts. With whole experts it equals Megatron's.

    The host waits where it waits in Megatron's dispatcher. The arguments are those of Megatron's dispatchers,
    over slots.
    """

    def __init__(
        self, num_local_experts: int, local_expert_indices: list[int], config: Any, pg_collection: Any
    ) -> None:
        self._num_devices, self._num_parts = pg_collection.ep.size(), pg_collection.expt_tp.size()
        ranks = pg_collection.tp_ep
        wide = copy(config)
        wide.num_moe_experts = config.num_moe_experts * self._num_parts
        wide.moe_router_topk = config.moe_router_topk * self._num_parts
        first = ranks.rank() * num_local_experts
        groups = SimpleNamespace(ep=ranks, expt_tp=None, tp_ep=ranks)
        super().__init__(num_local_experts, list(range(first, first + num_local_experts)), wide, groups)

    def for_all_parts(self, x: Tensor) -> Tensor:
        """Repeat the columns ``[T, W]`` of each device's slots for all X parts of the device."""
        if self._num_parts == 1:
            return x
        by_device = x.view(len(x), self._num_devices, 1, -1)
        return by_device.expand(-1, -1, self._num_parts, -1).reshape(len(x), -1)

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> Any:
        """Megatron's phase for ``[T, M]`` tokens and ``[T, W]`` slots, each on all parts of its device."""
        return super().dispatch_preprocess(
            hidden_states, self.for_all_parts(routing_map), self.for_all_parts(probs)
        )

    def combine_postprocess(self, permutated_local_input_tokens: Tensor) -> Tensor:
        """Megatron's last phase; it adds the parts of a result in the data type of the probabilities."""
        rows = permutated_local_input_tokens
        # The fused kernel adds in fp32 by itself.
        is_wide = self._num_parts > 1 and not self.config.moe_permute_fusion
        output: Tensor = super().combine_postprocess(rows.to(self.probs.dtype) if is_wide else rows)
        return output.to(rows.dtype)
