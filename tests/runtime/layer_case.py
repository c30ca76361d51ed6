"""A combination of settings under which layers are compared with the reference, and their inputs.

Shape letters: T tokens of all ranks, E experts, L layers, M model dimension.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_fssdp.planning.replica_life import ReplicaLife

MODEL_DIM, FFN_DIM = 5, 6


@dataclass(frozen=True)
class LayerCase:
    """One combination to compare with the reference."""

    name: str
    life: ReplicaLife = ReplicaLife.ITERATION
    # "owners", "random", "everywhere", "nowhere_else" (random, but one device holds nothing at all),
    # "replicas_only" (random, but one device owns nothing and holds a replica), or the name of a strategy
    # with known costs and these settings.
    placement: str = "random"
    settings: tuple[tuple[str, object], ...] = ()
    num_layers: int = 2
    num_experts: int = 8
    top_k: int = 2
    owners: tuple[int, ...] | None = None  # of each expert; Megatron's even owners by default
    moves: bool = False  # Each iteration begins with new, uneven owners.
    num_nodes: int = 2
    routing: str = "skewed"  # or "dropped" (some choices are missing, some tokens have none) or "one_expert"
    tokens: tuple[int, ...] | None = None  # of each rank; some random small numbers by default
    num_iterations: int = 2
    # Order of passes of the micro-batches; "e" is an evaluation between them, "E" one after the iteration,
    # and "O" a forward pass that nobody marks as one.
    schedule: str = "FB"
    recompute: str | None = None
    overlaps: bool = True  # Transfers have a group of their own and may begin before the layer.
    early: float = 0.0  # share of the weights that travels beside the experts of the layer before
    mixes: bool = False  # In some plans, replicas live for a pass.
    corrects: bool = False  # Replicas change when the counts of the first micro-batch are known.
    driven: bool = True  # A loop marks iterations.
    announced: int = 0  # micro-batches that the loop announces; 0: as many as come
    repeats: bool = False  # The loop breaks off the passes of each iteration and begins them again.
    peers: int = 1
    has_main_grad: bool = False
    frozen: tuple[int, ...] = ()  # tensors of an expert that are not trained
    late: bool = False  # Parameters hold NaN until the runtime has waited for them.
    one_queue: bool = False
    puts: bool = False  # Weights for a pass are put into slots inside nodes.
    inputs: tuple[str, ...] = ("hidden", "probs")  # that require a gradient
    dtype: torch.dtype = torch.float64
    device: str = "cpu"

    @property
    def seed(self):
        """Random seed, which differs by the name of the case and is the same in every process."""
        return sum((i + 1) * ord(letter) for i, letter in enumerate(self.name))


@dataclass
class Inputs:
    """One micro-batch of all ranks, in rank order; fp64 values that the case's dtype can hold.

    Hidden states and the gradient of the output are ``[T, M]``; probabilities and the bool map of each layer
    ``[T, E]``.
    """

    hidden: Tensor
    probs_L: list[Tensor]
    map_L: list[Tensor]
    cotangent: Tensor
    tokens: Sequence[int]

    def of_rank(self, tensor, rank):
        """One rank's rows of a tensor of all ranks."""
        return torch.split(tensor, list(self.tokens))[rank]


def draw_inputs(case, world_size, rng):
    """Draw one micro-batch of all ranks, which is the same on every rank."""
    tokens = case.tokens or tuple(int(n) for n in rng.integers(3, 14, world_size))
    total, num_experts = sum(tokens), case.num_experts

    def values(*shape):
        return torch.from_numpy(rng.normal(size=shape)).to(case.dtype).double()

    maps, probs = [], []
    for _ in range(case.num_layers):
        score_TE = rng.normal(0, 1.5, num_experts) + rng.gumbel(size=(total, num_experts))
        if case.routing == "one_expert":
            score_TE[:, rng.integers(num_experts)] += 1e3
        routing = np.zeros((total, num_experts), dtype=bool)
        np.put_along_axis(routing, np.argsort(-score_TE, axis=1)[:, : case.top_k], True, axis=1)
        if case.routing == "dropped":
            routing &= rng.random(routing.shape) < 0.7
            routing[rng.random(total) < 0.2] = False
        maps.append(torch.from_numpy(routing))
        probs.append(torch.from_numpy(rng.random((total, num_experts))).float().double())
    return Inputs(values(total, MODEL_DIM), probs, maps, values(total, MODEL_DIM), tokens)
