"""A stack of MoE layers with forced routing, under Megatron's own dispatcher or under this plugin's runtime.

Shape letters: T tokens of this rank, M model dim, F ffn dim, E experts, D devices, L layers.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional

from benchmarks.testbed.expert_moves import ExpertMoves
from benchmarks.testbed.pacing import Timeline, paced, paced_experts
from megatron_fssdp.planning.cost.cost_model import ClusterCost, LinkCost, dispatch_tokens_DD
from megatron_fssdp.planning.cost.layer_profile import LayerProfile
from megatron_fssdp.planning.cost.layer_traffic import dispatch_traffic
from megatron_fssdp.planning.cost.link_seconds import plain_links
from megatron_fssdp.planning.dispatch.even_dispatch import EvenDispatch
from megatron_fssdp.planning.placement.placement import ExpertPlacement, even_owners
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.runtime.exchange.exchange_selection import exchange_of
from megatron_fssdp.runtime.exchange.expert_groups import ExpertGroups
from megatron_fssdp.runtime.execution.layer_executor import MicroBatch
from megatron_fssdp.runtime.execution.layer_load import LayerLoad
from megatron_fssdp.runtime.execution.layer_pass import run_layer
from megatron_fssdp.runtime.execution.moe_runtime import MoERuntime
from megatron_fssdp.runtime.execution.strategy_selector import StrategySelector
from megatron_fssdp.runtime.experts.expert_activation import ExpertActivation
from megatron_fssdp.runtime.experts.expert_layout import ExpertWeights, ParametersByExpert
from megatron_fssdp.runtime.experts.grouped_ffn import grouped_ffn
from megatron_fssdp.strategies.strategy import LayerContext, Strategy

ELEMENT_BYTES = 4  # fp32
_ACTIVATION = ExpertActivation(functional.gelu)


@dataclass(frozen=True)
class StackSize:
    """Sizes of the layer stack.

    Attributes:
        num_layers: Number of MoE layers. Each one follows an attention layer.
        num_experts: Number of experts of each layer.
        top_k: Number of experts of each token.
        hidden_size: Model dimension, M.
        ffn_size: Ffn dimension of an expert, F.
        tokens_per_rank: Tokens of each rank, T, or their mean if ranks have different numbers.
    """

    num_layers: int
    num_experts: int
    top_k: int
    hidden_size: int
    ffn_size: int
    tokens_per_rank: int

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's parameters, which are two matrices."""
        return 2 * self.hidden_size * self.ffn_size * ELEMENT_BYTES

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's hidden state."""
        return self.hidden_size * ELEMENT_BYTES

    @property
    def flops_per_token(self) -> int:
        """FLOPs of one expert's forward pass for one token: two products of ``2·M·F`` each."""
        return 4 * self.hidden_size * self.ffn_size


@dataclass(frozen=True)
class Pace:
    """Pace of the paced compute.

    Attributes:
        expert_flops_per_s: Throughput of one rank on experts, in floating-point operations per second.
        attention_s: Seconds of the forward pass between two MoE layers, for ``tokens_per_rank`` tokens.
    """

    expert_flops_per_s: float
    attention_s: float


