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
    digest: bytes  # of the plan
    slots: SlotTable  # which expert is in which slot
    parameters_U: Sequence[ExpertParameters | None]  # of each slot of this device; None for an empty slot
    replicas_U: Sequence[int]  # slots of this device without owned experts
    # None if slots are Megatron's own local experts, so that nothing has to be remapped.
    shares: Shares | None
    transfers: ReplicaTransfers | None  # None without replicas, or with resident ones
    is_late: bool = False  # Gradients of owned experts can be incomplete after their backward pass.
    ends_at_dispatch: bool = False  # They leave, or are computed, after the backward pass of the dispatch.
    is_shared: bool = True  # All passes of an iteration use it. Otherwise it belongs to one micro-batch.
    counts_DE: np.ndarray | None = None  # of this micro-batch, int64
    splits: KnownSplits | None = None  # of this micro-batch
    is_recomputed: bool = False  # The forward pass runs in a backward pass.
    has_backward: bool = False  # A backward pass follows the last forward pass.
    is_over: bool = False  # The gradients of a micro-batch's pass are complete.
    is_dropped: bool = False  # The loop has set gradients to zero since.

    def __post_init__(self) -> None:
        # Attributes, because every forward pass asks for them.
        self.num_slots = self.slots.num_slots
        # Whether replicas have gradients that belong to their owners.
        self.has_gradients = self.transfers is not None or self.plan.resident
        # Whether their sums over the passes of the iteration travel together.
        self.sums_passes = self.has_gradients and self.is_shared and not self.plan.rematerialize

    def remap(
        self, routing_map: torch.Tensor, probs: torch.Tensor, counts_W: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """:meth:`Shares.remap`, or the same map and probabilities where slots are Megatron's experts."""
        if self.shares is not None:
            return self.shares.remap(routing_map, probs, counts_W)
        if counts_W is not None:
            counts_W.add_(routing_map.sum(0))
        return routing_map, probs


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

    def for_iteration(self, plan: LayerPlan, *, is_kept: bool = True) -> SlotPass:
        """The pass for all micro-batches of an iteration; if it is not kept, what iterations keep stays."""
        local = self._local
        self._make_room(plan)
        room = self._room_for(plan)
        key = self._num_replica_slots, local.experts, local.groups, local.messages, room
        # Plans often stay from one iteration to the next. The table of what is kept changes with the plan.
        if is_kept and self._last_made is not None and self._last_made[1] == key:
            last = self._last_made[0]
            if last.plan is plan or last.digest == plan.digest():
                return last
        made = self._make(plan, None, room, is_kept=is_kept)
        if is_kept:
            self._last_made = made, key
        return made

    def for_micro_batch(self, plan: LayerPlan, counts_DE: np.ndarray) -> SlotPass:
        """The pass for one micro-batch, whose counts are int64 ``[D, E]``."""
        self._make_room(plan)
        return self._make(plan, counts_DE, is_shared=False)

    def give_back(self, own: SlotPass) -> None:
        """Take back the replica slots of a pass of one micro-batch, and the memory of their contents."""
        if own.transfers is not None:
            own.transfers.drop()
            self._spare_slots.append(own.transfers.slots)

    @torch.inference_mode(False)  # An evaluation may make tensors that training uses later.
    def _make(
        self,
        plan: LayerPlan,
        counts_DE: np.ndarray | None,
        room: SlotRoom | None = None,
        *,
        is_shared: bool = True,
        is_kept: bool = False,
    ) -> SlotPass:
        local, experts, transfers = self._local, self._local.experts, None
        slots = SlotTable.of(plan.placement, self._num_replica_slots, self._slot_multiple)
        expert_U, parameters = slots.expert_DU[local.groups.device].tolist(), experts.all_parameters
        replicas_U = [u for u, e in enumerate(expert_U) if e >= 0 and e not in experts.parameters]
        if len(plan.transfer.table) and not plan.resident:
            replicas = self._take_slots(is_shared, room)
            sums = experts.layout().dtype if plan.sums_one_pass else None
            replicas.hold([expert_U[u] for u in replicas_U], sums)
            parameters = {**{e: replicas.parameters(e) for e in replicas.experts}, **parameters}
            transfers = ReplicaTransfers(plan, replicas, experts, local.bind, local.timer.waiting)
        parameters_U = [None if expert < 0 else parameters[expert] for expert in expert_U]
        made = SlotPass(
            plan, plan.digest(), slots, parameters_U, replicas_U, None, transfers, is_shared=is_shared
        )
        if not is_shared:
            made.counts_DE = counts_DE
        if made.counts_DE is not None and local.groups.expert_tensor_parallel is None:
            self._share_out_exactly(made, made.counts_DE)
        else:
            made.shares = self._shares(plan, slots, is_kept)
        return made

    def _share_out_exactly(self, made: SlotPass, counts_DE: np.ndarray) -> None:
        here, topology, slots = self._local.groups.device, self._local.context.topology, made.slots
        tokens = made.plan.whole_tokens(counts_DE, topology, here)
        made.splits = KnownSplits.of(tokens, slots.expert_DU[here])
        if not slots.are_experts:
            made.shares = Shares.by_intervals(tokens.sent_ED, slots, self._device)

    def _shares(self, plan: LayerPlan, slots: SlotTable, is_kept: bool) -> Shares | None:
        topology, here, placement = self._local.context.topology, self._local.groups.device, plan.placement
        # Peers of expert tensor parallelism have parts of a quota's tokens, which exact shares level as well.
        if (plan.dispatch_policy == "exact" or plan.tokens_ED is not None) and placement.num_replicas:
            gather = partial(gather_counts, group=self._local.groups.expert_parallel)
            return Shares.exact(slots, placement, topology, here, self._device, gather)
        if slots.are_experts:
            return None
        if plan.dispatch_policy == "owner":
            table_JE = owner_table(slots, placement, here)
        else:
            table_JE = even_table(slots, placement, topology, here)
        return Shares.by_table(table_JE, slots, partial(self._on_device, is_kept=is_kept))

    @property
    def _device(self) -> torch.device:
        return self._local.experts.device

    def _on_device(self, host: torch.Tensor, is_kept: bool) -> torch.Tensor:
        """A share table on the device. Passes with as many slots have the same tensor, for CUDA graphs."""
        if not is_kept:
            return sent_to(host, self._device)
        if self._table is None or self._table.shape != host.shape:
            self._table = torch.empty_like(host, device=self._device)
        is_pinned = self._device.type == "cuda"
        return self._table.copy_(host.pin_memory() if is_pinned else host, non_blocking=True)

    def _make_room(self, plan: LayerPlan) -> None:
        # Twice as many each time, so that this happens rarely.
        if (num_replicas := int(plan.placement.replicas_per_device_D.max())) > self._num_replica_slots:
            twice = 1 << (num_replicas - 1).bit_length()
            self._num_replica_slots = min(
                twice, max(num_replicas, self._local.strategy.slots(self._local.context))
            )

    def _room_for(self, plan: LayerPlan) -> SlotRoom | None:
        """Slots of the node for a plan whose replicas live for a pass, so that one layer needs them."""
        node = self._local.groups.node
        if node is None or plan.is_split or not (plan.rematerialize and len(plan.transfer.table)):
            return None
        with torch.inference_mode(False):
            return node.room(self._local.experts.layout(), self._num_replica_slots, self._device)

    def _take_slots(self, is_shared: bool, room: SlotRoom | None) -> ReplicaSlots:
        known = self._shared_slots.get(room is not None) if is_shared else None
        if self._spare_slots and not is_shared:
            return self._spare_slots.pop()
        if known is None or known.room is not room:
            known = ReplicaSlots(self._local.experts.layout(), self._device, room)
        if is_shared:
            self._shared_slots[room is not None] = known
        return known
