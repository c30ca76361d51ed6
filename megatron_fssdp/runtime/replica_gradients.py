"""Gradients of one layer's experts: added up here, sent home, added to the owners'."""

from collections import deque
from collections.abc import Mapping, Sequence

import torch

from megatron_fssdp.collectives.sparse_transfer import SparseTransfer
from megatron_fssdp.collectives.transfer_cargo import accumulation_dtype
from megatron_fssdp.collectives.transfer_lane import PendingTransfer
from megatron_fssdp.runtime.expert_layout import ExpertLayout

Parameters = Mapping[int, Sequence[torch.nn.Parameter]]


class ReplicaGradients:
    """What this device's replicas owe their owners, and what their replicas owe this device.

    All ranks of the group make the same calls in the same order; only the numbers of
    backward passes decide, never what a rank happens to hold.

    Attributes:
        num_unsent: Backward passes whose gradients are still summed here.
    """

    def __init__(self) -> None:
        self.num_unsent = 0
        self._sums: dict[int, torch.Tensor] = {}
        self._flights: deque[tuple[PendingTransfer, ExpertLayout, Parameters]] = deque()

    @property
    def in_flight(self) -> bool:
        """Whether sums have been sent that have not been added to the owners' gradients yet."""
        return bool(self._flights)

    def accumulate(self, layout: ExpertLayout, gradients: Mapping[int, Sequence[torch.Tensor]]) -> None:
        """Add one micro-batch's gradients of this device's replicas to their sums, in fp32 or wider.

        Args:
            layout: Shapes of one expert's tensors.
            gradients: Gradients of each replica, in the order of the layout.
        """
        self.num_unsent += 1
        for expert, tensors in gradients.items():
            if expert in self._sums:
                for part, gradient in zip(layout.unpack(self._sums[expert]), tensors, strict=True):
                    part.add_(gradient)
            else:
                self._sums[expert] = layout.pack(tensors).to(accumulation_dtype(layout.dtype))

    def send_sums(self, transfer: SparseTransfer, layout: ExpertLayout, parameters: Parameters) -> None:
        """Start SparseReduceScatter of the sums so far; nothing to do where there are none."""
        if not self.num_unsent:
            return
        held = dict(self._sums)
        self._sums, self.num_unsent = {}, 0
        self._send(transfer, layout, parameters, held, accumulation_dtype(layout.dtype))

    def send(
        self,
        transfer: SparseTransfer,
        layout: ExpertLayout,
        parameters: Parameters,
        gradients: Mapping[int, Sequence[torch.Tensor]],
    ) -> None:
        """Start SparseReduceScatter of one micro-batch's gradients."""
        held = {expert: layout.pack(tensors) for expert, tensors in gradients.items()}
        self._send(transfer, layout, parameters, held, layout.dtype)

    def settle(self) -> None:
        """Wait for what has been sent and add it to the owners' gradients."""
        while self._flights:
            pending, layout, parameters = self._flights.popleft()
            for expert, summed in pending.wait().items():
                add_to_owner(parameters[expert], layout.unpack(summed))

    def _send(
        self,
        transfer: SparseTransfer,
        layout: ExpertLayout,
        parameters: Parameters,
        held: dict[int, torch.Tensor],
        dtype: torch.dtype,
    ) -> None:
        # An owner's own part is in its gradient already. Sums of replicas are formed in
        # fp32; rounding them to half precision would buy nothing.
        pending = transfer.start_reduce_scatter(
            held, dtype=dtype, result_dtype=accumulation_dtype(layout.dtype)
        )
        self._flights.append((pending, layout, parameters))


def add_to_owner(parameters: Sequence[torch.nn.Parameter], gradients: Sequence[torch.Tensor]) -> None:
    """Add raw gradients to ``main_grad``, or to ``grad`` without Megatron's DDP.

    Args:
        parameters: Of one owned expert.
        gradients: In the same order and shapes.
    """
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if not parameter.requires_grad:
            continue
        main_grad = getattr(parameter, "main_grad", None)
        if main_grad is not None:
            main_grad.add_(gradient)
        elif parameter.grad is not None:
            parameter.grad.add_(gradient)
        else:
            parameter.grad = gradient.to(parameter.dtype, copy=True)
