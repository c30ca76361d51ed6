"""Weights of one layer's replicas on this device, which are gathered, used, released and gathered again."""

from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum, auto

import torch

from megatron_fssdp.collectives.sparse.sparse_transfer import SparseTransfer
from megatron_fssdp.collectives.transfer_lane import PendingTransfer
from megatron_fssdp.runtime.experts.expert_layout import ExpertLayout, ParametersByExpert


class WeightState(Enum):
    """States of a layer's replicas, see :class:`ReplicaWeights`."""

    OWNED = auto()
    """Only the owners have the weights."""
    GATHERING = auto()
    """SparseAllGather has started, for all elements or for a part of them."""
    MATERIALIZED = auto()
    """The replicas' weights have arrived."""


class ReplicaWeights:
    """Flat weights of the replicas on this device.

    The replicas pass through these states::

                  start                 wait                    start: allocate memory, begin SparseAllGather
        OWNED ───────────► GATHERING ───────────► MATERIALIZED  wait: until all elements have arrived
          ▲                   │  ▲ start (next part)  │         release: free the memory; this waits first
          │      release      │  └─┘                  │                  if a transfer is still running
          └───────────────────┴───────────────────────┘

    Release can also come between two parts of a transfer. It waits for the parts that have been started and
    frees the memory but keeps the tensor objects. Tensors that autograd saved refer to them, and
    become valid again when the weights are gathered again.

    Args:
        layout: Shapes of one expert's tensors.
        parameters: Parameters of the experts that are not gathered, usually those that this rank owns.
        waiting: Function that returns a context manager, which is entered around waits for transfers.
    """

    def __init__(
        self,
        layout: ExpertLayout,
        parameters: ParametersByExpert,
        waiting: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.layout = layout
        self.parameters = parameters
        self.state = WeightState.OWNED
        self._flat: dict[int, torch.Tensor] = {}
        self._sent: dict[int, torch.Tensor] = {}
        self._num_started = 0
        self._pending: list[PendingTransfer] = []
        self._waiting = waiting

    @classmethod
    def present(cls, layout: ExpertLayout, parameters: ParametersByExpert) -> "ReplicaWeights":
        """Weights of a layer whose experts on this device all have Parameters, so that none is gathered."""
        weights = cls(layout, parameters)
        weights.state, weights._num_started = WeightState.MATERIALIZED, layout.numel
        return weights

    @property
    def held_bytes(self) -> int:
        """Memory that the replicas occupy now, in bytes."""
        return sum(flat.untyped_storage().nbytes() for flat in self._flat.values())

    @property
    def num_missing(self) -> int:
        """Number of elements of each replica whose transfer has not been started."""
        return self.layout.numel - self._num_started

    def start(self, transfer: SparseTransfer) -> None:
        """Start SparseAllGather of all elements or of the next part of them; every rank must call it.

        Args:
            transfer: Transfer whose ``num_elements`` is the number of elements to gather now.

        Raises:
            RuntimeError: The transfer has more elements than are missing.
        """
        if transfer.num_elements > self.num_missing:
            raise RuntimeError(
                f"replicas are {self.state.name} with {self.num_missing} elements not gathered yet, wanted "
                f"the {transfer.num_elements} of this transfer; call release() before gathering again"
            )
        if self.state is WeightState.OWNED:
            self._make_room(transfer)
        begin, self._num_started = self._num_started, self._num_started + transfer.num_elements
        self._pending.append(self._start(transfer, slice(begin, self._num_started)))
        self.state = WeightState.GATHERING

    def correct(self, transfer: SparseTransfer, kept: Container[int]) -> None:
        """Free replicas that are not needed, then gather further ones and wait for them.

        The memory of freed replicas is there for the further ones, because no transfer uses it any more.

        Args:
            transfer: Transfer of the further replicas; kept replicas on this device can be a source of it.
            kept: Experts whose replicas on this device stay; others are freed.
        """
        self.wait()
        for expert in [expert for expert in self._flat if expert not in kept]:
            del self._flat[expert]
        self._make_room(transfer)
        with self._waiting():
            self._start(transfer, slice(None)).wait()
        self._sent.clear()

    def wait(self) -> None:
        """Wait until all elements of the replicas have arrived.

        Raises:
            RuntimeError: The transfer has not been started, or only for a part of the elements.
        """
        if self.state is WeightState.OWNED or self.num_missing:
            raise RuntimeError(
                f"replicas are {self.state.name} with {self.num_missing} elements not gathered yet, wanted "
                "GATHERING or MATERIALIZED with 0; call start() for all elements before wait()"
            )
        self.settle()
        self._sent.clear()
        self.state = WeightState.MATERIALIZED

    def settle(self) -> None:
        """Wait for the transfers that have been started, even if they bring only a part of the elements.

        A transfer writes into the replicas' memory and reads the copies to send. Both must stay until it is
        over, also when the replicas are not needed any more.
        """
        if not self._pending:
            return
        with self._waiting():
            for pending in self._pending:
                pending.wait()
        self._pending.clear()

    def tensors(self, present: Sequence[int], *, wait: bool = True) -> list[torch.Tensor]:
        """Detached tensors of the present experts; those of owned experts share memory with the Parameters.

        Args:
            present: Experts that are present on this device.
            wait: Whether to wait for the replicas. Otherwise, their tensors are complete after :meth:`wait`.

        Returns:
            The tensors of each expert, in the order of ``present``, then of the layout.
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
        """Free the replicas' memory and keep the tensor objects."""
        self.settle()
        self._sent.clear()
        for flat in self._flat.values():
            flat.untyped_storage().resize_(0)
        self._num_started = 0
        self.state = WeightState.OWNED

    def _make_room(self, transfer: SparseTransfer) -> None:
        """Copy the experts that a transfer sends, and allocate memory for those that it brings."""
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
        # .data has a separate version counter, so autograd does not see a refilled weight as a change.
        return transfer.start_all_gather(
            {expert: flat[elements] for expert, flat in self._sent.items()},
            out={expert: self._flat[expert].data[elements] for expert in transfer.received_experts},
        )
