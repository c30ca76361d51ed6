"""The plans of one MoE layer, and the passes that they become: which expert is in which slot.

Shape letters: T tokens, D devices, E experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from megatron_fssdp.collectives.gathered_counts import start_counts
from megatron_fssdp.collectives.plan_agreement import check_agreement
from megatron_fssdp.collectives.sparse.sparse_transfer import SparseTransfer
from megatron_fssdp.collectives.trace_names import traced
from megatron_fssdp.collectives.transfer_lanes import TransferTimer
from megatron_fssdp.planning.dispatch.whole_tokens import KnownSplits, whole_tokens
from megatron_fssdp.planning.loads import LoadHistory
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.slot_tables import SlotTable
from megatron_fssdp.planning.transfer.message_size import MessageRule, message_rule
from megatron_fssdp.planning.transfer.transfer_plan import TransferPlan, additional_transfer
from megatron_fssdp.runtime.clocks.pass_timer import PassTimer
from megatron_fssdp.runtime.experts.expert_layout import ExpertLayout, LocalExperts, ParametersByExpert
from megatron_fssdp.runtime.layers.expert_groups import ExpertGroups
from megatron_fssdp.runtime.layers.shared_plans import SharedPlans, unpacked
from megatron_fssdp.runtime.layers.slot_pass import SlotPass, source_table
from megatron_fssdp.runtime.slots.node_slots import SlotRoom
from megatron_fssdp.runtime.slots.remap.reference import sent_to
from megatron_fssdp.runtime.slots.remap.shares import ExactShares, Intervals, ShareTable
from megatron_fssdp.runtime.slots.replica_slots import ReplicaSlots
from megatron_fssdp.runtime.slots.replica_transfers import ReplicaTransfers
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.layer_planning import plan_after_gate, plan_before_gate
from megatron_fssdp.strategies.strategy import Strategy


@dataclass
class IterationClock:
    """State of the running iteration, shared by all layers of a model.

    It is ``driven`` in an iteration and in an evaluation. Other passes compute with owners alone.
    """

    driven: bool = False
    trains: bool = False  # Passes are counted; false in an evaluation, also inside of an iteration.
    num_micro_batches: int = 0  # announced so far; a hint, 0 if nobody announced any
    iteration: int | None = None  # number in the loop's log, for messages


class PlannedLayer:
    """Asks the strategy for the plans of a layer, and puts their experts into slots.

    Passes of an iteration share one set of replica slots. A pass of a single micro-batch takes a set of its
    own, so that several micro-batches can be in flight, and gives it back.

    All layers of a model share the clock and the timer. A rank with ``measure`` keeps the device loads, bytes
    and times that reports show; on CUDA, its host must wait for the times of transfers. ``check_plans``
    compares the plans of all ranks before they are used. ``least_slots`` replica slots exist from the start,
    and further ones are added when a plan needs them. The slots of a device are a multiple of
    ``slot_multiple``; empty slots are added.
    """

    def __init__(
        self,
        context: LayerContext,
        groups: ExpertGroups,
        experts: LocalExperts,
        strategy: Strategy,
        clock: IterationClock | None = None,
        *,
        timer: PassTimer | None = None,
        measure: bool = False,
        check_plans: bool = False,
        least_slots: int = 0,
        slot_multiple: int = 1,
    ) -> None:
        self.context, self.groups, self.experts, self.strategy = context, groups, experts, strategy
        self.clock, self.timer = clock or IterationClock(), timer or PassTimer()
        self.measure, self._checks_plans = measure, check_plans
        self.history = LoadHistory(strategy.window, context.num_devices, context.num_experts)
        self.journal: list[TransferTimer] = []  # of the running iteration
        self.is_first = True  # The model chunk has no MoE layer before this one.
        self.together: SharedPlans | None = None  # None if each rank plans the layer alone
        self.waiting = self.timer.waiting
        self._num_replica_slots, self._slot_multiple = least_slots, slot_multiple
        self.shared: SlotPass | None = None  # The pass of the iteration, once it is planned.
        self._ready: LayerPlan | None = None
        self._received: tuple[bytes, LayerContext, LayerPlan] | None = None
        self._last_made: tuple[object, SlotPass] | None = None
        self._shared_slots: dict[bool, ReplicaSlots] = {}  # in a room, or not
        self._spare_slots: list[ReplicaSlots] = []
        self._table: torch.Tensor | None = None
        strategy.check(context)
        experts.layout()  # Refuses experts of several shapes.

    @property
    def plan(self) -> LayerPlan | None:
        """Plan of the running iteration, as far as it is made."""
        return None if self.shared is None else self.shared.plan

    @property
    def _transfers(self) -> ReplicaTransfers | None:
        return None if self.shared is None else self.shared.transfers

    def _await_parameters(self) -> None:
        # Ranks with copies of the same experts gather them together, and their plans differ. So this place
        # must not depend on a plan.
        if self.groups.transfers is not None:
            self.experts.await_parameters()

    # Changes between iterations.

    def own(self, owner_E: np.ndarray, parameters: ParametersByExpert, layout: ExpertLayout) -> None:
        """Set new owners, int64 ``[E]``, without resident replicas; only between iterations.

        A rank that owns no expert, and thus has no ``parameters``, needs the layout.
        """
        experts = replace(self.experts, parameters=parameters, residents={}, told_layout=layout)
        self._own(replace(self.context, owner_E=owner_E, resident=None), experts)

    def keep(self, placement: ExpertPlacement, residents: ParametersByExpert) -> None:
        """Set new resident replicas, by Parameters with the owners' contents; only between iterations."""
        context = replace(self.context, resident=placement)
        self._own(context, replace(self.experts, residents=residents))

    def _own(self, context: LayerContext, experts: LocalExperts) -> None:
        self._drop()
        self.context, self.experts = context, experts

    def _drop(self) -> None:
        self.shared = self._ready = None

    # Plans.

    @property
    def lacks_plan(self) -> bool:
        """Whether the running iteration has loads to plan the layer by, and no plan."""
        return self.shared is None and self._ready is None and not self.history.is_empty

    def plan_alone(self) -> LayerPlan:
        """What the strategy of this rank plans."""
        return plan_before_gate(self.strategy, self.context, self.history)

    def take_plan(self, message: bytes) -> None:
        """Take the plan that :class:`SharedPlans` got from a rank for the running iteration."""
        known = self._received
        # Plans often stay from one iteration to the next.
        if known is None or known[0] != message or known[1] is not self.context:
            known = self._received = message, self.context, unpacked(message, self.context)
        self._ready = known[2]

    @traced("plan")
    def _next_plan(self) -> LayerPlan:
        if self.together is not None and self.lacks_plan:
            self.together.make(self)
        plan, self._ready = self._ready, None
        if plan is None:
            plan = self.plan_alone()
        self._compare(plan)
        return plan

    def _plan_after_gate(self, counts_DE: np.ndarray, plan: LayerPlan, num_micro_batches: int) -> LayerPlan:
        new = plan_after_gate(self.strategy, self.context, counts_DE, plan, num_micro_batches)
        if new is not plan:
            self._compare(new)
        return new

    def _compare(self, plan: LayerPlan) -> None:
        if not self._checks_plans:
            return
        what = f"the plan of layer {self.context.layer}"
        if self.clock.iteration is not None:
            what += f" in iteration {self.clock.iteration}"
        for group in (self.groups.expert_parallel, self.groups.expert_tensor_parallel):
            if group is not None:
                check_agreement(plan.digest(), group, what)

    def _correct(self, routing_map: torch.Tensor) -> None:
        """Let the strategy change the replicas with the first micro-batch's exact counts (Hecate §4.2)."""
        before = self.shared
        assert before is not None
        counts_DE = self._host_counts(routing_map)
        plan = self._plan_after_gate(counts_DE, before.plan, max(self.clock.num_micro_batches, 1))
        if plan is before.plan:
            return
        is_gathered = before.transfers is not None and before.transfers.is_gathered
        if before.transfers is not None and is_gathered:
            before.transfers.await_weights()
        self.shared = self._make(plan, counts_DE)
        is_new = self.shared is not before
        if is_gathered and is_new and not plan.rematerialize and self.shared.transfers is not None:
            placements = before.plan.placement, plan.placement
            self.shared.transfers.add(additional_transfer(*placements, self.context.topology))

    def _host_counts(self, routing_map: torch.Tensor) -> np.ndarray:
        """Counts of this micro-batch on all devices, int64 ``[D, E]``; the host waits for them."""
        groups = self.groups
        counts = start_counts(routing_map.sum(0), groups.expert_parallel, groups.expert_tensor_parallel)
        counts_DE: np.ndarray = counts.wait().numpy().sum(axis=0)
        return counts_DE

    # Passes.

    @torch.inference_mode(False)  # An evaluation may make tensors that training uses later.
    def _make(
        self,
        plan: LayerPlan,
        counts_DE: np.ndarray | None = None,
        *,
        is_shared: bool = True,
        is_outside: bool = False,
    ) -> SlotPass:
        """Put a plan's experts into slots, for an iteration (``is_shared``) or for one micro-batch.

        A pass ``is_outside`` of iterations leaves what they keep as it is.

        If the plan's dispatch depends on counts, tokens are shared out by ``counts_DE``, or by a forecast.
        """
        self._make_room(int(plan.placement.replicas_per_device_D.max()))
        # Plans often stay from one iteration to the next.
        digest, room = plan.digest(), self._room_for(plan) if is_shared else None
        key = (
            digest,
            self._num_replica_slots,
            self.experts,
            self.groups,
            self.is_first,
            self._messages,
            room,
        )
        if is_shared and not plan.needs_counts and self._last_made is not None and self._last_made[0] == key:
            return self._last_made[1]
        is_kept = is_shared and not is_outside
        if counts_DE is None and plan.needs_counts and not self.history.is_empty:
            counts_DE = np.rint(self.history.forecast_DE()).astype(np.int64)
        slots = SlotTable.of(plan.placement, self._num_replica_slots, self._slot_multiple)
        here, experts = self.groups.device, self.experts
        expert_U, found = slots.expert_DU[here].tolist(), experts.all_parameters
        transfers = None
        if len(plan.transfer.table) and not plan.resident:
            replicas = self._take_slots(is_shared, room)
            held = [expert for expert in expert_U if expert >= 0 and expert not in experts.parameters]
            replicas.hold(held, experts.layout().dtype if plan.sums_one_pass else None)
            found = {**{expert: replicas.parameters(expert) for expert in replicas.experts}, **found}
            splits = plan.is_split and not self.is_first
            transfers = ReplicaTransfers(
                plan, replicas, experts, self.bind, splits=splits, waiting=self.waiting
            )
        topology = self.context.topology
        shares: ExactShares | Intervals | ShareTable | None = None
        known_splits = None
        is_remapped = not np.array_equal(slots.expert_DU.reshape(-1), np.arange(slots.num_slots))
        if not is_shared and counts_DE is not None and self.groups.expert_tensor_parallel is None:
            quotas_ED = plan.dispatch(counts_DE, topology).whole_tokens_ED
            tokens = whole_tokens(counts_DE, quotas_ED, topology, here)
            known_splits = KnownSplits.of(tokens, slots.expert_DU[here])
            if is_remapped:
                shares = Intervals.of(tokens.sent_ED, slots, experts.device)
        elif plan.dispatch_policy == "exact" and plan.placement.num_replicas:
            shares = ExactShares.of(slots, topology, here, experts.device)
        elif is_remapped:
            table_JE = source_table(plan, slots, topology, here, counts_DE)
            numbers = self._on_device(ShareTable.packed(table_JE, slots), is_kept)
            shares = ShareTable(numbers, slots.num_slots, slots.num_experts)
        parameters_U = [None if expert < 0 else found[expert] for expert in expert_U]
        of = None if is_shared else counts_DE
        made = SlotPass(plan, digest, slots, parameters_U, shares, transfers, is_shared, of, known_splits)
        if is_kept:
            self._last_made = key, made
        return made

    def give_back(self, own: SlotPass) -> None:
        """Take back the replica slots of a pass of one micro-batch, and the memory of their contents."""
        if own.transfers is not None:
            own.transfers.drop()
            self._spare_slots.append(own.transfers.slots)

    @property
    def _messages(self) -> MessageRule:
        # Equal on all ranks: they get a profile between the same iterations.
        profile = self.context.profile
        return profile.messages if profile else message_rule(on_cuda=self.experts.device.type == "cuda")

    def bind(
        self, plan: TransferPlan, sizes: Sequence[int], dtype: torch.dtype, elements: range | None = None
    ) -> SparseTransfer:
        """Bind a transfer plan, for experts of tensors of these sizes, to the layer's process group."""
        return SparseTransfer(
            self.groups.transfers or self.groups.expert_parallel,
            plan,
            sizes=sizes,
            elements=elements,
            dtype=dtype,
            device=self.experts.device,
            messages=self._messages,
            is_far=plan.crosses_nodes(self.context.topology),
            one_queue=self.groups.one_queue,
            journal=self.journal if self.measure else None,
            what=self.experts.what,
        )

    def _room_for(self, plan: LayerPlan) -> SlotRoom | None:
        """Slots of the node for a plan whose replicas live for a pass, so that one layer needs them."""
        node = self.groups.node
        if node is None or plan.is_split or not (plan.rematerialize and len(plan.transfer.table)):
            return None
        return node.room(self.experts.layout(), self._num_replica_slots, self.experts.device)

    def _take_slots(self, is_shared: bool, room: SlotRoom | None) -> ReplicaSlots:
        if not is_shared:
            known = self._spare_slots.pop() if self._spare_slots else None
        elif (known := self._shared_slots.get(room is not None)) is not None and known.room is not room:
            known = None
        made = known or ReplicaSlots(self.experts.layout(), self.experts.device, room)
        if is_shared:
            self._shared_slots[room is not None] = made
        return made

    def _make_room(self, num_replicas: int) -> None:
        """Add replica slots if a plan needs more: twice as many each time, so that this happens rarely."""
        if num_replicas > self._num_replica_slots:
            twice = 1 << (num_replicas - 1).bit_length()
            self._num_replica_slots = min(twice, max(num_replicas, self.strategy.slots(self.context)))

    def _on_device(self, host: torch.Tensor, is_kept: bool) -> torch.Tensor:
        """A share table on the device. Passes with as many slots have the same tensor, for CUDA graphs."""
        device = self.experts.device
        if not is_kept:
            return sent_to(host, device)
        if self._table is None or self._table.shape != host.shape:
            self._table = torch.empty_like(host, device=device)
        return self._table.copy_(host.pin_memory() if device.type == "cuda" else host, non_blocking=True)
