"""A stack of MoE layers with forced routing under Megatron's dispatcher alone, the variant ``none``.

The stack under a strategy is :class:`~benchmarks.testbed.slot_stack.SlotStack`.

Shape letters: T tokens of this rank, M model dim, F ffn dim, E experts, D devices, L layers, Z micro-batches,
P slots of a device, W slots of all devices, R rows that a rank receives.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from benchmarks.testbed.pacing import paced, paced_experts
from benchmarks.testbed.stack_inputs import IterationInput, Pace, StackSize
from megatron_fssdp.collectives.gathered_counts import gather_counts
from megatron_fssdp.runtime.experts.expert_layout import ExpertParameters, ParametersByExpert
from megatron_fssdp.runtime.layers.expert_groups import ExpertGroups
from megatron_fssdp.runtime.layers.layer_load import LayerLoad


@dataclass
class IterationResult:
    """Result of an iteration on this rank.

    Attributes:
        output: Output of the stack for the tokens of all micro-batches in turn, ``[T, M]``.
        hidden_gradient: Gradient of the input, ``[T, M]``.
        seconds: Seconds from the start of the first forward pass to the arrival of the last gradient at its
            owner.
        cpu_s: Seconds of a core that the thread of the passes used in this time. The backward pass of tensors
            on CPUs runs in the same thread.
        pairs_ZLDD: Pairs of a token and an expert that each device sent to each device in the forward pass of
            each micro-batch, int64 ``[Z, L, D, D]``.
        loads: Loads of every layer, with bytes and times of transfers. Empty under Megatron's dispatcher.
        spag_inter_node_bytes: Bytes of SparseAllGather between nodes, over all layers.
        replica_bytes: Largest memory of replicas on this rank: the parameters of all layers and the gradients
            of one layer.
    """

    output: torch.Tensor
    hidden_gradient: torch.Tensor
    seconds: float
    cpu_s: float
    pairs_ZLDD: torch.Tensor
    loads: list[LayerLoad] = field(default_factory=list)
    spag_inter_node_bytes: int = 0
    replica_bytes: int = 0


def make_parameters(size: StackSize, owned: Sequence[int]) -> list[ParametersByExpert]:
    """Make the parameters of the owned experts of every layer. They have the same values on any owner."""
    hidden, ffn = size.hidden_size, size.ffn_size
    layers: list[ParametersByExpert] = []
    for layer in range(size.num_layers):
        parameters: dict[int, list[torch.nn.Parameter]] = {}
        for expert in owned:
            generator = torch.Generator().manual_seed(1000 * layer + expert)
            fc1 = torch.randn(ffn, hidden, generator=generator) / hidden**0.5
            fc2 = torch.randn(hidden, ffn, generator=generator) / ffn**0.5
            parameters[expert] = [torch.nn.Parameter(fc1), torch.nn.Parameter(fc2)]
        layers.append(parameters)
    return layers


@cache  # A gloo group has a thread that wakes up 100 times a second, so all stacks must share one.
def _this_rank_alone(group: dist.ProcessGroup) -> dist.ProcessGroup:
    alone, _ = dist.new_subgroups_by_enumeration([[rank] for rank in range(group.size())])
    assert isinstance(alone, dist.ProcessGroup)
    return alone


class LayerStack:
    """Alternating attention and MoE layers, with residuals."""

    def __init__(
        self,
        size: StackSize,
        groups: ExpertGroups,
        parameters: Sequence[ParametersByExpert],
        pace: Pace | None,
    ) -> None:
        # Imported here, because the caller must first decide about Megatron's CPU runtime.
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

        self.size, self.groups, self.parameters = size, groups, parameters
        self.pace = pace
        self._collection = ProcessGroupCollection()
        self._collection.ep = self._collection.tp_ep = groups.expert_parallel
        self._collection.expt_tp = _this_rank_alone(groups.expert_parallel)
        self._plain = self._dispatcher(MoEAlltoAllTokenDispatcher, size.num_experts // groups.num_devices)
        self._pairs: list[torch.Tensor] = []

    def run(self, inputs: IterationInput) -> IterationResult:
        """Run one iteration: both passes of every micro-batch in turn, and gradients at their owners."""
        micro_batches = inputs.micro_batches
        leaves = [batch.hidden.clone().requires_grad_() for batch in micro_batches]
        probs = [[layer.probs.clone().requires_grad_() for layer in batch.layers] for batch in micro_batches]
        outputs, replica_bytes = [], 0
        self._pairs.clear()
        dist.barrier()
        begin_s, begin_cpu_s = time.perf_counter(), time.thread_time()
        self._begin(len(leaves))
        for of_layer in self.parameters:
            for parameter in (tensor for tensors in of_layer.values() for tensor in tensors):
                parameter.grad = None
        for batch, leaf, probs_L in zip(micro_batches, leaves, probs, strict=True):
            hidden = self._enter(leaf)
            for number, layer in enumerate(batch.layers):
                attended = self._attention(hidden)
                hidden = hidden + self._moe(number, attended, layer.routing_map, probs_L[number])
            replica_bytes = max(replica_bytes, self._replica_bytes())
            hidden.backward(batch.gradient)
            outputs.append(hidden.detach())
        self._finish()
        end_s, cpu_s = time.perf_counter(), time.thread_time() - begin_cpu_s
        num_devices = self.groups.num_devices
        gathered = gather_counts(torch.cat(self._pairs), self.groups.expert_parallel)
        pairs_ZLDD = gathered.view(num_devices, len(leaves), -1, num_devices).permute(1, 2, 0, 3)
        gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
        result = IterationResult(torch.cat(outputs), torch.cat(gradients), end_s - begin_s, cpu_s, pairs_ZLDD)
        result.replica_bytes = replica_bytes
        self._report(result)
        return result

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients of all experts of each layer, ``[E, elements]``, the same on all ranks."""
        gradients = []
        for owned in self._owned():
            example = next(iter(self.parameters[0].values()))
            all_E = torch.zeros(self.size.num_experts, sum(tensor.numel() for tensor in example))
            for expert, tensors in owned.items():
                parts = [torch.zeros_like(t) if t.grad is None else t.grad for t in tensors]
                all_E[expert] = torch.cat([part.reshape(-1) for part in parts])
            dist.all_reduce(all_E)
            gradients.append(all_E)
        return gradients

    def _dispatcher(self, kind: type, num_slots: int, **options: Any) -> Any:
        """One of Megatron's dispatchers, or one with its interface."""
        from megatron.core.transformer.transformer_config import TransformerConfig

        devices = self.groups.num_devices
        config = TransformerConfig(
            num_layers=self.size.num_layers,
            hidden_size=self.size.hidden_size,
            num_attention_heads=1,
            num_moe_experts=num_slots * devices,
            moe_router_topk=self.size.top_k,
            moe_ffn_hidden_size=self.size.ffn_size,
            expert_model_parallel_size=devices,
            moe_token_dispatcher_type="alltoall",
            use_cpu_initialization=True,
            gradient_accumulation_fusion=False,
            add_bias_linear=False,
        )
        first = self.groups.device * num_slots
        return kind(num_slots, list(range(first, first + num_slots)), config, self._collection, **options)

    def _attention(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.pace is None:
            return torch.tanh(hidden)
        seconds = self.pace.attention_s * len(hidden) / self.size.tokens_per_rank
        return paced(hidden, seconds)

    def _moe(
        self, number: int, hidden: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> torch.Tensor:
        dispatcher = self._plain
        self._count(routing_map)
        rows, row_probs = dispatcher.dispatch_preprocess(hidden.unsqueeze(1), routing_map, probs)
        rows, row_probs = dispatcher.token_dispatch(rows, row_probs)
        rows, rows_P, row_probs = dispatcher.dispatch_postprocess(rows, row_probs)
        rows = self._experts(list(self.parameters[number].values()), rows, rows_P, row_probs)
        rows = dispatcher.token_combine(dispatcher.combine_preprocess(rows))
        output: torch.Tensor = dispatcher.combine_postprocess(rows)
        return output.view_as(hidden)

    def _experts(
        self,
        parameters_U: Sequence[ExpertParameters | None],
        rows: torch.Tensor,
        rows_P: torch.Tensor,
        probs: torch.Tensor,
        *,
        only_with_rows: bool = False,
    ) -> torch.Tensor:
        """Compute the experts of the slots on their rows; empty slots cost nothing.

        Args:
            parameters_U: Parameters of each slot; ``None`` for an empty one.
            rows: Rows sorted by slot, ``[R, M]``.
            rows_P: Number of rows of each slot, ``[P]``.
            probs: Probability of each row, ``[R]``.
            only_with_rows: Whether experts without rows get no gradients, as in a step of several.
        """
        used = [
            (weights, num_rows)
            for weights, num_rows in zip(parameters_U, rows_P.tolist(), strict=True)
            if weights is not None and (num_rows or not only_with_rows)
        ]
        experts, num_rows_P = [weights for weights, _ in used], [num_rows for _, num_rows in used]
        if self.pace is None:
            return feed_forward(rows, probs, num_rows_P, experts)
        tensors = [tensor for expert in experts for tensor in expert]
        seconds = len(rows) * self.size.flops_per_token / self.pace.expert_flops_per_s
        return paced_experts(rows, probs, tensors, seconds)

    def _count(self, slot_map: torch.Tensor) -> None:
        """Keep how many pairs go to each device, from a routing map of experts or slots, ``[T, W]``."""
        self._pairs.append(slot_map.view(len(slot_map), self.groups.num_devices, -1).sum((0, 2)))

    # What a strategy adds.

    def _owned(self) -> Sequence[ParametersByExpert]:
        """Return the parameters of the experts that this rank owns, for each layer."""
        return self.parameters

    def _begin(self, num_micro_batches: int) -> None:
        """Mark the start of an iteration."""

    def _enter(self, hidden: torch.Tensor) -> torch.Tensor:
        """Mark the start of a forward pass."""
        return hidden

    def _replica_bytes(self) -> int:
        return 0

    def _finish(self) -> None:
        """Finish the transfers of an iteration. The stack calls this after the last backward pass."""

    def _report(self, result: IterationResult) -> None:
        """Add what the strategy did to the result of an iteration."""


def feed_forward(
    rows: torch.Tensor, probs: torch.Tensor, num_rows_P: Sequence[int], experts_P: Sequence[ExpertParameters]
) -> torch.Tensor:
    """Compute the experts of a device on their rows, also those without rows.

    The result depends on all arguments, so that the autograd graphs of all ranks have the same collectives.

    Args:
        rows: Rows sorted by expert, ``[R, M]``.
        probs: Probability of each row, ``[R]``.
        num_rows_P: Number of rows of each expert, ``[P]``.
        experts_P: Weights of the experts, ``[P]``.
    """
    if not experts_P:
        return rows * probs.unsqueeze(-1)
    parts = zip(rows.split(num_rows_P), probs.unsqueeze(-1).split(num_rows_P), experts_P, strict=True)
    return torch.cat(
        [
            functional.linear(functional.gelu(functional.linear(x, fc1)) * prob, fc2)
            for x, prob, (fc1, fc2) in parts
        ]
    )
