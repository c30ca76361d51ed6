"""Weights of one layer's replicas on this device: gathered, used, released, gathered again."""

from collections.abc import Mapping, Sequence
from enum import Enum, auto

import torch

from megatron_fssdp.collectives.sparse_transfer import SparseTransfer
from megatron_fssdp.collectives.transfer_lane import PendingTransfer
from megatron_fssdp.runtime.expert_layout import ExpertLayout


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
        parameters: Parameters of the experts that this rank owns.
    """

    def __init__(self, layout: ExpertLayout, parameters: Mapping[int, Sequence[torch.nn.Parameter]]) -> None:
        self.layout = layout
        self.parameters = parameters
        self.state = WeightState.OWNED
        self._flat: dict[int, torch.Tensor] = {}
        self._pending: PendingTransfer | None = None

    @property
    def resident_bytes(self) -> int:
        """Memory that the replicas occupy now."""
        return sum(flat.untyped_storage().nbytes() for flat in self._flat.values())

    def start(self, transfer: SparseTransfer) -> None:
        """Start SparseAllGather; every rank of the group has to.

        Raises:
            RuntimeError: The replicas are here or on their way already.
        """
        if self.state is not WeightState.OWNED:
            raise RuntimeError(f"replicas are {self.state.name}, wanted OWNED before they are gathered")
        self._pending = self._start(transfer)
        self.state = WeightState.GATHERING

    def extend(self, transfer: SparseTransfer) -> None:
        """Gather more replicas beside those that are here; holders may pass theirs on."""
        self.wait()
        self._start(transfer).wait()

    def wait(self) -> None:
        """Wait until the replicas are here.

        Raises:
            RuntimeError: Nobody has started to gather them.
        """
        if self.state is WeightState.OWNED:
            raise RuntimeError("replicas are OWNED, wanted GATHERING or MATERIALIZED: start() comes first")
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
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
        self.state = WeightState.OWNED

    def _start(self, transfer: SparseTransfer) -> PendingTransfer:
        owned = {
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
        # .data has a version counter of its own: bringing a saved weight back is no change to it.
        return transfer.start_all_gather(
            owned, out={expert: self._flat[expert].data for expert in transfer.received_experts}
        )
