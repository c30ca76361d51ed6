"""Plans in use: which expert is in which slot, the remap of the routing, and the replicas' transfers.

Shape letters: D devices, E experts, U slots of a device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from megatron_fssdp.collectives.gathered_counts import gather_counts
from megatron_fssdp.planning.dispatch.whole_tokens import KnownSplits
from megatron_fssdp.planning.slot_tables import SlotTable, even_table, owner_table
from megatron_fssdp.runtime.experts.expert_layout import ExpertParameters
from megatron_fssdp.runtime.layers.local_layer import LocalLayer
from megatron_fssdp.runtime.slots.node_slots import SlotRoom
from megatron_fssdp.runtime.slots.remap.reference import sent_to
from megatron_fssdp.runtime.slots.remap.shares import Shares
from megatron_fssdp.runtime.slots.replica_slots import ReplicaSlots
from megatron_fssdp.runtime.slots.replica_transfers import ReplicaTransfers
from megatron_fssdp.strategies.layer_plan import LayerPlan


@dataclass(eq=False)
class SlotPass:
    """What the forward passes under one plan share, and their backward passes with them."""

    plan: LayerPlan
    slots: SlotTable  # which expert is in which slot
    parameters_U: Sequence[ExpertParameters | None]  # of each slot of this device; None for an empty slot
    replicas_U: Sequence[int]  # slots of this device without owned experts
    # None if slots are Megatron's own local experts, so that nothing has to be remapped.
    shares: Shares | None
    transfers: ReplicaTransfers | None  # None without replicas, or with resident ones
    # Of the micro-batch to which it belongs, int64; None if all passes of an iteration use it.
    counts_DE: np.ndarray | None = None
    splits: KnownSplits | None = None  # of this micro-batch
    is_late: bool = False  # Gradients of owned experts can be incomplete after their backward pass.
    ends_at_dispatch: bool = False  # Gradients leave, or are computed, after its backward pass.
    is_recomputed: bool = False  # The forward pass runs in a backward pass.
    is_over: bool = False  # The gradients of a micro-batch's pass are complete.
    is_dropped: bool = False  # The loop has set gradients to zero since.

    def __post_init__(self) -> None:
        # Attributes, because every forward pass asks for them.
        self.num_slots, self.is_shared = self.slots.num_slots, self.counts_DE is None
        self.digest = self.plan.digest()
        # Whether replicas have gradients that belong to their owners.
        self.has_gradients = self.transfers is not None or self.plan.resident
        # Whether their sums over the passes of the iteration travel together.
        self.sums_passes = self.has_gradients and self.is_shared and not self.plan.rematerialize


class PassBinder:
    """Makes the passes of plans.

    Passes of an iteration share one set of replica slots. A pass of a single micro-batch takes a set of its
    own, so that several micro-batches can be in flight, and gives it back. ``least_slots`` replica slots
    exist from the start, and further ones are added when a plan needs them. The slots of a device are a
    multiple of ``slot_multiple``; empty slots are added.
    """

    def __init__(self, local: LocalLayer, least_slots: int, slot_multiple: int) -> None:
        self._local = local
        self._num_replica_slots, self._slot_multiple = least_slots, slot_multiple
        self._last_made: tuple[SlotPass, object] | None = None  # of an iteration, and what else it is of
        self._shared_slots: dict[bool, ReplicaSlots] = {}  # in a room, or not
        self._spare_slots: list[ReplicaSlots] = []
        self._table: torch.Tensor | None = None

    def for_iteration(self, plan: LayerPlan) -> SlotPass:
        """The pass for all micro-batches of an iteration."""
        local = self._local
        self._make_room(plan)
        room = self._room_for(plan)
        key = self._num_replica_slots, local.experts, local.groups, local.messages, room
        # Plans often stay from one iteration to the next. The table that is kept changes with the plan.
        if self._last_made is not None and self._last_made[1] == key:
            last = self._last_made[0]
            if last.plan is plan or last.digest == plan.digest():
                return last
        self._last_made = self._make(plan, None, room), key
        return self._last_made[0]

    def for_micro_batch(self, plan: LayerPlan, counts_DE: np.ndarray) -> SlotPass:
        """The pass for one micro-batch, whose counts are int64 ``[D, E]``."""
        self._make_room(plan)
        return self._make(plan, counts_DE, None)

    def give_back(self, own: SlotPass) -> None:
        """Take back the replica slots of a pass of one micro-batch, and the memory of their contents."""
        if own.transfers is not None:
            own.transfers.drop()
            self._spare_slots.append(own.transfers.slots)

    @torch.inference_mode(False)  # An evaluation may make tensors that training uses later.
    def _make(self, plan: LayerPlan, counts_DE: np.ndarray | None, room: SlotRoom | None) -> SlotPass:
        local, experts, transfers = self._local, self._local.experts, None
        slots = SlotTable.of(plan.placement, self._num_replica_slots, self._slot_multiple)
        expert_U, parameters = slots.expert_DU[local.groups.device].tolist(), experts.all_parameters
        replicas_U = [u for u, e in enumerate(expert_U) if e >= 0 and e not in experts.parameters]
        if len(plan.transfer.table) and not plan.resident:
            replicas = self._take_slots(counts_DE is None, room)
            sums = experts.layout().dtype if plan.sums_one_pass else None
            replicas.hold([expert_U[u] for u in replicas_U], sums)
            parameters = {**{e: replicas.parameters(e) for e in replicas.experts}, **parameters}
            transfers = ReplicaTransfers(plan, replicas, experts, local.bind, local.timer.waiting)
        parameters_U = [None if expert < 0 else parameters[expert] for expert in expert_U]
        shares, splits = self._shares(plan, slots, counts_DE)
        return SlotPass(plan, slots, parameters_U, replicas_U, shares, transfers, counts_DE, splits)

    def _shares(
        self, plan: LayerPlan, slots: SlotTable, counts_DE: np.ndarray | None
    ) -> tuple[Shares | None, KnownSplits | None]:
        """Where tokens go, and the rows of the dispatch if the host knows them."""
        local, placement, device = self._local, plan.placement, self._local.experts.device
        topology, here = local.context.topology, local.groups.device
        if counts_DE is not None and local.groups.expert_tensor_parallel is None:
            tokens = plan.whole_tokens(counts_DE, topology, here)
            splits = KnownSplits.of(tokens, slots.expert_DU[here])
            if slots.are_experts:
                return None, splits
            return Shares.by_intervals(tokens.sent_ED, slots, device), splits
        # Peers of expert tensor parallelism have parts of a quota's tokens, which exact shares level as well.
        if (plan.dispatch_policy == "exact" or plan.tokens_ED is not None) and placement.num_replicas:
            gather = partial(gather_counts, group=local.groups.expert_parallel)
            return Shares.exact(slots, placement, topology, here, device, gather), None
        if slots.are_experts:
            return None, None
        if plan.dispatch_policy == "owner":
            table_JE = owner_table(slots, placement, here)
        else:
            table_JE = even_table(slots, placement, topology, here)
        send = self._keep if counts_DE is None else partial(sent_to, device=device)
        return Shares.by_table(table_JE, slots, send), None

    def _keep(self, host: torch.Tensor) -> torch.Tensor:
        """A share table on the device. Passes with as many slots have the same tensor, for CUDA graphs."""
        device = self._local.experts.device
        if self._table is None or self._table.shape != host.shape:
            self._table = torch.empty_like(host, device=device)
        return self._table.copy_(host.pin_memory() if device.type == "cuda" else host, non_blocking=True)

    def _make_room(self, plan: LayerPlan) -> None:
        # Twice as many each time, so that this happens rarely.
        if (num_replicas := int(plan.placement.replicas_per_device_D.max())) > self._num_replica_slots:
            twice = 1 << (num_replicas - 1).bit_length()
            self._num_replica_slots = min(
                twice, max(num_replicas, self._local.strategy.slots(self._local.context))
            )

    def _room_for(self, plan: LayerPlan) -> SlotRoom | None:
        """Slots of the node for a plan whose replicas live for a pass, so that one layer needs them."""
        node, experts = self._local.groups.node, self._local.experts
        if node is None or plan.is_split or not (plan.rematerialize and len(plan.transfer.table)):
            return None
        with torch.inference_mode(False):
            return node.room(experts.layout(), self._num_replica_slots, experts.device)

    def _take_slots(self, is_shared: bool, room: SlotRoom | None) -> ReplicaSlots:
        if self._spare_slots and not is_shared:
            return self._spare_slots.pop()
        known, experts = self._shared_slots.get(room is not None) if is_shared else None, self._local.experts
        if known is None or known.room is not room:
            known = ReplicaSlots(experts.layout(), experts.device, room)
        if is_shared:
            self._shared_slots[room is not None] = known
        return known
