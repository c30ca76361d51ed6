"""Paced compute: it takes the time that follows from a stated throughput, but uses no cores.

There are more ranks than cores. With real compute, a busy rank would use the cores of an idle one, and
imbalance would not be visible. Therefore attention and experts sleep for their FLOPs divided by a stated
rate, forward and backward. All tensors that are moved, gradients of weights included, exist in their real
sizes.

Shape letters: T tokens, M model dim.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch

from megatron_fssdp.planning.cost.cost_model import BACKWARD_PER_FORWARD


def paced(hidden: torch.Tensor, forward_s: float) -> torch.Tensor:
    """Return the hidden states after paced compute. The backward pass takes twice the forward time."""
    result: torch.Tensor = _Paced.apply(forward_s, hidden)
    return result


def paced_experts(
    rows: torch.Tensor, probs: torch.Tensor, weights: Sequence[torch.Tensor], forward_s: float
) -> torch.Tensor:
    """Return the rows after paced compute in place of experts.

    Args:
        rows: Rows of all experts, ``[T, M]``.
        probs: Probabilities of the rows, ``[T]``. They get gradients, as with real experts.
        weights: Weights of all present experts. Their gradients are zeros.
        forward_s: Seconds of the forward pass. The backward pass takes twice this time.
    """
    result: torch.Tensor = _Paced.apply(forward_s, rows, probs, *weights)
    return result


class _Paced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, forward_s: float, hidden: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        ctx.forward_s = forward_s
        ctx.save_for_backward(*others)
        time.sleep(forward_s)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        begin_s = time.perf_counter()
        zeros = [torch.zeros_like(tensor) for tensor in ctx.saved_tensors]
        # Making the zeros counts as part of the compute.
        left_s = BACKWARD_PER_FORWARD * ctx.forward_s - (time.perf_counter() - begin_s)
        time.sleep(max(0.0, left_s))
        return None, gradients[0], *zeros
