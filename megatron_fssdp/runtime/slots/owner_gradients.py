"""Gradients of owned experts, to which the sums of their replicas are added."""

from collections.abc import Sequence

import torch

from megatron_fssdp.runtime.experts.expert_layout import ExpertParameters


def gradient_of(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """``main_grad`` of a Parameter, or ``grad`` without Megatron's DDP; ``None`` if it has no gradient."""
    main_grad = getattr(parameter, "main_grad", None)
    return parameter.grad if main_grad is None else main_grad


def add_to_owner(parameters: ExpertParameters, gradients: Sequence[torch.Tensor]) -> None:
    """Add raw gradients to ``main_grad``, or to ``grad`` without Megatron's DDP.

    Args:
        parameters: Parameters of one owned expert.
        gradients: Their gradients, in the same order and shapes.
    """
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if not parameter.requires_grad:
            continue
        so_far = gradient_of(parameter)
        if so_far is not None:
            so_far.add_(gradient)
        else:
            parameter.grad = gradient.to(parameter.dtype, copy=True)
