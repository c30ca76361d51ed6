"""Gradients of one layer's replicas: summed here, sent to the owners, added to the owners' gradients."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from megatron_fssdp.collectives.sparse.sparse_transfer import SparseTransfer
from megatron_fssdp.collectives.sparse.transfer_cargo import accumulation_dtype
from megatron_fssdp.collectives.transfer_lane import PendingTransfer
from megatron_fssdp.runtime.experts.expert_layout import ExpertLayout, ExpertParameters, ParametersByExpert


@dataclass(eq=False)
class _Flight:
    """One SparseReduceScatter of gradients to the owners, in parts that are started one by one.

    Attributes:
        parts: Transfers of consecutive elements that have not been started.
        held: Flat gradient of each of this device's replicas.
        dtype: Data type of these gradients.
        sums: Flat sum over the replicas of each of this device's owned experts, as far as it has arrived.
        layout: Shapes of one expert's tensors.
        parameters: Parameters of the experts that this rank owns.
        pending: Transfers that have been started.
        num_started: Number of an expert's elements whose transfer has been started.
    """

    parts: deque[SparseTransfer]
    held: dict[int, torch.Tensor]
    dtype: torch.dtype
    sums: dict[int, torch.Tensor]
    layout: ExpertLayout
    parameters: ParametersByExpert
    pending: list[PendingTransfer] = field(default_factory=list)
    num_started: int = 0

    def start(self) -> None:
        """Start SparseReduceScatter of the next part."""
        transfer = self.parts.popleft()
        elements = slice(self.num_started, self.num_started + transfer.num_elements)
        self.num_started = elements.stop
        self.pending.append(
            transfer.start_reduce_scatter(
                {expert: flat[elements] for expert, flat in self.held.items()},
                dtype=self.dtype,
                # The sums are formed in fp32, and rounding them to half precision would save nothing.
                result_dtype=accumulation_dtype(self.layout.dtype),
                out={expert: flat[elements] for expert, flat in self.sums.items()},
            )
        )

    def wait(self) -> None:
        """Wait for all parts that have been started."""
        for pending in self.pending:
            pending.wait()
        self.pending.clear()


class ReplicaGradients:
    """Sums the gradients of this device's replicas and sends them; receives those for this device's experts.

    All ranks of the group make the same calls in the same order. The calls depend only on the number of
    backward passes, never on the replicas that a rank holds.

    Attributes:
        num_unsent: Number of backward passes whose gradients are summed here and have not been sent.
    """

    def __init__(self) -> None:
        self.num_unsent = 0
        self._sums: dict[int, torch.Tensor] = {}
        self._flights: deque[_Flight] = deque()

    @property
    def in_flight(self) -> bool:
        """Whether some gradients, or a part of them, are in transfer and not yet in the owners' gradients."""
        return bool(self._flights)

    def open_sums(
        self, layout: ExpertLayout, experts: Iterable[int], device: torch.device
    ) -> Mapping[int, torch.Tensor]:
        """The sums of replicas' gradients, in fp32 or wider, to which a backward pass adds in place.

        Args:
            layout: Shapes of one expert's tensors.
            experts: Replicas on this device.
            device: Device of this rank's tensors.

        Returns:
            Flat sums ``[numel]`` by expert, zero for a replica without gradients.
        """
        for expert in experts:
            if expert not in self._sums:
                self._sums[expert] = torch.zeros(
                    layout.numel, dtype=accumulation_dtype(layout.dtype), device=device
                )
        return self._sums

    def accumulate(
        self,
        layout: ExpertLayout,
        gradients: Mapping[int, Sequence[torch.Tensor | None]],
        dtype: torch.dtype,
    ) -> None:
        """Add one micro-batch's gradients of this device's replicas to their sums.

        Args:
            layout: Shapes of one expert's tensors.
            gradients: Gradients of each replica on this device, in the order of the layout; ``None`` for a
                gradient that the backward pass has added to :meth:`open_sums`.
            dtype: Data type of sums that begin with these gradients.
        """
        self.num_unsent += 1
        for expert, tensors in gradients.items():
            given = [tensor for tensor in tensors if tensor is not None]
            if expert not in self._sums:
                self._sums[expert] = layout.pack(given).to(dtype)
                continue
            for part, gradient in zip(layout.unpack(self._sums[expert]), tensors, strict=True):
                if gradient is not None:
                    part.add_(gradient)

    def send_sums(
        self,
        parts: Sequence[SparseTransfer],
        layout: ExpertLayout,
        parameters: ParametersByExpert,
        dtype: torch.dtype,
    ) -> None:
        """Start SparseReduceScatter of the present sums; does nothing if no pass has been accumulated.

        Args:
            parts: Transfers of consecutive elements, which together cover all elements of an expert. The
                first one starts now, the others with :meth:`send_rest`.
            layout: Shapes of one expert's tensors.
            parameters: Parameters of the experts that this rank owns.
            dtype: Data type in which the sums travel, equal on all ranks.
        """
        if not self.num_unsent:
            return
        held = {expert: total.to(dtype) for expert, total in self._sums.items()}
        self._sums, self.num_unsent = {}, 0
        self._send(parts, layout, parameters, held, dtype)

    def send_rest(self) -> None:
        """Start the transfers of all parts that have not been started."""
        for flight in self._flights:
            while flight.parts:
                flight.start()

    def settle(self) -> None:
        """Wait for all started transfers, and add gradients that have arrived in full to the owners'."""
        for flight in self._flights:
            flight.wait()
        while self._flights and not self._flights[0].parts:
            flight = self._flights.popleft()
            for expert, summed in flight.sums.items():
                add_to_owner(flight.parameters[expert], flight.layout.unpack(summed))

    def _send(
        self,
        parts: Sequence[SparseTransfer],
        layout: ExpertLayout,
        parameters: ParametersByExpert,
        held: dict[int, torch.Tensor],
        dtype: torch.dtype,
    ) -> None:
        # The owner's own part is already in its gradient, so it is not a part of these sums.
        sums = {
            expert: torch.empty(layout.numel, dtype=accumulation_dtype(layout.dtype), device=parts[0].device)
            for expert in parts[0].shared_experts
        }
        flight = _Flight(deque(parts), held, dtype, sums, layout, parameters)
        flight.start()
        self._flights.append(flight)


def gradient_of(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """``main_grad`` of a Parameter, or ``grad`` without Megatron's DDP; ``None`` if it has no gradient."""
    main_grad = getattr(parameter, "main_grad", None)
    return parameter.grad if main_grad is None else main_grad


def open_gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    """The gradient of a Parameter, to which a backward pass adds in place; zero if there was none.

    The gradient of a Parameter that is not trained is a new tensor that is dropped afterwards.
    """
    if not parameter.requires_grad:
        return torch.zeros_like(parameter)
    so_far = gradient_of(parameter)
    if so_far is None:
        so_far = parameter.grad = torch.zeros_like(parameter)
    return so_far


def add_to_owner(parameters: ExpertParameters, gradients: Sequence[torch.Tensor | None]) -> None:
    """Add raw gradients to ``main_grad``, or to ``grad`` without Megatron's DDP.

    Args:
        parameters: Parameters of one owned expert.
        gradients: Their gradients, in the same order and shapes; ``None`` for those that were added already.
    """
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is None or not parameter.requires_grad:
            continue
        so_far = gradient_of(parameter)
        if so_far is not None:
            so_far.add_(gradient)
        else:
            parameter.grad = gradient.to(parameter.dtype, copy=True)
