"""Sizes, pace and forced routing of a stack of MoE layers.

Shape letters: T tokens of this rank, M model dim, F ffn dim, E experts, D devices, K experts of a token,
L layers, Z micro-batches, A assignments of tokens to experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_fssdp.planning.cost.cost_model import ClusterCost, LinkCost
from megatron_fssdp.planning.cost.link_seconds import LinkSet
from megatron_fssdp.planning.dispatch.token_dispatch import plan_dispatch
from megatron_fssdp.planning.placement.placement import ExpertPlacement, even_owners
from megatron_fssdp.planning.placement.topology import Topology


@dataclass(frozen=True)
class StackSize:
    """Sizes of the layer stack."""

    num_layers: int  # MoE layers; each one follows an attention layer
    num_experts: int  # of each layer
    top_k: int
    hidden_size: int  # M
    ffn_size: int  # F
    tokens_per_rank: int  # T of an iteration, or the mean if ranks have different numbers
    element_bytes: int = 4  # of parameters and hidden states

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's parameters, which are two matrices."""
        return 2 * self.hidden_size * self.ffn_size * self.element_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's hidden state."""
        return self.hidden_size * self.element_bytes

    @property
    def flops_per_token(self) -> int:
        """FLOPs of one expert's forward pass for one token: two products of ``2·M·F`` each."""
        return 4 * self.hidden_size * self.ffn_size


@dataclass(frozen=True)
class Pace:
    """Pace of the paced compute."""

    expert_flops_per_s: float  # throughput of one rank on experts
    attention_s: float  # seconds of the forward pass between two MoE layers, for tokens_per_rank tokens


def balanced_moe_s(size: StackSize, topology: Topology, cluster: ClusterCost) -> float:
    """Return the modelled seconds of one MoE layer, both passes, under plain EP with balanced routing."""
    devices = topology.num_devices
    counts_DE = np.full((devices, size.num_experts), size.tokens_per_rank * size.top_k // size.num_experts)
    owners = ExpertPlacement.owners_only(even_owners(size.num_experts, devices), devices)
    pairs = plan_dispatch("even", counts_DE, owners, topology).busiest
    exchange_s = float(LinkSet(cluster.intra, cluster.inter).times(pairs, size.token_bytes).seconds)
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
class MicroBatchInput:
    """Input of this rank in a micro-batch.

    Attributes:
        hidden: Hidden states of the tokens, ``[T, M]``.
        layers: Forced routing of each layer.
        gradient: Gradient of the output, ``[T, M]``.
    """

    hidden: torch.Tensor
    layers: tuple[LayerInput, ...]
    gradient: torch.Tensor

    @classmethod
    def draw(cls, counts_LE: np.ndarray, size: StackSize, rng: np.random.Generator) -> "MicroBatchInput":
        """Draw random tokens of this rank, with the routing that the counts give.

        Args:
            counts_LE: int64 ``[L, E]``. Assignments of this rank to every expert.
            size: Sizes of the layer stack.
            rng: Source of the tokens and the routing.
        """
        num_tokens = int(counts_LE[0].sum()) // size.top_k
        hidden, gradient = (
            torch.from_numpy(rng.standard_normal((num_tokens, size.hidden_size), np.float32))
            for _ in range(2)
        )
        return cls(
            hidden, tuple(LayerInput.draw(counts_E, num_tokens, rng) for counts_E in counts_LE), gradient
        )


@dataclass(frozen=True)
class IterationInput:
    """Input of this rank in an iteration, by its micro-batches."""

    micro_batches: tuple[MicroBatchInput, ...]

    @classmethod
    def draw(cls, counts_ZLE: np.ndarray, size: StackSize, seed: Sequence[int]) -> "IterationInput":
        """Draw all micro-batches from assignments of this rank, int64 ``[Z, L, E]``."""
        rng = np.random.default_rng(seed)
        return cls(tuple(MicroBatchInput.draw(counts_LE, size, rng) for counts_LE in counts_ZLE))


def nominal_cluster(payload_bytes_per_s: float, expert_flops_per_s: float) -> ClusterCost:
    """Return costs of links without start-up time and with the payload's bandwidth.

    Links inside a node are fast.
    """
    return ClusterCost(
        LinkCost(0.0, 1 / payload_bytes_per_s / 100),
        LinkCost(0.0, 1 / payload_bytes_per_s),
        expert_flops_per_s,
    )
