"""Puts the experts of a plan into slots: the passes of one layer.

Shape letters: D devices, E experts, U slots of a device, J rows of a share table.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import torch

from megatron_fssdp.collectives.sparse.sparse_transfer import SparseTransfer, StartedTransfer
from megatron_fssdp.planning.slots.slot_table import SlotTable
from megatron_fssdp.planning.transfer.message_size import message_rule
from megatron_fssdp.planning.transfer.transfer_plan import TransferPlan
from megatron_fssdp.runtime.experts.local_experts import LocalExperts
from megatron_fssdp.runtime.layers.expert_groups import ExpertGroups
from megatron_fssdp.runtime.layers.slot_pass import SlotPass, is_plain, source_table
from megatron_fssdp.runtime.slots.exact_shares import Holders
from megatron_fssdp.runtime.slots.remap import by_number
from megatron_fssdp.runtime.slots.replica_slots import ReplicaSlots
from megatron_fssdp.runtime.slots.replica_transfers import ReplicaTransfers
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan


class PassMaker:
    """Makes the passes of one layer, and keeps its replica slots.

    Passes of an iteration share one set of replica slots. A pass of a single micro-batch takes a set of its
    own, so that several micro-batches can be in flight, and gives it back.

    Args:
        groups: Process groups of the layer.
        waiting: Function that returns a context manager, which is entered around waits for transfers.
        journal: List to which every started transfer is appended; ``None`` without measurement. On CUDA, the
            host must wait for a transfer's times, so they are read only for reports.
        num_replica_slots: Replica slots that exist from the start.
        slot_multiple: Number of which the slots of a device are a multiple.
    """

    def __init__(
        self,
        groups: ExpertGroups,
        waiting: Callable[[], AbstractContextManager[object]],
        journal: list[StartedTransfer] | None,
        num_replica_slots: int,
        slot_multiple: int,
    ) -> None:
        self._groups, self._waiting, self._journal = groups, waiting, journal
        self._num_replica_slots, self._slot_multiple = num_replica_slots, slot_multiple
        self._shared_slots: ReplicaSlots | None = None
        self._spare_slots: list[ReplicaSlots] = []
        self._table: torch.Tensor | None = None

    @torch.inference_mode(False)  # An evaluation may make tensors that training uses later.
    def make(
        self,
        plan: LayerPlan,
        context: LayerContext,
        experts: LocalExperts,
        *,
        most_slots: int,
        counts_DE: np.ndarray | None,
        is_shared: bool,
        may_split: bool = False,
    ) -> SlotPass:
        """Put a plan's experts into slots.

        Args:
            plan: The plan.
            context: Data of the layer.
            experts: Experts that have Parameters on this rank.
            most_slots: Most replica slots that the strategy uses.
            counts_DE: Counts for which tokens are shared out, if the plan's dispatch depends on counts; ``[D,
            E]``.
            is_shared: Whether all passes of an iteration use it.
            may_split: Whether parts of the transfers may travel beside the experts of the layer before.
        """
        placement, here = plan.placement, self._groups.device
        self._make_room(int(placement.replicas_per_device_D.max()), most_slots)
        slots = SlotTable.of(placement, self._num_replica_slots, self._slot_multiple)
        expert_U = slots.expert_DU[here].tolist()
        found = experts.all_parameters
        transfers = None
        if plan.transfer.edges and not plan.resident:
            replicas = self._take_slots(experts, is_shared)
            replicas.hold([expert for expert in expert_U if expert >= 0 and expert not in experts.parameters])
            found = {**{expert: replicas.parameters(expert) for expert in replicas.experts}, **found}
            transfers = ReplicaTransfers(
                plan,
                replicas,
                experts,
                lambda part, num_elements: self.bind(part, experts, num_elements, replicas.layout.dtype),
                splits=may_split and plan.is_split,
                waiting=self._waiting,
            )
        table, holders = None, None
        if plan.dispatch_policy == "exact" and placement.num_replicas:
            node_D = torch.from_numpy(context.topology.node_of_device_D.copy())
            slot_ED = torch.from_numpy(slots.slot_ED.copy())
            holders = Holders.of(_sent(slot_ED, experts.device), _sent(node_D, experts.device), here)
        elif not is_plain(slots):
            table_JE = source_table(plan, slots, context.topology, here, counts_DE)
            table = self._on_device(by_number(table_JE), experts.device, is_shared)
        parameters_U = [None if expert < 0 else found[expert] for expert in expert_U]
        of = None if is_shared else counts_DE
        return SlotPass(plan, slots, parameters_U, table, holders, transfers, is_shared, of)

    def give_back(self, own: SlotPass) -> None:
        """Take back the replica slots of a pass of one micro-batch, and the memory of their contents."""
        if own.transfers is not None:
            own.transfers.drop()
            self._spare_slots.append(own.transfers.slots)

    def bind(
        self,
        plan: TransferPlan,
        experts: LocalExperts,
        num_elements: int,
        dtype: torch.dtype,
    ) -> SparseTransfer:
        """Bind a transfer plan to the layer's process group.

        Args:
            plan: Edges along which experts travel.
            experts: Experts that have Parameters on this rank.
            num_elements: Elements of each expert that travel.
            dtype: Data type of gathered tensors.
        """
        device = experts.device
        return SparseTransfer(
            self._groups.transfers or self._groups.expert_parallel,
            plan,
            num_elements=num_elements,
            dtype=dtype,
            device=device,
            messages=message_rule(on_cuda=device.type == "cuda"),
            one_queue=self._groups.one_queue,
            journal=self._journal,
            what=experts.what,
        )

    def _take_slots(self, experts: LocalExperts, is_shared: bool) -> ReplicaSlots:
        if not is_shared and self._spare_slots:
            return self._spare_slots.pop()
        if is_shared and self._shared_slots is not None:
            return self._shared_slots
        made = ReplicaSlots(experts.layout(), experts.device)
        if is_shared:
            self._shared_slots = made
        return made

    def _make_room(self, num_replicas: int, most_slots: int) -> None:
        """Add replica slots if a plan needs more: twice as many each time, so that this happens rarely."""
        if num_replicas > self._num_replica_slots:
            twice = 1 << (num_replicas - 1).bit_length()
            self._num_replica_slots = min(twice, max(num_replicas, most_slots))

    def _on_device(self, host: torch.Tensor, device: torch.device, is_shared: bool) -> torch.Tensor:
        """A share table on the device. Shared passes always have the same tensor, for CUDA graphs."""
        if not is_shared:
            return _sent(host, device)
        if self._table is None:
            self._table = torch.empty_like(host, device=device)
        return self._table.copy_(host.pin_memory() if device.type == "cuda" else host, non_blocking=True)


def _sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on the device, for which the host does not wait."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
