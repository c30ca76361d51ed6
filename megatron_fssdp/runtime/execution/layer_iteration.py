"""The running iteration of one layer: its plan, and the weights and gradients of its replicas."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import torch

from megatron_fssdp.collectives.sparse.sparse_transfer import SparseTransfer, StartedTransfer
from megatron_fssdp.collectives.sparse.transfer_cargo import accumulation_dtype
from megatron_fssdp.planning.transfer.message_size import message_rule
from megatron_fssdp.planning.transfer.transfer_plan import TransferPlan, additional_transfer
from megatron_fssdp.runtime.exchange.expert_groups import ExpertGroups
from megatron_fssdp.runtime.replicas.local_experts import LocalExperts
from megatron_fssdp.runtime.replicas.materialization import GradientsOfExperts
from megatron_fssdp.runtime.replicas.replica_gradients import ReplicaGradients
from megatron_fssdp.runtime.replicas.replica_weights import ReplicaWeights
from megatron_fssdp.runtime.replicas.resident_gradients import ResidentGradients
from megatron_fssdp.strategies.layer_plan import LayerPlan


@dataclass(eq=False)
class LayerIteration:
    """The transfers of a plan, from the time it is made until the iteration ends.

    Attributes:
        plan: Plan of the iteration. It does not change after the first micro-batch, so that a recomputed
            forward pass has the same plan.
        experts: Experts that have Parameters on this rank.
        groups: Process groups of the layer.
        num_micro_batches: Number of backward passes of the iteration; ``None`` if the loop does not tell it.
        may_split: Whether parts of a transfer may travel beside the experts of another layer.
        journal: List to which every started transfer is appended; ``None`` without measurement.
        waiting: Function that returns a context manager, which is entered around waits for transfers.
        gradients: Gradients of the replicas, summed here or in transfer to the owners.
        is_final: Whether the strategy has already seen the exact counts of a micro-batch.
        transfer: Transfer of all replicas of the plan; it is created at its first use.
        weights: Weights of the replicas if they are kept for the whole iteration, otherwise ``None``. Some of
            their elements can still be missing.
        num_passes: Number of backward passes through resident replicas.
        sums: All-reduce of the resident replicas' gradients; ``None`` before the first backward pass.
    """

    plan: LayerPlan
    experts: LocalExperts
    groups: ExpertGroups
    num_micro_batches: int | None = None
    may_split: bool = False
    journal: list[StartedTransfer] | None = None
    waiting: Callable[[], AbstractContextManager[object]] = nullcontext
    gradients: ReplicaGradients = field(default_factory=ReplicaGradients)
    is_final: bool = False
    transfer: SparseTransfer | None = field(init=False, default=None)
    weights: ReplicaWeights | None = field(init=False, default=None)
    num_passes: int = field(init=False, default=0)
    sums: ResidentGradients | None = field(init=False, default=None)

    def of_micro_batch(self, plan: LayerPlan) -> "LayerIteration":
        """The state of one micro-batch with a separate plan; it shares this iteration's ``gradients``."""
        return replace(self, plan=plan, is_final=True)

    @property
    def splits(self) -> bool:
        """Whether transfers travel in parts; equal on all ranks."""
        return self.may_split and self.plan.is_split

    @property
    def is_home(self) -> bool:
        """Whether all gradients have reached the owners."""
        is_summed = self.sums is None or self.sums.is_finished
        return is_summed and not self.gradients.num_unsent and not self.gradients.in_flight

    def whole_transfer(self, device: torch.device) -> SparseTransfer:
        """The transfer of all elements of all replicas of the plan."""
        if self.transfer is None:
            self.transfer = self._bind(self.plan.transfer, device)
        return self.transfer

    def start_weights(self, device: torch.device) -> ReplicaWeights:
        """Start to gather all weights whose transfer has not been started.

        The Parameters on this rank have the values of the last optimizer step after this call.

        Args:
            device: Device of this rank's tensors.

        Returns:
            Weights of this rank's replicas; call their ``wait`` before use.
        """
        self.experts.await_parameters()
        if self.weights is not None:
            if missing := self.weights.num_missing:
                self.weights.start(self._bind(self.plan.transfer, device, missing))
            return self.weights
        if self.plan.resident:
            self.weights = ReplicaWeights.present(self.experts.layout(), self.experts.all_parameters)
            return self.weights
        weights = ReplicaWeights(self.experts.layout(), self.experts.parameters, self.waiting)
        weights.start(self.whole_transfer(device))
        if self.num_micro_batches is not None and not self.plan.rematerialize:
            self.weights = weights
        return weights

    def weights_to_start(self) -> ReplicaWeights:
        """Weights of a plan for one micro-batch, whose gather the caller starts when the rows travel.

        The Parameters on this rank have the values of the last optimizer step after this call.
        """
        self.experts.await_parameters()
        return ReplicaWeights(self.experts.layout(), self.experts.parameters, self.waiting)

    def start_first_part(self, device: torch.device) -> None:
        """Start the part of SparseAllGather that runs beside the experts of the layer before."""
        if self.weights is None and self.splits and (part := self._part(self.plan.split.gather)):
            # The layer before this one is running, so nothing has waited for this layer's Parameters yet.
            self.experts.await_parameters()
            self.weights = ReplicaWeights(self.experts.layout(), self.experts.parameters, self.waiting)
            self.weights.start(self._bind(self.plan.transfer, device, part))

    def drop(self) -> None:
        """Give up the replicas' weights, after a wait for the transfers that use their memory."""
        if self.weights is not None:
            self.weights.settle()
            self.weights = None

    def correct(self, plan: LayerPlan, weights: ReplicaWeights, device: torch.device) -> None:
        """Continue with a plan that has other replicas: free those that it lacks, gather those that it adds.

        Args:
            plan: Plan with the same owners.
            weights: Weights of the present plan's replicas, gathered or in transfer.
            device: Device of this rank's tensors.
        """
        more = additional_transfer(self.plan.placement, plan.placement, self.groups.topology)
        weights.correct(self._bind(more, device), plan.placement.experts_on(self.groups.device))
        self.plan, self.transfer = plan, None

    def open_sums(self, device: torch.device, experts: Sequence[int]) -> Mapping[int, torch.Tensor]:
        """The sums of replicas' gradients, to which a backward pass adds in place.

        Args:
            device: Device of this rank's tensors.
            experts: Replicas on this device.

        Returns:
            Flat sums ``[numel]`` by expert.
        """
        return self.gradients.open_sums(self.experts.layout(), experts, device)

    def take_gradients(self, gradients: GradientsOfExperts, device: torch.device) -> None:
        """Send the gradients of one backward pass to the owners, or add them to sums that are sent later.

        Args:
            gradients: Gradients of the replicas on this device, by expert.
            device: Device of this rank's tensors.
        """
        if self.plan.resident:
            self._sum_residents(device)
        elif self.groups.num_devices > 1:
            self._send_home(gradients, device)

    def advance_gradients(self) -> None:
        """Wait for the gradients in transfer and add them to the owners'; for resident replicas, one step.

        The caller uses a moment in which other compute has hidden the transfers.
        """
        with self.waiting():
            self.gradients.settle()
            if self.sums is not None:
                self.sums.advance()

    def finish_gradients(self) -> None:
        """Bring all remaining gradients to the owners and wait; every rank of the group must call it."""
        if self.sums is not None:
            with self.waiting():
                self.sums.finish()
        elif self.transfer is not None:
            layout = self.experts.layout()
            self.gradients.send_sums(
                [self.transfer], layout, self.experts.parameters, accumulation_dtype(layout.dtype)
            )
        self.gradients.send_rest()
        with self.waiting():
            self.gradients.settle()

    def _send_home(self, gradients: GradientsOfExperts, device: torch.device) -> None:
        num_micro_batches, layout = self.num_micro_batches, self.experts.layout()
        # One micro-batch's gradients travel in the data type of the weights, which is what a backward pass
        # computes.
        num_passes, dtype = 1, layout.dtype
        if num_micro_batches is not None and self.plan.life.sums_gradients(num_micro_batches):
            num_passes, dtype = num_micro_batches, accumulation_dtype(layout.dtype)
        self.gradients.accumulate(layout, gradients, dtype)
        if self.gradients.num_unsent >= num_passes:
            self.gradients.send_sums(self._parts_home(device), layout, self.experts.parameters, dtype)
        if num_micro_batches is None or self.groups.transfers is None:
            with self.waiting():
                self.gradients.settle()

    def _parts_home(self, device: torch.device) -> list[SparseTransfer]:
        later = self._part(self.plan.split.reduce) if self.splits else 0
        if not later:
            return [self.whole_transfer(device)]
        return [
            self._bind(self.plan.transfer, device, self.experts.layout().numel - later),
            self._bind(self.plan.transfer, device, later),
        ]

    def _sum_residents(self, device: torch.device) -> None:
        """All-reduce the gradients among the holders after the iteration's last backward pass."""
        if self.num_micro_batches is None:
            raise RuntimeError(
                f"{self.experts.what}: got a backward pass with resident replicas and an unknown number of "
                "passes in the iteration; call MoERuntime.begin_iteration(num_micro_batches) before it"
            )
        if self.sums is None:
            layout = self.experts.layout()
            transfer = self._bind(self.plan.transfer, device, dtype=accumulation_dtype(layout.dtype))
            self.sums = ResidentGradients(transfer, layout, self.experts.all_parameters)
        self.num_passes += 1
        if self.num_passes == self.num_micro_batches and self.groups.transfers is not None:
            self.sums.reduce()

    def _part(self, share: float) -> int:
        """Number of elements in a share of an expert; at least one element is left for the other part."""
        numel = self.experts.layout().numel
        return min(round(share * numel), numel - 1)

    def _bind(
        self,
        plan: TransferPlan,
        device: torch.device,
        num_elements: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> SparseTransfer:
        layout = self.experts.layout()
        return SparseTransfer(
            self.groups.transfers or self.groups.expert_parallel,
            plan,
            num_elements=layout.numel if num_elements is None else num_elements,
            dtype=dtype or layout.dtype,
            device=device,
            messages=message_rule(on_cuda=device.type == "cuda"),
            one_queue=self.groups.one_queue,
            journal=self.journal,
            what=self.experts.what,
        )
