"""A stack of MoE layers with forced routing; subclasses in ``stack_variants.py`` implement the layers.

Shape letters: T tokens of this rank, M model dim, F ffn dim, E experts, D devices, L layers.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional

from benchmarks.testbed.pacing import Timeline, paced, paced_experts
from benchmarks.testbed.stack_inputs import IterationInput, Pace, StackSize
from megatron_fssdp.runtime.exchange.expert_groups import ExpertGroups
from megatron_fssdp.runtime.execution.layer_load import LayerLoad
from megatron_fssdp.runtime.experts.expert_activation import ExpertActivation
from megatron_fssdp.runtime.experts.expert_layout import ExpertWeights, ParametersByExpert
from megatron_fssdp.runtime.experts.grouped_ffn import grouped_ffn

_ACTIVATION = ExpertActivation(functional.gelu)


@dataclass
class IterationResult:
    """Result of an iteration on this rank.

    Attributes:
        output: Output of the stack, ``[T, M]``.
        hidden_gradient: Gradient of the input, ``[T, M]``.
        seconds: Seconds from the start of the forward pass to the arrival of the last gradient at its owner.
        loads: Loads of every layer, with bytes and times of transfers. Empty under Megatron's dispatcher.
        pairs_LDD: Assignments that each device sent to each device in the forward pass, ``[L, D, D]``.
        spag_inter_node_bytes: Bytes of SparseAllGather between nodes, over all layers.
        replica_bytes: Largest memory of replicas on this rank: the parameters of all layers and the gradients
            of one layer.
        transfers: Name, begin and end of each transfer on this rank's lane.
    """

    output: torch.Tensor
    hidden_gradient: torch.Tensor
    seconds: float
    loads: list[LayerLoad]
    pairs_LDD: np.ndarray
    spag_inter_node_bytes: int = 0
    replica_bytes: int = 0
    transfers: list[tuple[str, float, float]] = field(default_factory=list)


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


class LayerStack:
    """Alternating attention and MoE layers, with residuals. Subclasses implement the MoE layers.

    Args:
        size: Sizes of the stack.
        groups: Process groups of the ranks, and their nodes.
        parameters: Parameters of the owned experts of every layer.
        pace: Pace of compute, or None for real compute.
        timeline: Timeline that records paced compute.
    """

    def __init__(
        self,
        size: StackSize,
        groups: ExpertGroups,
        parameters: Sequence[ParametersByExpert],
        pace: Pace | None,
        timeline: Timeline,
    ) -> None:
        self.size, self.groups, self.parameters = size, groups, parameters
        self.pace, self.timeline = pace, timeline

    def run(self, inputs: IterationInput, counts_LDE: np.ndarray) -> IterationResult:
        """Run one iteration: forward pass, backward pass, and gradients at their owners.

        Args:
            inputs: Input of this rank.
            counts_LDE: int64 ``[L, D, E]``. Assignments of all devices, used only for reports.
        """
        probs = [layer.probs.clone().requires_grad_() for layer in inputs.layers]
        leaf = inputs.hidden.clone().requires_grad_()
        dist.barrier()
        begin_s = time.perf_counter()
        self._begin()
        for of_layer in self.parameters:
            for parameter in (tensor for tensors in of_layer.values() for tensor in tensors):
                parameter.grad = None
        hidden = leaf
        for number, layer in enumerate(inputs.layers):
            start = self._launch(number, hidden)
            attended = self._attention(number, start)
            hidden = start + self._moe(number, attended, layer.routing_map, probs[number])
        forward_end_s = time.perf_counter()
        replica_bytes = self._replica_bytes()
        hidden.backward(inputs.gradient)
        self._finish()
        end_s = time.perf_counter()
        self.timeline.spans += [
            ("forward pass", begin_s, forward_end_s),
            ("backward pass", forward_end_s, end_s),
        ]
        assert leaf.grad is not None
        result = IterationResult(
            hidden.detach(), leaf.grad, end_s - begin_s, [], np.empty(0), replica_bytes=replica_bytes
        )
        self._report(result, counts_LDE)
        return result

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients of all experts of each layer, ``[E, elements]``, the same on all ranks."""
        found = []
        for owned in self._owned():
            example = next(iter(self.parameters[0].values()))
            all_E = torch.zeros(self.size.num_experts, sum(tensor.numel() for tensor in example))
            for expert, tensors in owned.items():
                parts = [torch.zeros_like(t) if t.grad is None else t.grad for t in tensors]
                all_E[expert] = torch.cat([part.reshape(-1) for part in parts])
            dist.all_reduce(all_E)
            found.append(all_E)
        return found

    def _owned(self) -> Sequence[ParametersByExpert]:
        """Return the parameters of the experts that this rank owns, for each layer."""
        return self.parameters

    def _attention(self, number: int, hidden: torch.Tensor) -> torch.Tensor:
        if self.pace is None:
            return torch.tanh(hidden)
        seconds = self.pace.attention_s * len(hidden) / self.size.tokens_per_rank
        return paced(hidden, seconds, self.timeline, f"attention {number + 1}")

    def _experts(
        self,
        number: int,
        rows: torch.Tensor,
        probs: torch.Tensor,
        rows_per_expert: Sequence[int],
        experts: Sequence[ExpertWeights],
    ) -> torch.Tensor:
        if self.pace is None:
            return grouped_ffn(rows, probs, rows_per_expert, experts, _ACTIVATION)
        tensors = [tensor for expert in experts for tensor in expert.tensors()]
        seconds = len(rows) * self.size.flops_per_token / self.pace.expert_flops_per_s
        return paced_experts(rows, probs, tensors, seconds, self.timeline, f"experts {number + 1}")

    def _begin(self) -> None:
        """Mark the start of an iteration."""

    def _launch(self, number: int, hidden: torch.Tensor) -> torch.Tensor:
        """Start the transfers of a layer. The stack calls this where the layer begins."""
        return hidden

    def _moe(
        self, number: int, hidden: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> torch.Tensor:
        raise NotImplementedError

    def _replica_bytes(self) -> int:
        return 0

    def _finish(self) -> None:
        """Finish the transfers of an iteration. The stack calls this after the backward pass."""

    def _report(self, result: IterationResult, counts_LDE: np.ndarray) -> None:
        raise NotImplementedError
