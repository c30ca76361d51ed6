"""Gradients of owned experts, to which the sums of their replicas are added."""

from collections.abc import Iterable

import torch


def gradient_of(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """``main_grad`` of a Parameter, or ``grad`` without Megatron's DDP; ``None`` if it has no gradient."""
    main_grad = getattr(parameter, "main_grad", None)
    return parameter.grad if main_grad is None else main_grad


def add_to_owners(gradients: Iterable[tuple[torch.nn.Parameter, torch.Tensor]]) -> None:
    """Add raw gradients to ``main_grad``, or to ``grad`` without Megatron's DDP.

    Args:
        gradients: Parameters of owned experts, each with its gradient, of the same shape.
    """
    so_far, added = [], []
    for parameter, gradient in gradients:
        if not parameter.requires_grad:
            continue
        found = gradient_of(parameter)
        if found is None:
            parameter.grad = gradient.to(parameter.dtype, copy=True)
        else:
            so_far.append(found)
            added.append(gradient)
    if so_far:
        torch._foreach_add_(so_far, added)
