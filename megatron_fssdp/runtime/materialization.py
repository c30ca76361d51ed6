"""Brings replicas' weights in before the experts and their gradients home after them.

The owned weights are used where they are; only replicas are received. Both enter the
autograd graph as outputs of one function that also passes the hidden states through:
every rank then runs its backward, in one fixed order against the dispatch all-to-all,
also a rank that owns nothing of the layer but holds a replica.

Parameters stay out of autograd. Owners receive the raw sums of their replicas' gradients
and of their own in ``main_grad`` (or ``grad`` without Megatron's DDP); scaling and the
data-parallel reduction follow later, see ``megatron_adapter.gradient_sync``. Only a group
of one device, where nothing can be replicated, leaves its Parameters in autograd: Megatron
reduces them together with the dense ones.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from megatron_fssdp.collectives.sparse_collectives import SparseTransfer
from megatron_fssdp.planning.placement import ExpertPlacement
from megatron_fssdp.runtime.expert_layout import ExpertLayout, ExpertWeights


class Materialization:
    """One layer's present experts for one micro-batch.

    Attributes:
        on_backward: Called once when the gradients have gone home: the sign that a
            training micro-batch, not an evaluation or a recomputed forward, has ended.
    """

    def __init__(
        self,
        placement: ExpertPlacement,
        device: int,
        layout: ExpertLayout,
        parameters: Mapping[int, Sequence[torch.nn.Parameter]],
        transfer: SparseTransfer,
        on_backward: Callable[[], None],
    ) -> None:
        self.present = placement.experts_on(device)
        self.layout = layout
        self.parameters = parameters
        self.transfer = transfer
        self.on_backward = on_backward
        self.alone = placement.num_devices == 1
        num_holders_E = placement.present_ED.sum(axis=1)
        self.shared = tuple(e for e in self.present if num_holders_E[e] > 1)

    def apply(self, hidden: torch.Tensor) -> tuple[torch.Tensor, list[ExpertWeights]]:
        """Thread the hidden states through SparseAllGather.

        Args:
            hidden: What the dispatcher is going to send, any shape.

        Returns:
            The hidden states, and the weights of the present experts, ascending.
        """
        # The anchor gives the node an input that requires a gradient even where the
        # hidden states do not (frozen layers below, a layer used alone).
        anchor = torch.empty(0, device=hidden.device, requires_grad=True)
        hidden, *tensors = _Materialize.apply(self, anchor, hidden)
        if self.alone:
            tensors = [parameter for expert in self.present for parameter in self.parameters[expert]]
        count = len(self.layout.shapes)
        experts = [ExpertWeights.from_tensors(tensors[i : i + count]) for i in range(0, len(tensors), count)]
        return hidden, experts

    def gather(self) -> list[torch.Tensor]:
        """SparseAllGather; the tensors of the present experts, ascending."""
        if self.alone:
            return []
        received = self.transfer.all_gather(
            {
                e: self.layout.pack([p.detach() for p in self.parameters[e]])
                for e in self.shared
                if e in self.parameters
            }
        )
        tensors: list[torch.Tensor] = []
        for expert in self.present:
            if expert in self.parameters:
                tensors += [parameter.detach() for parameter in self.parameters[expert]]
            else:
                tensors += self.layout.unpack(received[expert])
        return tensors

    def reduce(self, gradients: Sequence[torch.Tensor]) -> None:
        """SparseReduceScatter, then into the owners' gradients."""
        if not self.alone:
            self._reduce_to_owners(gradients)
        self.on_backward()

    def _reduce_to_owners(self, gradients: Sequence[torch.Tensor]) -> None:
        count = len(self.layout.shapes)
        of_expert = {e: gradients[i * count : (i + 1) * count] for i, e in enumerate(self.present)}
        sums = self.transfer.reduce_scatter(
            {e: self.layout.pack(of_expert[e]) for e in self.shared},
            # The sums are formed in fp32; rounding them to half precision would buy nothing.
            result_dtype=torch.promote_types(self.layout.dtype, torch.float32),
        )
        for expert, parameters in self.parameters.items():
            summed = self.layout.unpack(sums[expert]) if expert in sums else of_expert[expert]
            for parameter, gradient in zip(parameters, summed, strict=True):
                _accumulate(parameter, gradient)


class _Materialize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, materialization: Materialization, anchor: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.materialization = materialization
        ctx.save_for_backward(anchor)
        return (hidden.view_as(hidden), *materialization.gather())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        ctx.materialization.reduce(gradients[1:])
        (anchor,) = ctx.saved_tensors
        return None, torch.zeros_like(anchor), gradients[0]


def _accumulate(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
    if not parameter.requires_grad:
        return
    main_grad = getattr(parameter, "main_grad", None)
    if main_grad is not None:
        main_grad.add_(gradient)
    elif parameter.grad is not None:
        parameter.grad.add_(gradient)
    else:
        parameter.grad = gradient.to(parameter.dtype, copy=True)
