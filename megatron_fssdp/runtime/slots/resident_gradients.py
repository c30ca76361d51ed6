"""Gradients of experts with resident replicas: summed at the owner, then given back to the replicas."""

import torch

from megatron_fssdp.collectives.sparse.sparse_transfer import SparseTransfer
from megatron_fssdp.collectives.transfer_lane import PendingTransfer
from megatron_fssdp.runtime.experts.expert_layout import ExpertLayout, ParametersByExpert
from megatron_fssdp.runtime.slots.owner_gradients import add_to_owners, gradient_of


class ResidentGradients:
    """One layer's all-reduce of an iteration's gradients among the holders of each expert.

    The all-reduce is a SparseReduceScatter followed by a SparseAllGather of the sums::

        reduce()                   starts SparseReduceScatter
        advance(), first call      waits for it and starts SparseAllGather of the sums
        advance(), second call     waits for it and writes the sums into the gradients

    The caller calls :meth:`advance` after other work has hidden the step that is running. :meth:`finish` does
    all steps that remain. All ranks of the group make the same calls in the same order.

    Args:
        transfer: Transfer of all elements of an expert, in the data type of the sums.
        layout: Shapes of one expert's tensors.
        parameters: Parameters of the experts that are present on this device.
    """

    def __init__(
        self, transfer: SparseTransfer, layout: ExpertLayout, parameters: ParametersByExpert
    ) -> None:
        self._transfer, self._layout, self._parameters = transfer, layout, parameters
        self._reduction: PendingTransfer | None = None
        self._return: PendingTransfer | None = None
        self._sums: dict[int, torch.Tensor] = {}
        self._is_started = False
        self.is_finished = False
        """Whether all holders have the sums."""

    def reduce(self) -> None:
        """Start to sum at the owners; called after the layer's last backward pass of the iteration."""
        if self._is_started:
            return
        self._is_started = True
        held = {
            expert: self._gradient(expert)
            for expert in (*self._transfer.received_experts, *self._transfer.shared_experts)
        }
        dtype = self._transfer.dtype
        self._reduction = self._transfer.start_reduce_scatter(held, dtype=dtype, result_dtype=dtype)

    def advance(self) -> None:
        """Wait for the step that is running, and start the next one."""
        if self._reduction is not None:
            self._sums, self._reduction = self._reduction.wait(), None
            self._return = self._transfer.start_all_gather(self._sums)
        elif self._return is not None:
            sums, self._return = {**self._sums, **self._return.wait()}, None
            for expert, total in sums.items():
                self._replace_gradient(expert, total)
            self._sums = {}
            self.is_finished = True

    def finish(self) -> None:
        """Write the sums into the gradients of all holders; a second call does nothing."""
        self.reduce()
        while not self.is_finished:
            self.advance()

    def _replace_gradient(self, expert: int, total: torch.Tensor) -> None:
        parameters = self._parameters[expert]
        for parameter in parameters:
            if (gradient := gradient_of(parameter)) is not None:
                gradient.zero_()
        add_to_owners(zip(parameters, self._layout.unpack(total), strict=True))

    def _gradient(self, expert: int) -> torch.Tensor:
        gradients = [gradient_of(parameter) for parameter in self._parameters[expert]]
        return self._layout.pack(
            [
                torch.zeros_like(parameter) if gradient is None else gradient
                for parameter, gradient in zip(self._parameters[expert], gradients, strict=True)
            ]
        ).to(self._transfer.dtype)
