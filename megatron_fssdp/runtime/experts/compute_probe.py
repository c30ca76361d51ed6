"""Measures how fast a device computes a transformer layer, forward and backward, in flop/s.

Shape letters: M model dimension, F FFN dimension, G experts present on a device.
"""

import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from megatron_fssdp.collectives.device_clock import elapsed_s

PASSES = 3
"""Flops of both passes in those of the forward one: gradients of inputs and weights (FasterMoE, Eq. 7)."""


@dataclass(frozen=True)
class LayerShape:
    """Sizes of the transformer layer to measure."""

    model_dim: int
    ffn_dim: int
    num_experts: int  # on one device
    num_rows: int  # of all these experts
    gated: bool  # Then fc1 is [2F, M].
    num_heads: int
    seq_length: int
    num_samples: int  # in a micro-batch
    dtype: torch.dtype  # of weights and activations

    @property
    def expert_flops(self) -> float:
        """Flops of the experts' forward pass: two matrix products for each row, three if gated."""
        return 2.0 * self.num_rows * self.model_dim * self.ffn_dim * (3 if self.gated else 2)

    @property
    def attention_flops(self) -> float:
        """Flops of attention's forward pass: four projections, scores, and scores times values."""
        tokens = self.num_samples * self.seq_length
        return tokens * self.model_dim * (8.0 * self.model_dim + 4.0 * self.seq_length)

    def drawn(self, *size: int, device: torch.device, scale: float = 0.02) -> torch.Tensor:
        """A tensor of random numbers that requires a gradient."""
        return (torch.randn(*size, device=device) * scale).to(self.dtype).requires_grad_()


def expert_flops_per_s(shape: LayerShape, device: torch.device, num_repetitions: int) -> float:
    """Measure the flop/s of a device in expert compute over both passes, one expert after the other.

    All experts have equally many rows, to within one. The median of some runs counts.
    """
    x = shape.drawn(shape.num_rows, shape.model_dim, device=device, scale=1)
    fc1_size, experts = (shape.ffn_dim * (2 if shape.gated else 1), shape.model_dim), range(shape.num_experts)
    fc1_G = [shape.drawn(*fc1_size, device=device) for _ in experts]
    fc2_G = [shape.drawn(shape.model_dim, shape.ffn_dim, device=device) for _ in experts]
    upstream = torch.ones_like(x)

    def expert(rows: torch.Tensor, fc1: torch.Tensor, fc2: torch.Tensor) -> torch.Tensor:
        hidden = functional.linear(rows, fc1)
        if not shape.gated:
            return functional.linear(functional.gelu(hidden), fc2)
        gate, linear = hidden.chunk(2, dim=-1)
        return functional.linear(functional.silu(gate) * linear, fc2)

    def both_passes() -> None:
        rows_G = x.tensor_split(shape.num_experts)
        y = torch.cat([expert(*arguments) for arguments in zip(rows_G, fc1_G, fc2_G, strict=True)])
        torch.autograd.grad(y, [x, *fc1_G, *fc2_G], upstream)

    return PASSES * shape.expert_flops / _median_s(both_passes, device, num_repetitions)


def attention_flops_per_s(shape: LayerShape, device: torch.device, num_repetitions: int) -> float:
    """Measure the flop/s of a device in attention without a mask over both passes, likewise."""
    x = shape.drawn(shape.num_samples, shape.seq_length, shape.model_dim, device=device, scale=1)
    into, out = (shape.drawn(n * shape.model_dim, shape.model_dim, device=device) for n in (3, 1))
    upstream = torch.ones_like(x)

    def both_passes() -> None:
        heads = functional.linear(x, into).unflatten(-1, (3, shape.num_heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads.unbind())
        y = functional.linear(mixed.transpose(1, 2).flatten(-2), out)
        torch.autograd.grad(y, [x, into, out], upstream)

    return PASSES * shape.attention_flops / _median_s(both_passes, device, num_repetitions)


def device_memory_bytes(device: torch.device, num_sharers: int) -> int:
    """Memory of a device in bytes; each of the CPU ranks of a host gets an equal share of its memory."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // num_sharers


def _median_s(action: Callable[[], None], device: torch.device, num_repetitions: int) -> float:
    return statistics.median([elapsed_s(action, device) for _ in range(1 + num_repetitions)][1:])
