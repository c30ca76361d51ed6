"""An MoE layer without any distributed logic: the global batch on one rank, in fp64.

Shape letters: T tokens of all ranks, M model dim, F ffn dim, E experts.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

CLAMP = 0.4  # low enough to affect the tests' inputs
OFFSET = 1.0
BLOCK = 2


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _swiglu(x: Tensor) -> Tensor:
    half = x.shape[1] // 2
    return functional.silu(x[:, :half]) * x[:, half:]


def _clamped_geglu(x: Tensor) -> Tensor:
    half = x.shape[1] // 2
    gate = torch.minimum(x[:, :half], torch.tensor(CLAMP, dtype=x.dtype))
    linear = x[:, half:]
    linear = torch.where(linear.abs() > CLAMP, CLAMP * linear.sign(), linear)
    return _quick_gelu(gate) * (linear + OFFSET)


def _interleaved_swiglu(x: Tensor) -> Tensor:
    gate = [column for column in range(x.shape[1]) if column // BLOCK % 2 == 0]
    linear = [column + BLOCK for column in gate]
    return functional.silu(x[:, gate]) * x[:, linear]


ACTIVATIONS: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "gelu": (1, functional.gelu),
    "relu": (1, functional.relu),
    "squared_relu": (1, lambda x: functional.relu(x) * functional.relu(x)),
    "swiglu": (2, _swiglu),
    "clamped_geglu": (2, _clamped_geglu),
    "interleaved_swiglu": (2, _interleaved_swiglu),
}
"""By name: width of the first matrix's output as a multiple of F, and the function."""


def draw_weights(
    seed: int, num_experts: int, model_dim: int, ffn_dim: int, activation: str, biases: bool
) -> list[list[Tensor]]:
    """fc1, fc2 and both biases or none of every expert, fp64, with gradients."""
    generator = torch.Generator().manual_seed(seed)
    width = ACTIVATIONS[activation][0] * ffn_dim
    shapes = [(width, model_dim), (model_dim, ffn_dim)] + ([(width,), (model_dim,)] if biases else [])
    return [
        [torch.randn(*shape, generator=generator, dtype=torch.float64) * 0.5 for shape in shapes]
        for _ in range(num_experts)
    ]


def reference_forward(
    hidden: Tensor,
    probs: Tensor,
    routing_map: Tensor,
    weights: Sequence[Sequence[Tensor]],
    activation: str,
    *,
    probs_on_input: bool = False,
) -> Tensor:
    """``[T, M]``: for every token the sum over its experts of probability times FFN.

    Args:
        hidden: ``[T, M]``.
        probs: ``[T, E]``; only entries in the routing map count.
        routing_map: bool ``[T, E]``.
        weights: Tensors of every expert, see :func:`draw_weights`.
        activation: A key of :data:`ACTIVATIONS`.
        probs_on_input: Whether to apply the FFN to probability times input instead.
    """
    function = ACTIVATIONS[activation][1]
    output = torch.zeros_like(hidden)
    for expert, (fc1, fc2, *biases) in enumerate(weights):
        fc1_bias, fc2_bias = biases or (0.0, 0.0)
        chosen = routing_map[:, expert].unsqueeze(1)
        prob = probs[:, expert].unsqueeze(1)
        x = hidden * prob if probs_on_input else hidden
        y = function(x @ fc1.T + fc1_bias) @ fc2.T + fc2_bias
        output = output + torch.where(chosen, y if probs_on_input else prob * y, 0.0)
    return output
