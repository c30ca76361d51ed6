"""The experts' feed-forward network over tokens sorted by expert.

Shape letters: T tokens, M model dimension, F FFN dimension, G experts present on a device.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from megatron_fssdp.runtime.experts.expert_layout import ExpertWeights
from megatron_fssdp.runtime.experts.grouped_kernel import device_has_grouped_kernel

Activation = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor], torch.Tensor]
"""From output of the first matrix, bias and probabilities to activations, see ``ExpertActivation``."""


def grouped_ffn(
    x: torch.Tensor,
    probs: torch.Tensor,
    tokens_per_expert: Sequence[int],
    experts: Sequence[ExpertWeights],
    activation: Activation,
    *,
    probs_on_input: bool = False,
) -> torch.Tensor:
    """Compute every present expert on its rows.

    The function computes all experts, including those without rows. If no expert is present, the result still
    depends on ``x`` and ``probs``. The autograd graphs of all ranks therefore have the same collectives, and
    no backward pass waits for a collective that another rank does not call.

    Args:
        x: Rows sorted by expert, ``[T, M]``.
        probs: Routing probability of each row, ``[T]``.
        tokens_per_expert: Number of rows of each present expert, ``[G]``; the sum is T.
        experts: Weights of the present experts, in the same order.
        activation: Activation function ``(x, bias, probs) -> [T, F]``, see ``ExpertActivation``.
        probs_on_input: Whether to multiply the probabilities with the input instead of the activation; only
            for top-1 routing.

    Returns:
        Results of the rows, ``[T, M]``, in the dtype of ``x``.
    """
    if probs_on_input:
        x = (probs.unsqueeze(-1) * x).to(x.dtype)
        probs = torch.ones_like(probs)
    if not experts:
        return (x * probs.unsqueeze(-1)).to(x.dtype)
    ffn = _grouped if _grouped_matmul_pays(x, experts) else _one_by_one
    return ffn(x, probs, tokens_per_expert, experts, activation)


def _one_by_one(
    x: torch.Tensor,
    probs: torch.Tensor,
    tokens_per_expert: Sequence[int],
    experts: Sequence[ExpertWeights],
    activation: Activation,
) -> torch.Tensor:
    rows = torch.split(x, list(tokens_per_expert))
    row_probs = torch.split(probs, list(tokens_per_expert))
    outputs = []
    for weights, x_e, probs_e in zip(experts, rows, row_probs, strict=True):
        hidden = activation(functional.linear(x_e, weights.fc1), weights.fc1_bias, probs_e)
        output = functional.linear(hidden, weights.fc2)
        if weights.fc2_bias is not None:
            output = _add_bias(output, weights.fc2_bias, probs_e)
        outputs.append(output)
    return torch.cat(outputs)


def _grouped(
    x: torch.Tensor,
    probs: torch.Tensor,
    tokens_per_expert: Sequence[int],
    experts: Sequence[ExpertWeights],
    activation: Activation,
) -> torch.Tensor:
    # On some devices, grouped_mm does not write the gradient of a group without rows.
    filled = [weights for weights, num in zip(experts, tokens_per_expert, strict=True) if num]
    idle = [weights for weights, num in zip(experts, tokens_per_expert, strict=True) if not num]
    # torch.tensor(..., device=...) would make the host wait for the device.
    rows_G = torch.tensor([num for num in tokens_per_expert if num]).to(x.device, non_blocking=True)
    ends_G = rows_G.cumsum(0).to(torch.int32)
    num_rows = x.shape[0]

    def per_row(biases: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(biases).repeat_interleave(rows_G, dim=0, output_size=num_rows)

    fc1_bias = [w.fc1_bias for w in filled if w.fc1_bias is not None]
    fc2_bias = [w.fc2_bias for w in filled if w.fc2_bias is not None]
    hidden = _GroupedLinear.apply(x, ends_G, *(w.fc1 for w in filled))
    hidden = activation(hidden, per_row(fc1_bias) if fc1_bias else None, probs)
    output = _GroupedLinear.apply(hidden, ends_G, *(w.fc2 for w in filled))
    if fc2_bias:
        output = _add_bias(output, per_row(fc2_bias), probs)
    if idle:
        output = _ZeroGradients.apply(output, *(tensor for weights in idle for tensor in weights.tensors()))
    return output


def _add_bias(output: torch.Tensor, bias: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    # The sum is rounded once, as in Megatron: the probabilities are more precise than the rows.
    return (output + bias * probs.unsqueeze(-1)).to(output.dtype)


def _grouped_matmul_pays(x: torch.Tensor, experts: Sequence[ExpertWeights]) -> bool:
    """Whether one grouped kernel is faster than a loop: for several bf16 experts on a device with the kernel.

    The kernel needs rows whose size is a multiple of 16 bytes. On devices without the kernel, ``grouped_mm``
    is a loop itself. It adds the copy of the weights, and on CUDA every call makes the host wait.
    """
    return (
        x.is_cuda
        and x.dtype is torch.bfloat16
        and len(experts) > 1
        and x.shape[0] > 0
        and device_has_grouped_kernel(x.device)
        and all(size % 8 == 0 for size in experts[0].fc1.shape + experts[0].fc2.shape)
    )


class _GroupedLinear(torch.autograd.Function):
    """Rows ``[T, in]`` times the weights of their experts, G of ``[out, in]``: ``[T, out]``.

    Rows of expert g are those from ``ends_G[g-1]`` up to ``ends_G[g]``.

    The kernel needs the weights stacked. The backward pass stacks them again: a stack that is kept until then
    would double the experts' memory, and would still hold replicas after their release.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ends_G: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, ends_G, *weights)
        return functional.grouped_mm(x, torch.stack(weights).transpose(-2, -1), offs=ends_G)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, ends_G, *weights = ctx.saved_tensors
        grad = gradients[0].contiguous()  # grouped_mm rejects zero strides, which the gradient of a sum has.
        of_x: torch.Tensor | None = None
        of_weights: Sequence[torch.Tensor | None] = (None,) * len(weights)
        if ctx.needs_input_grad[0]:
            of_x = functional.grouped_mm(grad, torch.stack(weights), offs=ends_G)
        if any(ctx.needs_input_grad[2:]):
            of_weights = functional.grouped_mm(grad.t(), x, offs=ends_G).unbind()
        return of_x, None, *of_weights


class _ZeroGradients(torch.autograd.Function):
    """Returns its first input; the other inputs, which are not used, get zero gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *unused: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*unused)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return grad, *(torch.zeros_like(tensor) for tensor in ctx.saved_tensors)
