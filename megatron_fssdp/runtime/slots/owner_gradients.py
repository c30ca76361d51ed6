"""Gradients of experts' Parameters: replicas add to them, and all holders of resident experts sum theirs."""

from collections.abc import Iterable, Iterator

import torch

from megatron_fssdp.collectives.sparse.sparse_transfer import SparseTransfer
from megatron_fssdp.runtime.experts.expert_layout import ExpertLayout, ParametersByExpert


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


def sum_over_holders(
    transfer: SparseTransfer, layout: ExpertLayout, parameters: ParametersByExpert
) -> Iterator[None]:
    """Sum an iteration's gradients over the resident holders of each expert, in three steps of an iterator.

    The first step starts SparseReduceScatter. The second one waits for it and starts SparseAllGather of the
    sums, and the last one waits for that and writes the sums into the gradients. The caller lets other work
    hide what is running. All ranks of the group take the same steps in the same order.

    Args:
        transfer: Transfer of all elements of an expert, in the data type of the sums.
        layout: Shapes of one expert's tensors.
        parameters: Parameters of the experts that are present on this device.
    """
    held = {}
    for expert in (*transfer.received_experts, *transfer.shared_experts):
        gradients = [
            torch.zeros_like(parameter) if (gradient := gradient_of(parameter)) is None else gradient
            for parameter in parameters[expert]
        ]
        held[expert] = layout.pack(gradients).to(transfer.dtype)
    reduction = transfer.start_reduce_scatter(held, dtype=transfer.dtype, result_dtype=transfer.dtype)
    yield
    sums = reduction.wait()
    gathered = transfer.start_all_gather(sums)
    yield
    for expert, total in {**sums, **gathered.wait()}.items():
        for parameter in parameters[expert]:
            if (gradient := gradient_of(parameter)) is not None:
                gradient.zero_()
        add_to_owners(zip(parameters[expert], layout.unpack(total), strict=True))
