"""The gradients of an expert's Parameters, and totals of them to which transfers add."""

from collections.abc import Iterator

import torch

from megatron_fssdp.collectives.sparse.sparse_transfer import SparseTransfer
from megatron_fssdp.runtime.experts.expert_layout import ExpertParameters, ParametersByExpert


def gradient_of(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """``main_grad`` of a Parameter, or ``grad`` without Megatron's DDP; ``None`` if it has no gradient."""
    main_grad = getattr(parameter, "main_grad", None)
    return parameter.grad if main_grad is None else main_grad


def gradient_to_fill(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """The gradient of a Parameter, which becomes zeros if there is none; ``None`` if it is frozen."""
    if not parameter.requires_grad:
        return None
    if gradient_of(parameter) is None:
        parameter.grad = torch.zeros_like(parameter)
    return gradient_of(parameter)


class GradientTotals:
    """The gradients of one expert as contiguous tensors that a transfer adds to: themselves if they are.

    With a ``dtype``, they are the gradients if they have it. Those of frozen Parameters are on ``meta``.
    """

    def __init__(self, parameters: ExpertParameters, dtype: torch.dtype | None = None) -> None:
        self.gradients = [gradient_to_fill(parameter) for parameter in parameters]
        self.tensors = [
            torch.empty_like(parameter, device="meta")
            if gradient is None
            else gradient.to(dtype or gradient.dtype).contiguous()
            for parameter, gradient in zip(parameters, self.gradients, strict=True)
        ]

    def write(self) -> None:
        """Copy the totals that are not the gradients themselves into the gradients."""
        for gradient, total in zip(self.gradients, self.tensors, strict=True):
            if gradient is not None and total is not gradient:
                gradient.copy_(total)


def sum_over_holders(transfer: SparseTransfer, parameters: ParametersByExpert) -> Iterator[None]:
    """Sum an iteration's gradients over the resident holders of each expert, in three steps of an iterator.

    The first step starts SparseReduceScatter, the second one SparseAllGather of the sums, and the last one
    waits. The caller lets other work hide what is running, and leaves the gradients alone. All ranks of the
    group take the same steps in the same order. The transfer is one of whole experts, in the sums' data type.
    """
    here = (*transfer.received_experts, *transfer.shared_experts)
    held = {expert: GradientTotals(parameters[expert], transfer.dtype) for expert in here}
    # Whether an expert is frozen is known on its own device alone, so zeros travel.
    contents = {
        expert: [
            torch.zeros(total.shape, dtype=transfer.dtype, device=transfer.device) if total.is_meta else total
            for total in totals.tensors
        ]
        for expert, totals in held.items()
    }
    received, shared = transfer.received_experts, transfer.shared_experts
    reduction = transfer.start_reduce_scatter(
        {e: contents[e] for e in received}, {e: contents[e] for e in shared}
    )
    yield
    reduction.wait()
    gathered = transfer.start_all_gather(contents)
    yield
    gathered.wait()
    for totals in held.values():
        totals.write()
