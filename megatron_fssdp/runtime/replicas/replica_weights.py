"""Weights of one layer's replicas on this device: gathered, used, released, gathered again."""

from collections.abc import Sequence
from enum import Enum, auto

import torch

from megatron_fssdp.collectives.sparse.sparse_transfer import SparseTransfer
from megatron_fssdp.collectives.transfer_lane import PendingTransfer
from megatron_fssdp.runtime.experts.expert_layout import ExpertLayout, ParametersByExpert


class WeightState(Enum):
    """Life of replicas: OWNED -> GATHERING -> MATERIALIZED -> OWNED."""

    OWNED = auto()
    """Only the owners have the experts."""
    GATHERING = auto()
    """SparseAllGather has been started."""
    MATERIALIZED = auto()
    """The replicas are here."""


class ReplicaWeights:
    """Flat weights of the experts that this device holds without owning them.

    A release gives the memory back and keeps the tensors, so that what autograd saved of
    them is whole again once they are gathered anew.

    Args:
        layout: Shapes of one expert's tensors.
        parameters: Parameters of the experts that need not be gathered, most often those that this rank
            owns.
    """

    def __init__(self, layout: ExpertLayout, parameters: ParametersByExpert) -> None:
        self.layout = layout
        self.parameters = parameters
        self.state = WeightState.OWNED
        self._flat: dict[int, torch.Tensor] = {}
        self._sent: dict[int, torch.Tensor] = {}
        self._num_started = 0
        self._pending: list[PendingTransfer] = []

    @classmethod
    def present(cls, layout: ExpertLayout, parameters: ParametersByExpert) -> "ReplicaWeights":
        """Where every expert has Parameters here and none is to be gathered."""
        weights = cls(layout, parameters)
        weights.state, weights._num_started = WeightState.MATERIALIZED, layout.numel
        return weights

    @property
    def held_bytes(self) -> int:
        """Memory that the replicas occupy now."""
        return sum(flat.untyped_storage().nbytes() for flat in self._flat.values())

    @property
    def num_missing(self) -> int:
        """Elements of every replica that nobody has started to gather."""
        return self.layout.numel - self._num_started

    def start(self, transfer: SparseTransfer) -> None:
        """Start SparseAllGather, of all elements or of the next part of them; every rank has to.

        Args:
            transfer: For as many elements of an expert as are to be gathered.

        Raises:
            RuntimeError: The replicas are here or on their way already.
        """
        if transfer.num_elements > self.num_missing:
            raise RuntimeError(
                f"replicas are {self.state.name} with {self.num_missing} elements missing, wanted "
                f"{transfer.num_elements} that nobody has started to gather"
            )
        if self.state is WeightState.OWNED:
            self._make_room(transfer)
        begin, self._num_started = self._num_started, self._num_started + transfer.num_elements
        self._pending.append(self._start(transfer, slice(begin, self._num_started)))
        self.state = WeightState.GATHERING

    def extend(self, transfer: SparseTransfer) -> None:
        """Gather more replicas beside those that are here; holders may pass theirs on."""
        self.wait()
        self._make_room(transfer)
        self._start(transfer, slice(None)).wait()
        self._sent.clear()

    def wait(self) -> None:
        """Wait until the replicas are here.

        Raises:
            RuntimeError: Nobody has started to gather them, or only a part of them.
        """
        if self.state is WeightState.OWNED or self.num_missing:
            raise RuntimeError(
                f"replicas are {self.state.name} with {self.num_missing} elements missing, wanted GATHERING "
                "or MATERIALIZED: start() comes first"
            )
        for pending in self._pending:
            pending.wait()
        self._pending.clear()
        self._sent.clear()
        self.state = WeightState.MATERIALIZED

    def tensors(self, present: Sequence[int], *, wait: bool = True) -> list[torch.Tensor]:
        """Detached tensors of the present experts, owned ones in place.

        Args:
            present: The experts.
            wait: For the replicas; else they are complete after :meth:`wait`.
        """
        if wait:
            self.wait()
        tensors: list[torch.Tensor] = []
        for expert in present:
            if expert in self.parameters:
                tensors += [parameter.detach() for parameter in self.parameters[expert]]
            else:
                tensors += self.layout.unpack(self._flat[expert].detach())
        return tensors

    def release(self) -> None:
        """Give the replicas' memory back."""
        if self.state is WeightState.GATHERING:
            self.wait()  # the transfer still writes into it
        for flat in self._flat.values():
            flat.untyped_storage().resize_(0)
        self._num_started = 0
        self.state = WeightState.OWNED

    def _make_room(self, transfer: SparseTransfer) -> None:
        """Copies of the experts that go out, and room for those that come."""
        self._sent = {
            expert: self.layout.pack([parameter.detach() for parameter in self.parameters[expert]])
            if expert in self.parameters
            else self._flat[expert]
            for expert in transfer.shared_experts
        }
        num_bytes = self.layout.num_bytes
        for expert in transfer.received_experts:
            if expert in self._flat:
                self._flat[expert].untyped_storage().resize_(num_bytes)
            else:
                self._flat[expert] = torch.empty(
                    self.layout.numel, dtype=self.layout.dtype, device=transfer.device
                )

    def _start(self, transfer: SparseTransfer, elements: slice) -> PendingTransfer:
        # .data has a version counter of its own: bringing a saved weight back is no change to it.
        return transfer.start_all_gather(
            {expert: flat[elements] for expert, flat in self._sent.items()},
            out={expert: self._flat[expert].data[elements] for expert in transfer.received_experts},
        )
