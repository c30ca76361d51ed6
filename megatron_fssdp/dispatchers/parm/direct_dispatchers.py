"""Schedules ``s1`` and ``s2``: ranks send rows to all parts of an expert at once, EP&ESP-AlltoAll.

Expert tensor parallelism divides each expert into X parts on X ranks. Megatron runs an all-to-all among the
ranks of one part and then a gather among the parts. Here every rank sends one copy of a row to each part
(Parm's local dump), and adds the partial results that come back (local combine; §III-C, Fig. 4c and d).

``s1`` is Megatron's own dispatcher with other numbers: the D * X ranks of all parts take the place of D
devices, and a slot of a device counts as X slots, one on each part. Local dump and combine then are
Megatron's permutations.

Under ``s2``, tensor-parallel ranks with the same tokens divide the rows after the gate. All Y ranks run the
gate on all their common tokens. The n-th row of slot w goes to rank (n + w) mod Y, which sends it to all
parts of the slot's device. The results go to all Y ranks (MP-AllGather), simultaneously with the second
all-to-all (SAA; Parm, §III-B, Fig. 3c, §III-D).

Shape letters: D devices, M model dimension, R rows that a rank receives, T tokens, W slots, X
expert-tensor-parallel peers, Y tensor-parallel ranks.
"""

from copy import copy
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from megatron_fssdp.collectives.all_ranks import of_all_ranks
from megatron_fssdp.dispatchers.parm.dual_collectives import OnRows, call_with_dual
from megatron_fssdp.dispatchers.parm.shared_route import SharedRoute


class S1Dispatcher(MoEAlltoAllTokenDispatcher):
    """Megatron's dispatcher over the ranks of all parts. With whole experts it equals Megatron's.

    The host waits where it does there. The arguments are those of Megatron's dispatchers, over slots.
    """

    def __init__(self, num_local_experts: int, _: list[int], config: Any, pg_collection: Any) -> None:
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