def balanced_moe_s(size: StackSize, topology: Topology, cluster: ClusterCost) -> float:
    """Return the modelled seconds of one MoE layer, both passes, under plain EP with balanced routing."""
    devices = topology.num_devices
    counts_DE = np.full((devices, size.num_experts), size.tokens_per_rank * size.top_k // size.num_experts)
    owners = ExpertPlacement.owners_only(even_owners(size.num_experts, devices), devices)
    pairs = dispatch_traffic("even", counts_DE, owners, topology).busiest
    exchange_s = float(plain_links(cluster).all_to_all.times(pairs, size.token_bytes).seconds)
    rows = size.tokens_per_rank * size.top_k
    return 4 * exchange_s + 3 * rows * size.flops_per_token / cluster.expert_flops_per_s


def third_of_balanced_iteration_s(size: StackSize, topology: Topology, cluster: ClusterCost) -> float:
    """Return the forward seconds with which attention takes a third of a balanced layer, both passes."""
    return balanced_moe_s(size, topology, cluster) / 2 / 3


@dataclass(frozen=True)
class LayerInput:
    """Forced routing of one layer on this rank.

    Attributes:
        routing_map: bool ``[T, E]``. True where the token goes to the expert.
        probs: Probabilities of the tokens, ``[T, E]``. Zero outside the map.
    """

    routing_map: torch.Tensor
    probs: torch.Tensor

    @classmethod
    def draw(cls, counts_E: np.ndarray, num_tokens: int, rng: np.random.Generator) -> "LayerInput":
        """Different experts for every token, such that ``counts_E`` assignments go to each expert.

        Raises:
            ValueError: There are no such experts.
        """
        if num_tokens == 0 or counts_E.sum() % num_tokens or counts_E.max() > num_tokens:
            raise ValueError(
                f"got counts {counts_E.tolist()} for {num_tokens} tokens; wanted a multiple of the "
                "tokens, none above them"
            )
        # Dealt in turn, no token meets an expert twice: an expert's turns are fewer than the tokens.
        expert_A = np.repeat(np.arange(len(counts_E)), counts_E)
        token_A = rng.permutation(num_tokens)[np.arange(len(expert_A)) % num_tokens]
        routing_TE = np.zeros((num_tokens, len(counts_E)), dtype=bool)
        routing_TE[token_A, expert_A] = True
        _exchange_choices(routing_TE, rng)
        weight_TE = routing_TE * rng.uniform(0.5, 1.5, routing_TE.shape)
        probs_TE = weight_TE / weight_TE.sum(axis=1, keepdims=True)
        return cls(torch.from_numpy(routing_TE), torch.from_numpy(probs_TE.astype(np.float32)))


def _exchange_choices(routing_TE: np.ndarray, rng: np.random.Generator) -> None:
    """Let random pairs of tokens exchange one expert each, so that all routings become about equally likely.

    Dealing in turn gives a token experts at a fixed distance, and therefore always in the same nodes. An
    exchange keeps the experts' counts and the tokens' numbers of experts.

    Args:
        routing_TE: Experts of each token, bool ``[T, E]``, with equally many for every token; changed in
            place.
        rng: Source of random numbers.
    """
    num_tokens, num_experts = routing_TE.shape
    expert_TK = np.nonzero(routing_TE)[1].reshape(num_tokens, -1)
    top_k, half = expert_TK.shape[1], num_tokens // 2
    if top_k == num_experts:
        return
    for _ in range(16 * top_k):  # Each choice gets about 16 chances to be exchanged.
        first, second = rng.permutation(num_tokens)[: 2 * half].reshape(2, half)
        of_first, of_second = rng.integers(top_k, size=(2, half))
        gives, takes = expert_TK[first, of_first], expert_TK[second, of_second]
        is_new = ~routing_TE[first, takes] & ~routing_TE[second, gives]
        first, second, gives, takes = first[is_new], second[is_new], gives[is_new], takes[is_new]
        routing_TE[first, gives] = routing_TE[second, takes] = False
        routing_TE[first, takes] = routing_TE[second, gives] = True
        expert_TK[first, of_first[is_new]], expert_TK[second, of_second[is_new]] = takes, gives


@dataclass(frozen=True)
class IterationInput:
    """Input of this rank in an iteration.

    Attributes:
        hidden: Hidden states of the tokens, ``[T, M]``.
        layers: Forced routing of each layer.
        gradient: Gradient of the output, ``[T, M]``.
    """

    hidden: torch.Tensor
    layers: tuple[LayerInput, ...]
    gradient: torch.Tensor

    @classmethod
    def draw(cls, counts_LE: np.ndarray, size: StackSize, seed: Sequence[int]) -> "IterationInput":
        """Draw random tokens of this rank, with the routing that the counts give.

        Args:
            counts_LE: int64 ``[L, E]``. Assignments of this rank to every expert.
            size: Sizes of the layer stack.
            seed: Seed of the tokens and the routing.
        """
        rng = np.random.default_rng(seed)
        num_tokens = int(counts_LE[0].sum()) // size.top_k
        hidden, gradient = (
            torch.from_numpy(rng.standard_normal((num_tokens, size.hidden_size), np.float32))
            for _ in range(2)
        )
        return cls(
            hidden, tuple(LayerInput.draw(counts_E, num_tokens, rng) for counts_E in counts_LE), gradient
        )


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


class MegatronStack(LayerStack):
    """Stack of the variant ``none``: Megatron's ``MoEAlltoAllTokenDispatcher`` and experts in autograd."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Imported here, because the caller must first decide about Megatron's CPU runtime.
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
        from megatron.core.transformer.transformer_config import TransformerConfig

        size, devices = self.size, self.groups.num_devices
        config = TransformerConfig(
            num_layers=size.num_layers,
            hidden_size=size.hidden_size,
            num_attention_heads=1,
            num_moe_experts=size.num_experts,
            moe_router_topk=size.top_k,
            moe_ffn_hidden_size=size.ffn_size,
            expert_model_parallel_size=devices,
            moe_token_dispatcher_type="alltoall",
            use_cpu_initialization=True,
            gradient_accumulation_fusion=False,
            add_bias_linear=False,
        )
        collection = ProcessGroupCollection()
        collection.ep = collection.tp_ep = self.groups.expert_parallel
        collection.expt_tp, _ = dist.new_subgroups_by_enumeration([[rank] for rank in range(devices)])
        owned = list(self.parameters[0])
        self._dispatchers = [
            MoEAlltoAllTokenDispatcher(len(owned), owned, config, collection) for _ in range(size.num_layers)
        ]

    def _moe(
        self, number: int, hidden: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> torch.Tensor:
        dispatcher = self._dispatchers[number]
        rows, row_probs = dispatcher.dispatch_preprocess(hidden.unsqueeze(1), routing_map, probs)
        rows, row_probs = dispatcher.token_dispatch(rows, row_probs)
        rows, rows_per_expert, row_probs = dispatcher.dispatch_postprocess(rows, row_probs)
        experts = [ExpertWeights.from_tensors(tensors) for tensors in self.parameters[number].values()]
        rows = self._experts(number, rows, row_probs, rows_per_expert.tolist(), experts)
        rows = dispatcher.token_combine(dispatcher.combine_preprocess(rows))
        output: torch.Tensor = dispatcher.combine_postprocess(rows)
        return output.view_as(hidden)

    def _report(self, result: IterationResult, counts_LDE: np.ndarray) -> None:
        devices = self.groups.num_devices
        owners = ExpertPlacement.owners_only(even_owners(self.size.num_experts, devices), devices)
        result.pairs_LDD = np.stack(
            [
                dispatch_tokens_DD(EvenDispatch(counts_DE, owners, self.groups.topology), devices)
                for counts_DE in counts_LDE
            ]
        )


class RuntimeStack(LayerStack):
    """Stack with this plugin's runtime under a placement strategy, called as by the Megatron adapter."""

    def __init__(
        self,
        size: StackSize,
        groups: ExpertGroups,
        parameters: Sequence[ParametersByExpert],
        pace: Pace | None,
        timeline: Timeline,
        *,
        strategy: Strategy,
        profile: LayerProfile,
    ) -> None:
        super().__init__(size, groups, parameters, pace, timeline)
        owner_E = even_owners(size.num_experts, groups.num_devices)
        profile = replace(profile, deduplicated=strategy.exchange == "deduplicated")
        self.runtime = MoERuntime(strategy)
        self._running: dict[int, MicroBatch] = {}
        for number, of_layer in enumerate(parameters):
            context = LayerContext(number + 1, owner_E, groups.topology, profile)
            self.runtime.add_layer(context, groups, of_layer)
        for executor in self.runtime.layers:
            executor.measure = True  # on every rank; by default only the first rank measures
        self._moves = ExpertMoves(self.runtime)
        self._selector: StrategySelector | None = None
        if strategy.selects:
            self._selector = StrategySelector(strategy, [groups.expert_parallel], torch.device("cpu"))
        self._num_done = 0

    def _owned(self) -> Sequence[ParametersByExpert]:
        return [layer.experts.parameters for layer in self.runtime.layers]

    def _begin(self) -> None:
        if self._selector is not None:
            report = self._selector.select(self.runtime.layers, self._num_done)
            if report is not None and report.changes and dist.get_rank() == 0:
                print(
                    f"[testbed] auto, after {self._num_done} iterations: {report.describe()[-1]}", flush=True
                )
        self.parameters = self._moves.before(self._num_done)
        self._num_done += 1
        self.runtime.begin_iteration(num_micro_batches=1)

    def _launch(self, number: int, hidden: torch.Tensor) -> torch.Tensor:
        return self.runtime.layers[number].launch(hidden, first=number == 0)

    def _moe(
        self, number: int, hidden: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> torch.Tensor:
        output, self._running[number] = run_layer(
            self.runtime.layers[number],
            hidden,
            probs,
            routing_map,
            partial(self._experts, number),
            exchange=exchange_of(
                "megatron",
                self.groups,
                deduplicated=self.runtime.layers[number].plan_iteration().deduplicated,
                most_choices=self.size.top_k,
            ),
            span=lambda step: self.timeline.span(f"{step} {number + 1}"),
        )
        return output

    def _replica_bytes(self) -> int:
        if self.runtime.strategy.resident_slots:
            # Resident slots have parameters, gradients and both moments, also when they are empty.
            return self.size.num_layers * self.runtime.strategy.resident_slots * 4 * self.size.expert_bytes
        of_layers = [one.materialization.weights.held_bytes for one in self._running.values()]
        # Parameters stay for the whole iteration. Gradients exist for one layer at a time.
        return sum(of_layers) + max(of_layers, default=0)

    def _finish(self) -> None:
        self.runtime.finish_gradients()

    def _report(self, result: IterationResult, counts_LDE: np.ndarray) -> None:
        topology, devices = self.groups.topology, self.groups.num_devices
        pairs = []
        for number, (layer, counts_DE) in enumerate(zip(self.runtime.layers, counts_LDE, strict=True)):
            plan = self._running[number].plan
            (dispatch,) = plan.dispatch([counts_DE], topology)
            pairs.append(dispatch_tokens_DD(dispatch, devices))
            result.spag_inter_node_bytes += plan.transfer.inter_node_bytes(self.size.expert_bytes, topology)
            for started in layer._journal:
                name = f"{'spAG' if started.is_gather else 'spRS'} {number + 1}"
                timer: Any = started.timer
                if timer.end_s:
                    result.transfers.append((name, timer.begin_s, timer.end_s))
                result.transfers += [(f"wait for {name}", *one) for one in timer.waits_s]
        result.pairs_LDD = np.stack(pairs)
        result.loads = self.runtime.end_iteration()
        if self._selector is not None:
            self._selector.note(result.seconds)


def nominal_cluster(payload_bytes_per_s: float, expert_flops_per_s: float) -> ClusterCost:
    """Return costs of links without start-up time and with the payload's bandwidth.

    Links inside a node are fast.
    """
    return ClusterCost(
        LinkCost(0.0, 1 / payload_bytes_per_s / 100),
        LinkCost(0.0, 1 / payload_bytes_per_s),
        expert_flops_per_s,
    )
