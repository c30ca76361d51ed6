"""One layer's running iteration: the plan in force, and its replicas' weights and gradients."""

from dataclasses import dataclass, field, replace

import torch

from megatron_fssdp.collectives.sparse.sparse_transfer import SparseTransfer, StartedTransfer
from megatron_fssdp.collectives.sparse.transfer_cargo import accumulation_dtype
from megatron_fssdp.planning.transfer.message_size import message_bytes
from megatron_fssdp.planning.transfer.transfer_plan import TransferPlan, additional_transfer
from megatron_fssdp.runtime.exchange.expert_groups import ExpertGroups
from megatron_fssdp.runtime.replicas.local_experts import LocalExperts
from megatron_fssdp.runtime.replicas.materialization import GradientsOfExperts
from megatron_fssdp.runtime.replicas.replica_gradients import ReplicaGradients
from megatron_fssdp.runtime.replicas.replica_weights import ReplicaWeights
from megatron_fssdp.runtime.replicas.resident_gradients import ResidentGradients
from megatron_fssdp.strategies.strategy import LayerPlan


@dataclass(eq=False)
class LayerIteration:
    """What a plan moves, from its making until the iteration ends.

    Attributes:
        plan: Frozen after the first micro-batch, so that a recomputed forward meets it again.
        experts: With Parameters on this rank.
        groups: Over which transfers go.
        num_micro_batches: Backward passes of the iteration; ``None`` if nobody says.
        may_split: Whether parts of a transfer may travel beside another layer's experts.
        journal: Takes the transfers that are started; ``None`` where nobody reads them.
        gradients: Of the replicas, on their way.
        is_final: Whether the exact counts of a micro-batch have been seen.
        transfer: All of the plan's replicas; bound to the process group at its first use.
        weights: Replicas kept for the whole iteration, if they are; perhaps only a part of them so far.
        num_passes: Number of backward passes through resident replicas.
        sums: Of the gradients of those, once there are any to be summed.
    """

    plan: LayerPlan
    experts: LocalExperts
    groups: ExpertGroups
    num_micro_batches: int | None = None
    may_split: bool = False
    journal: list[StartedTransfer] | None = None
    gradients: ReplicaGradients = field(default_factory=ReplicaGradients)
    is_final: bool = False
    transfer: SparseTransfer | None = field(init=False, default=None)
    weights: ReplicaWeights | None = field(init=False, default=None)
    num_passes: int = field(init=False, default=0)
    sums: ResidentGradients | None = field(init=False, default=None)

    def of_micro_batch(self, plan: LayerPlan) -> "LayerIteration":
        """One micro-batch with a plan of its own, whose gradients go the same way."""
        return replace(self, plan=plan, is_final=True)

    @property
    def splits(self) -> bool:
        """Whether transfers travel in parts; the same on all ranks."""
        return self.may_split and self.plan.is_split

    @property
    def is_home(self) -> bool:
        """Whether every gradient has reached its owner."""
        is_summed = self.sums is None or self.sums.is_finished
        return is_summed and not self.gradients.num_unsent and not self.gradients.in_flight

    def whole_transfer(self, device: torch.device) -> SparseTransfer:
        """Of all the plan's replicas."""
        if self.transfer is None:
            self.transfer = self._bind(self.plan.transfer, device)
        return self.transfer

    def start_weights(self, device: torch.device) -> ReplicaWeights:
        """Start to gather what is not here or on its way, and say what will be here."""
        if self.weights is not None:
            if missing := self.weights.num_missing:
                self.weights.start(self._bind(self.plan.transfer, device, missing))
            return self.weights
        if self.plan.resident:
            self.weights = ReplicaWeights.present(self.experts.layout(), self.experts.all_parameters)
            return self.weights
        weights = ReplicaWeights(self.experts.layout(), self.experts.parameters)
        weights.start(self.whole_transfer(device))
        if self.num_micro_batches is not None and not self.plan.rematerialize:
            self.weights = weights
        return weights

    def start_first_part(self, device: torch.device) -> None:
        """Start the part of SparseAllGather that runs beside the experts of the layer before."""
        if self.weights is None and self.splits and (part := self._part(self.plan.split.gather)):
            self.weights = ReplicaWeights(self.experts.layout(), self.experts.parameters)
            self.weights.start(self._bind(self.plan.transfer, device, part))

    def extend(self, plan: LayerPlan, weights: ReplicaWeights, device: torch.device) -> None:
        """Go on under a plan with more replicas, which are gathered as well.

        Args:
            plan: The present one, and more.
            weights: Those that are here or on their way.
            device: This rank's.
        """
        more = additional_transfer(self.plan.placement, plan.placement, self.groups.topology)
        weights.extend(self._bind(more, device))
        self.plan, self.transfer = plan, None

    def take_gradients(self, gradients: GradientsOfExperts, device: torch.device) -> None:
        """Send the gradients of one backward pass to the owners, or add them to sums that are sent later.

        Args:
            gradients: Gradients of the replicas on this device, by expert.
            device: This rank's device.
        """
        if self.plan.resident:
            self._sum_residents(device)
        elif self.groups.num_devices > 1:
            self._send_home(gradients, device)

    def advance_gradients(self) -> None:
        """Take in what has arrived; for a moment in which nothing else waits for it."""
        self.gradients.settle()
        if self.sums is not None:
            self.sums.advance()

    def finish_gradients(self) -> None:
        """Bring home what is still here or under way; every rank of the group has to."""
        if self.sums is not None:
            self.sums.finish()
        elif self.transfer is not None:
            self.gradients.send_sums([self.transfer], self.experts.layout(), self.experts.parameters)
        self.gradients.send_rest()
        self.gradients.settle()

    def _send_home(self, gradients: GradientsOfExperts, device: torch.device) -> None:
        num_micro_batches, layout = self.num_micro_batches, self.experts.layout()
        if num_micro_batches is not None and self.plan.life.sums_gradients(num_micro_batches):
            self.gradients.accumulate(layout, gradients)
            if self.gradients.num_unsent >= num_micro_batches:
                self.gradients.send_sums(self._parts_home(device), layout, self.experts.parameters)
        else:
            self.gradients.send(self._parts_home(device), layout, self.experts.parameters, gradients)
        if num_micro_batches is None or self.groups.transfers is None:
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
        """All-reduce gradients among holders after the iteration's last backward pass."""
        if self.num_micro_batches is None:
            raise RuntimeError(
                f"{self.experts.what}: got a backward pass with resident replicas and nobody who "
                "says how many passes an iteration has; call MoERuntime.begin_iteration(num_micro_batches)"
            )
        if self.sums is None:
            layout = self.experts.layout()
            transfer = self._bind(self.plan.transfer, device, dtype=accumulation_dtype(layout.dtype))
            self.sums = ResidentGradients(transfer, layout, self.experts.all_parameters)
        self.num_passes += 1
        if self.num_passes == self.num_micro_batches and self.groups.transfers is not None:
            self.sums.reduce()

    def _part(self, share: float) -> int:
        """Elements in a share of an expert; one at least is left over."""
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
            chunk_bytes=message_bytes(on_cuda=device.type == "cuda"),
            journal=self.journal,
            what=self.experts.what,
        )