class S2Dispatcher(S1Dispatcher):
    """Exchanges the rows of tokens that all tensor-parallel ranks have.

    The routing maps must be equal on all tensor-parallel ranks, because each rank computes from its map which
    rows the others send. Any map over slots will do, with replicas too, but not one that is padded for
    quantized experts, because a rank's share is no multiple. The host waits at one place, before the
    all-to-all, as in Megatron's dispatcher. Building the object is collective over the tensor-parallel ranks.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.simultaneous = True  # Results are passed on slice by slice (SAA), not after all have arrived.
        self._pg = arguments[-1]
        self._peers, self._device_Y = self._pg.tp, of_all_ranks(self._pg.ep.rank(), self._pg.tp)
        self._place_TW = torch.empty(0)

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> Any:
        """Divide the rows among the tensor-parallel ranks and exchange counts; the next phase forms them."""
        self.hidden_shape, self.probs = hidden_states.shape, probs
        size, num_slots = self._peers.size(), routing_map.shape[1]
        slot_W = torch.arange(num_slots, device=routing_map.device)
        # The first row of each slot goes to another rank; otherwise rank 0 would get every remainder.
        first_YW = (torch.arange(size, device=routing_map.device)[:, None] - slot_W) % size
        counts_YW = (routing_map.sum(dim=0) - first_YW + size - 1) // size
        start_YW = (counts_YW.view(-1).cumsum(dim=0) - counts_YW.view(-1)).view(size, num_slots)
        number_TW = routing_map.cumsum(dim=0) - 1
        start_TW = start_YW.gather(0, (number_TW + slot_W) % size)
        # Place 0 is for all pairs of token and slot that are no rows.
        self._place_TW = torch.where(routing_map, start_TW + number_TW // size + 1, 0)

        self.tokens_per_expert = self.preprocess(self.for_all_parts(counts_YW[self._peers.rank()][None]))
        # Megatron takes these numbers to the host together with its own; there it has no use for them.
        self.output_splits_tp = counts_YW.view(size, self._num_devices, -1).sum(dim=2)
        self._maybe_update_cuda_sync_point("before_ep_alltoall")
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(hidden_states)
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize(
            "before_permutation_1", self.tokens_per_expert
        )
        tokens = hidden_states.view(-1, hidden_states.shape[-1])
        if self.config.overlap_moe_expert_parallel_comm:  # Megatron frees what is dispatched.
            return tokens.clone(), probs.clone()
        return tokens, probs

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """MP-Split and EP&ESP-AlltoAll; in the backward pass all ranks get the gradients of all rows."""
        if self.shared_experts is not None:
            self.shared_experts.wait_current_stream()
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize(
            "before_ep_alltoall", self.tokens_per_expert
        )
        send_YD, received = self.output_splits_tp.tolist(), self.output_splits
        received = [sum(send_YD[self._peers.rank()])] if received is None else [int(n) for n in received]
        route = SharedRoute(self._pg, self._device_Y, send_YD, received)
        place = self._place_TW.view(-1)
        numbers = torch.arange(len(place), device=place.device)
        # ``token * W + slot`` of the rows of all tensor-parallel ranks, by rank, then slot.
        pairs = numbers.new_empty(1 + sum(route.rows_Y)).scatter_(0, place, numbers)[1:]
        self._send, self._collect = self._both_ways(route, pairs, *probs.shape)
        rows, row_probs = call_with_dual(self._send, self._collect, hidden_states, probs)
        if self.shared_experts is not None:
            self.shared_experts.linear_fc1_forward_and_act(rows)
        return rows, row_probs

    def _both_ways(
        self, route: SharedRoute, pairs: Tensor, num_tokens: int, num_slots: int
    ) -> tuple[OnRows, OnRows]:
        """Functions that send rows and collect results, each of which is the other's backward pass."""
        own, simultaneous = pairs.split(route.rows_Y)[route.rank], self.simultaneous

        def send(hidden: Tensor, probs: Tensor | None = None) -> tuple[Tensor, ...]:
            """This rank's share of the rows of ``[T, M]`` and ``[T, W]``, to all parts of their slots."""
            rows = [hidden.index_select(0, own // num_slots)]
            if probs is not None:
                rows.append(probs.reshape(-1).index_select(0, own))
            return tuple(route.send(x) for x in rows)

        def collect(rows: Tensor, probs: Tensor | None = None) -> tuple[Tensor, ...]:
            """From ``[R, M]`` and ``[R]``: sums over parts and slots ``[T, M]``, over parts ``[T, W]``."""
            given = [rows] if probs is None else [rows, probs]
            summed, *scores = route.collect(given, simultaneous=simultaneous)
            tokens = summed.new_zeros(num_tokens, summed.shape[-1])
            tokens.index_add_(0, pairs // num_slots, summed)
            flat = [x.new_zeros(num_tokens * num_slots).index_copy_(0, pairs, x) for x in scores]
            return tokens, *(x.view(num_tokens, num_slots) for x in flat)

        return send, collect

    def token_combine(self, hidden_states: Tensor, *_: Any) -> Tensor:
        """EP&ESP-AlltoAll with MP-AllGather, and the sum of each token's results, ``[T, M]``."""
        if self.shared_experts is not None:
            self.shared_experts.wait_current_stream()
        (output,) = call_with_dual(self._collect, self._send, hidden_states)
        del self._collect, self._send  # They hold memory.
        if self.shared_experts is not None:
            self.shared_experts.linear_fc2_forward(output)
            self.shared_experts.post_forward_comm()
        return output

    def combine_postprocess(self, permutated_local_input_tokens: Tensor) -> Tensor:
        """Results in the shape of the input, with those of overlapped shared experts."""
        output = permutated_local_input_tokens.view(self.hidden_shape)
        return output if self.shared_experts is None else output + self.shared_experts.get_output()
