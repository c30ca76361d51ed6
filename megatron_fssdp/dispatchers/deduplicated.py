"""The deduplicated exchange as a dispatcher: a token's hidden state crosses each link once, in two hops.

Megatron's dispatchers send a row for each pair of a token and a slot. Here a row is a token. It goes to one
relay in each node that has one of its slots, and from there to each such device of the node
(``deduplicated_traffic.py`` has a drawing). The device makes one row for each of the token's slots.
Results are summed in fp32 on the device, then on the relay, then at the source::

    dispatch_preprocess    counts; one row for each token and node
    token_dispatch         first hop, one row for each token and device, second hop
    dispatch_postprocess   gather of expert-tensor-parallel peers, one row for each token and slot
    experts
    combine_preprocess     sums on the device, reduce-scatter among the peers
    token_combine          second hop back, sums on the relay, first hop back
    combine_postprocess    sums at the source

With one node the first hop is left out, and with one device in each node the second.

A token travels with its *choices*: the numbers of its slots, and their probabilities. Both are in one tensor,
the *payload*, ``[T, 2K]``. The bits of the numbers stand there as floats; they are only copied. The payload
takes the place of the probabilities that Megatron's phases hand on.

**Host waits.** One for each forward pass, as in Megatron's dispatcher, and none in the backward pass: every
rank's numbers of rows for each node, device and slot travel in one gather, from which the host knows the
sizes of both hops. It waits after it has queued the payload and the order of the rows.

**Combined 1F1B schedule** (``overlap_moe_expert_parallel_comm``). Results are right, and the hops are in the
segments that this schedule hides: every phase returns memory of its own, and no phase keeps its input.

Shape letters: T tokens, K choices per token, A rows that a rank sends, R rows that a rank receives,
M model dimension, D devices, N nodes, U slots of a device, W slots of all devices, X expert-tensor-parallel
peers.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel import (
    all_to_all,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.moe_utils import get_align_size_for_quantization, pad_routing_map
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from megatron_fssdp.dispatchers.parm.dual_collectives import call_with_dual
from megatron_fssdp.planning.cost.deduplicated_traffic import TwoHops
from megatron_fssdp.planning.placement.topology import Topology


class DeduplicatedTokenDispatcher(MoEAlltoAllTokenDispatcher):
    """Sends each token once to each node, and there once to each device that has one of its slots.

    The positional arguments are Megatron's, over slots: ``config.num_moe_experts`` is D * U. ``most_choices``
    is the largest number of slots to which a token goes, K. Default: the router's top-k. A routing map that
    is padded to the capacity needs the number of experts.
    """

    def __init__(self, *arguments: Any, topology: Topology, most_choices: int | None = None) -> None:
        super().__init__(*arguments)
        self.cuda_sync_point = "before_ep_alltoall"
        # A padded map has any number of slots for a token.
        pads = self.config.moe_router_padding_for_quantization
        most_choices = self.num_experts if pads else most_choices or self.config.moe_router_topk
        self._num_choices = min(most_choices, self.num_experts)
        self._topology = topology
        device_W = np.arange(self.ep_size).repeat(self.num_local_experts)
        node_W = topology.node_of_device_D[device_W]
        none = np.empty((0, 0), np.int64)
        self._relay_DN = TwoHops(topology, none, none).relay_DN
        is_near_W = node_W == topology.node_of_device[self.ep_rank]
        ranks_W = {
            "relay": self._relay_DN[self.ep_rank][node_W],
            "device": device_W,
            "near": np.where(is_near_W, device_W, self.ep_size),
        }
        # For each slot the rank to which its tokens go. The last entry stands for "no choice". Choices that
        # do not take part in a hop lead to "rank" D, which does not exist.
        self._ranks_W = {name: torch.from_numpy(np.append(of, self.ep_size)) for name, of in ranks_W.items()}
        self._has_first_hop = topology.num_nodes > 1
        self._has_second_hop = topology.num_nodes < self.ep_size or self.ep_size == 1
        self._splits: list[tuple[list[int], list[int]]] = []
        self._copies: list[_Copies] = []

    def dispatch_preprocess(
        self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Gather the counts of all ranks, and copy the tokens ``[sequence, batch, M]`` for the first hop.

        Routing map and probabilities are ``[T, W]``. Returns rows ``[A, M]`` and their payload ``[A, 2K]`` in
        the order of sending. Raises a RuntimeError if a token goes to more slots than ``most_choices``.
        """
        self.hidden_shape, self._probs_dtype = hidden_states.shape, probs.dtype
        if self.config.moe_router_padding_for_quantization:
            routing_map = pad_routing_map(routing_map, get_align_size_for_quantization(self.config))
        slot_TK = self._choices(routing_map)
        relay_TD, device_TD = self._hits("relay", slot_TK), self._hits("device", slot_TK)
        counts_W = routing_map.sum(dim=0)
        num_lost = counts_W.sum() - (slot_TK < self.num_experts).sum()
        numbers = torch.cat([relay_TD.sum(dim=0), device_TD.sum(dim=0), counts_W, num_lost.view(1)])
        numbers = gather_from_sequence_parallel_region(numbers, group=self.tp_ep_group)
        self.num_out_tokens = self.num_global_tokens_per_local_expert = None
        numbers = self._maybe_dtoh_and_synchronize("before_permutation_1", numbers)
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(hidden_states)
        payload = self._payload(slot_TK, probs)
        token = _tokens_by_destination(relay_TD if self._has_first_hop else device_TD)
        self._read(self._maybe_dtoh_and_synchronize("before_ep_alltoall", numbers))
        self._copies = []
        return self._copy(token, hidden_states.view(-1, hidden_states.shape[-1]), payload)

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Send rows ``[A, M]`` and their payload through both hops, beside overlapped shared experts.

        Returns the tokens that have a choice on this device, ``[R, M]``, and their payload, ``[R, 2K]``.
        """
        rows, payload = hidden_states, probs
        if self.shared_experts is not None:
            self.shared_experts.wait_current_stream()
        for hop, (sends, receives) in enumerate(self._splits):
            if hop:
                token = _tokens_by_destination(self._hits("near", self._slots_of(payload)))
                rows, payload = self._copy(token, rows, payload)
            rows, payload = self._exchange(rows, receives, sends), self._exchange(payload, receives, sends)
        if self.shared_experts is not None:
            self.shared_experts.linear_fc1_forward_and_act(rows)
        return rows, payload

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gather the tokens of the peers, and make one row for each choice on this device.

        Returns rows by slot, the number of rows of each slot (int64 ``[U]``, on the host) and their
        probabilities.
        """
        rows, payload = hidden_states, probs
        if self.tp_size > 1:
            rows, payload = (
                gather_from_sequence_parallel_region(x, group=self.tp_group, output_split_sizes=self._rows_X)
                for x in (rows, payload)
            )
        place_RK = self._slots_of(payload) - self.local_expert_indices[0]
        is_here = (place_RK >= 0) & (place_RK < self.num_local_experts)
        place_RK = torch.where(is_here, place_RK, self.num_local_experts)
        choice = torch.argsort(place_RK.view(-1), stable=True)[: int(self._counts_U.sum())]
        copies = _Copies(torch.div(choice, self._num_choices, rounding_mode="floor"), len(rows))
        self._copies.append(copies)
        prob_RK = payload[:, : self._num_choices].to(self._probs_dtype)
        return copies.spread(rows), self._counts_U, prob_RK.reshape(-1).index_select(0, choice)

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Sum the results of each token on this device, and those of the parts of the experts."""
        rows = self._copies.pop().sum(hidden_states)
        if self.tp_size > 1:
            rows = reduce_scatter_to_sequence_parallel_region(
                rows.to(self._probs_dtype), group=self.tp_group, input_split_sizes=self._rows_X
            ).to(rows.dtype)
        return rows

    def token_combine(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Send the sums back through both hops, beside overlapped shared experts."""
        rows, shared = hidden_states, self.shared_experts
        if shared is not None:
            shared.wait_current_stream()
        for hop, (sends, receives) in reversed(list(enumerate(self._splits))):
            rows = self._exchange(rows, sends, receives)
            if hop:
                rows = self._copies.pop().sum(rows)
        if shared is not None:
            shared.linear_fc2_forward(rows)
            shared.post_forward_comm()
        return rows

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Sum each token's results, restore the input's shape, and add overlapped shared experts."""
        output = self._copies.pop().sum(hidden_states).view(self.hidden_shape)
        return output if self.shared_experts is None else output + self.shared_experts.get_output()

    def _choices(self, routing_map: Tensor) -> Tensor:
        """Slots of each token, ascending, int64 ``[T, K]``; W where there is no choice."""
        slots = torch.arange(self.num_experts, dtype=torch.int32, device=routing_map.device)
        slot_TW = torch.where(routing_map, slots, self.num_experts)
        return slot_TW.topk(self._num_choices, dim=1, largest=False, sorted=True).values.long()

    def _hits(self, name: str, slot_TK: Tensor) -> Tensor:
        """Whether a token goes to a rank, bool ``[T, D]``, by one of the tables in ``_ranks_W``."""
        table = self._ranks_W[name] = self._ranks_W[name].to(slot_TK.device, non_blocking=True)
        hit = torch.zeros(len(slot_TK), self.ep_size + 1, dtype=torch.bool, device=slot_TK.device)
        return hit.scatter_(1, table[slot_TK], True)[:, : self.ep_size]

    def _payload(self, slot_TK: Tensor, probs: Tensor) -> Tensor:
        """Probabilities of the choices, and the bits of their slots, ``[T, 2K]``."""
        is_chosen = slot_TK < self.num_experts
        prob_TK = torch.where(is_chosen, probs.gather(1, slot_TK.clamp(max=self.num_experts - 1)), 0)
        dtype = torch.promote_types(probs.dtype, torch.float32)
        bits = slot_TK if dtype == torch.float64 else slot_TK.int()
        return torch.cat([prob_TK.to(dtype), bits.view(dtype)], dim=1)

    def _slots_of(self, payload: Tensor) -> Tensor:
        """Slots in a payload, int64 ``[T, K]``."""
        bits = payload.detach()[:, self._num_choices :].contiguous()
        return bits.view(torch.int64 if bits.dtype == torch.float64 else torch.int32).long()

    def _read(self, numbers: Tensor) -> None:
        """Compute the sizes of all messages from the numbers of all ranks, ``[D * X * (2D + W + 1)]``."""
        me, num_devices = self.ep_rank, self.ep_size
        table_XD = numbers.cpu().numpy().reshape(num_devices, self.tp_size, -1).swapaxes(0, 1)
        own_D = table_XD[self.tp_rank]
        if own_D[me, -1]:
            raise RuntimeError(
                f"tokens go to {own_D[me, -1]} more slots than their rows have room for: wanted at most "
                f"{self._num_choices} slots for a token; build the dispatcher with a larger most_choices"
            )
        tokens_DN = np.take_along_axis(own_D[:, :num_devices], self._relay_DN, axis=1)
        hops = TwoHops(self._topology, tokens_DN, own_D[:, num_devices : 2 * num_devices])
        splits = [hops.first_hop(me)] * self._has_first_hop + [hops.second_hop(me)] * self._has_second_hop
        self._splits = [(sends.tolist(), receives.tolist()) for sends, receives in splits]
        self._rows_X = table_XD[:, :, num_devices + me].sum(axis=1).tolist()
        counts_XDW = table_XD[:, :, 2 * num_devices : -1]
        self._counts_U = torch.from_numpy(counts_XDW[:, :, self.local_expert_indices].sum(axis=(0, 1)))

    def _copy(self, token: Tensor, rows: Tensor, payload: Tensor) -> tuple[Tensor, Tensor]:
        """Copies for the next hop; ``token`` has the token of each copy, then numbers without meaning."""
        sends, _ = self._splits[len(self._copies)]
        copies = _Copies(token[: sum(sends)], len(rows))
        self._copies.append(copies)
        return copies.spread(rows), payload.index_select(0, copies.token_A)

    def _exchange(self, rows: Tensor, output_splits: list[int], input_splits: list[int]) -> Tensor:
        received: Tensor = all_to_all(
            self.ep_group, rows, output_splits, input_splits, use_nccl_stream=self.use_nccl_stream
        )
        return received


def _tokens_by_destination(hit_TD: Tensor) -> Tensor:
    """Tokens that go to each rank, by rank and then token, int64; on CUDA, other numbers follow."""
    goes = hit_TD.t().reshape(-1)
    if goes.device.type == "cpu":
        position = goes.nonzero().view(-1)
    else:
        position = goes.argsort(descending=True, stable=True)  # The host does not know their number yet.
    return position % max(len(hit_TD), 1)


@dataclass(frozen=True, eq=False)
class _Copies:
    """Copies of tokens, and the sums of what comes back for them; each is the other's backward pass.

    Sums are formed in fp32 or better. torch would sum rows of bf16 in bf16.
    """

    token_A: Tensor  # of each copy, int64; a token has none, one or several
    num_tokens: int

    def spread(self, tokens: Tensor) -> Tensor:
        """Copies ``[A, M]`` of tokens ``[T, M]``."""
        return call_with_dual(self._copied, self._summed, tokens)[0]

    def sum(self, rows: Tensor) -> Tensor:
        """Sums ``[T, M]`` of the rows ``[A, M]`` of each token, in their data type; zeros without rows."""
        return call_with_dual(self._summed, self._copied, rows)[0]

    def _copied(self, tokens: Tensor) -> tuple[Tensor]:
        return (tokens.index_select(0, self.token_A),)

    def _summed(self, rows: Tensor) -> tuple[Tensor]:
        wide = torch.promote_types(rows.dtype, torch.float32)
        sums = rows.new_zeros((self.num_tokens, *rows.shape[1:]), dtype=wide)
        return (sums.index_add_(0, self.token_A, rows.to(wide)).to(rows.dtype),)
