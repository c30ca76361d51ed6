"""A combination of settings under which a layer is compared with the reference, and its inputs and results.

Shape letters: T tokens of this rank, E experts, D devices.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from megatron_fssdp.runtime.experts.expert_activation import ExpertActivation

from .reference_layer import BLOCK, CLAMP, OFFSET

MODEL_DIM, FFN_DIM = 5, 6


ACTIVATIONS = {
    "gelu": ExpertActivation(functional.gelu),
    "relu": ExpertActivation(functional.relu),
    "squared_relu": ExpertActivation(lambda x: functional.relu(x).square()),
    "swiglu": ExpertActivation(functional.silu, gated=True),
    "clamped_geglu": ExpertActivation(
        lambda x: x * torch.sigmoid(1.702 * x), gated=True, clamp=CLAMP, linear_offset=OFFSET
    ),
    "interleaved_swiglu": ExpertActivation(functional.silu, gated=True, interleave=BLOCK),
}


@dataclass(frozen=True)
class LayerCase:
    """One combination to compare with the reference.

    Attributes:
        name: Test id.
        placement: "owners", "random", "everywhere", "nowhere_else" (random, but one rank holds
            nothing at all), "replicas_only" (random, but one rank owns nothing and holds a
            replica), or a strategy's name.
        settings: Settings of the strategy, as (key, value) pairs.
        owners: Owner of each expert; Megatron's even owners by default.
        routing: "skewed", "dropped" (some choices are missing, some tokens have none),
            "one_expert", "one_device" (only experts of the last device) or "even".
        tokens: Tokens of each rank; some random small numbers by default.
        schedule: Order of forwards and backwards of an iteration's micro-batches.
        recompute: None, "reentrant", "non_reentrant", or "kept" (reentrant, and the exchange is kept).
        transfers: "in_turn" (each pass gathers, and reduces before it ends), "once" (once an
            iteration, in the background), "rematerialized" (each pass, in the background) or "each" (each
            pass by a plan of its own, with quotas, beside the dispatch) or "each_in_turn"; or "resident"
            (replicas have Parameters, gradients are summed among holders) or "resident_in_turn".
        calibrated: Whether the placement changes when the counts are known.
        group_size: Ranks of a group of the smart schedule; None exchanges with all at once.
        changes: Whether random placements run only every second iteration in steps, from the second one on.
        deduplicated: How tokens travel: "" (one row for each pair), "known" or "unknown" (deduplicated; the
            largest number of experts of a token is known or not), or "by_price" (as the plan says; costs are
            known, and rows are so large that the deduplicated exchange pays).
        one_queue: Whether CUDA devices run all kernels in the order of their issue.
        inputs: Which of "hidden" and "probs" require a gradient.
        device: Device of the layer and its inputs; "cuda" also on a virtual device.
        sizes: Model dim and ffn dim.
    """

    name: str
    placement: str = "random"
    settings: tuple[tuple[str, int], ...] = ()
    num_experts: int = 8
    top_k: int = 2
    owners: tuple[int, ...] | None = None
    activation: str = "swiglu"
    biases: bool = False
    probs_on_input: bool = False
    num_nodes: int = 1
    routing: str = "skewed"
    tokens: tuple[int, ...] | None = None
    num_iterations: int = 2
    schedule: str = "FB"
    recompute: str | None = None
    transfers: str = "in_turn"
    calibrated: bool = False
    group_size: int | None = None
    changes: bool = False
    deduplicated: str = ""
    one_queue: bool = False
    inputs: tuple[str, ...] = ("hidden", "probs")
    driven: bool = True
    dtype: torch.dtype = torch.float64
    device: str = "cpu"
    sizes: tuple[int, int] = (MODEL_DIM, FFN_DIM)

    @property
    def seed(self) -> int:
        """Random seed, which differs by the name of the case and is the same in every process."""
        return sum((i + 1) * ord(letter) for i, letter in enumerate(self.name))


@dataclass
class CaseResult:
    """The findings of one rank.

    Attributes:
        errors: Largest difference from the reference by quantity, relative to its largest value.
        num_replicas: Replicas of each iteration's placement.
        deduplicated: Whether each iteration's plan sends tokens once.
        num_present: Experts present on this rank in each iteration.
        digests: Digest of each iteration's placement.
        values: The rank's tensors that were compared, in order; missing gradients are None.
    """

    errors: dict[str, float] = field(default_factory=dict)
    num_replicas: list[int] = field(default_factory=list)
    deduplicated: list[bool] = field(default_factory=list)
    num_present: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    values: list[Tensor | None] = field(default_factory=list)

    def compare(self, what: str, got: Tensor | None, wanted: Tensor | None) -> None:
        """Record a difference; missing gradients count as zeros."""
        if wanted is None or not wanted.numel():
            return
        self.values.append(None if got is None else got.detach().cpu())
        got = torch.zeros_like(wanted) if got is None else got.detach().cpu().to(wanted.dtype)
        assert got.shape == wanted.shape, f"{what}: {tuple(got.shape)} instead of {tuple(wanted.shape)}"
        scale = max(float(wanted.abs().max()), 1e-6)
        error = float((got - wanted).abs().max()) / scale
        self.errors[what] = max(self.errors.get(what, 0.0), error if error == error else float("inf"))


@dataclass
class Inputs:
    """One micro-batch of all ranks, in rank order; fp64 values that the case's dtype can hold."""

    hidden: Tensor
    probs: Tensor
    routing_map: Tensor
    cotangent: Tensor
    tokens: Sequence[int]

    def of_rank(self, tensor: Tensor, rank: int) -> Tensor:
        """One rank's rows of a tensor of all ranks."""
        return torch.split(tensor, list(self.tokens))[rank]


def draw_inputs(case: LayerCase, owner_E: np.ndarray, world_size: int, rng: np.random.Generator) -> Inputs:
    """Draw one micro-batch of all ranks, which is the same on every rank."""
    tokens = case.tokens or tuple(int(n) for n in rng.integers(3, 14, world_size))
    total, num_experts = sum(tokens), case.num_experts
    sigma = 0.0 if case.routing == "even" else 1.5
    score_TE = rng.normal(0, sigma, num_experts) + rng.gumbel(size=(total, num_experts))
    if case.routing == "one_expert":
        score_TE[:, rng.integers(num_experts)] += 1e3
    if case.routing == "one_device":
        score_TE[:, owner_E == owner_E.max()] += 1e3
    chosen = np.argsort(-score_TE, axis=1)[:, : case.top_k]
    routing = np.zeros((total, num_experts), dtype=bool)
    np.put_along_axis(routing, chosen, True, axis=1)
    if case.routing == "dropped":
        routing &= rng.random(routing.shape) < 0.7
        routing[rng.random(total) < 0.2] = False

    def values(*shape: int) -> Tensor:
        return torch.from_numpy(rng.normal(size=shape)).to(case.dtype).double()

    probs = torch.from_numpy(rng.random((total, num_experts))).float().double()
    return Inputs(
        values(total, case.sizes[0]), probs, torch.from_numpy(routing), values(total, case.sizes[0]), tokens
    )


def placed(tensor: Tensor, case: LayerCase) -> Tensor:
    """A copy with the data type and on the device of a case."""
    return tensor.to(case.dtype).clone().to(case.device)
