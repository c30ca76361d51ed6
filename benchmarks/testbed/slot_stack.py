"""The stack under a strategy: experts in slots, and the runtime called as by the Megatron adapter.

Shape letters: L layers.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.testbed.expert_moves import ExpertMoves
from benchmarks.testbed.layer_stack import IterationResult, LayerStack
from benchmarks.testbed.stack_inputs import Pace, StackSize
from megatron_fssdp.planning.cost.layer_profile import LayerProfile
from megatron_fssdp.planning.cost.link_seconds import transfer_traffic
from megatron_fssdp.planning.placement.placement import even_owners
from megatron_fssdp.planning.replica_life import ReplicaLife
from megatron_fssdp.runtime.experts.expert_layout import LocalExperts, ParametersByExpert
from megatron_fssdp.runtime.layers.expert_groups import ExpertGroups
from megatron_fssdp.runtime.layers.moe_runtime import MoERuntime
from megatron_fssdp.runtime.layers.pass_binder import SlotPass
from megatron_fssdp.runtime.layers.strategy_selector import select_strategies
from megatron_fssdp.strategies.auto.auto_strategy import selecting
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.strategy import Strategy


class SlotStack(LayerStack):
    """A stack whose experts a strategy places. Further arguments are those of :class:`LayerStack`."""

    def __init__(
        self,
        size: StackSize,
        groups: ExpertGroups,
        parameters: Sequence[ParametersByExpert],
        pace: Pace | None,
        *,
        strategy: Strategy,
        profile: LayerProfile,
    ) -> None:
        super().__init__(size, groups, parameters, pace)
        owner_E = even_owners(size.num_experts, groups.num_devices)
        profile = replace(profile, deduplicated=strategy.travel.exchange == "deduplicated")
        self.runtime = MoERuntime(strategy)
        self._dispatchers: dict[tuple[str, int], Any] = {}
        self._passes: dict[int, SlotPass] = {}
        self._ran: list[list[LayerPlan]] = [[] for _ in parameters]  # by each layer's forward passes
        for number, of_layer in enumerate(parameters):
            context = LayerContext(number + 1, owner_E, groups.topology, profile)
            experts, on_pass = LocalExperts("", of_layer), partial(self._passes.__setitem__, number)
            layer = self.runtime.add_layer(context, groups, experts, on_pass=on_pass)
            layer.local.journal = []  # On every rank, not only on the first.
        self._moves = ExpertMoves(self.runtime)
        self._num_done = 0

    def _owned(self) -> Sequence[ParametersByExpert]:
        return [layer.local.experts.parameters for layer in self.runtime.layers]

    def _begin(self, num_micro_batches: int) -> None:
        if selecting(strategy := self.runtime.strategy):
            groups = [self.groups.expert_parallel]
            report = select_strategies(strategy, groups, self.runtime.layers, self._num_done)
            if report is not None and report.changes and dist.get_rank() == 0:
                print(f"[testbed] auto, after {self._num_done} iterations: {report.describe()}", flush=True)
        self.parameters = self._moves.before(self._num_done)
        self._num_done += 1
        self._ran = [[] for _ in self._ran]
        self.runtime.begin_iteration(num_micro_batches)

    def _enter(self, hidden: torch.Tensor) -> torch.Tensor:
        self.runtime.layers[0].launch(hidden)
        return hidden

    def _moe(
        self, number: int, hidden: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> torch.Tensor:
        layer = self.runtime.layers[number]
        layer.prepare(routing_map)
        slot_pass = self._passes[number]
        self._ran[number].append(slot_pass.plan)
        dispatcher = self._dispatcher_of(slot_pass)
        slot_map, probs = layer.remap(routing_map, probs)
        self._count(slot_map)
        rows, row_probs = dispatcher.dispatch_preprocess(hidden.unsqueeze(1), slot_map, probs)
        rows, row_probs = dispatcher.token_dispatch(layer.enter_dispatch(rows), row_probs)
        layer.rows_travel()
        rows, rows_P, row_probs = dispatcher.dispatch_postprocess(rows, row_probs)
        compute = partial(self._experts, slot_pass.parameters_U)
        if slot_pass.plan.in_steps:

            def of_step(*arguments: torch.Tensor) -> tuple[torch.Tensor, None]:
                return compute(*arguments, only_with_rows=True), None

            late = layer.await_weights(rows)
            rows = dispatcher.compute_in_steps(rows, row_probs, of_step, *late)
        else:
            layer.await_weights(rows)
            rows = compute(rows, rows_P, row_probs)
        rows = layer.leave_experts(rows)
        rows = dispatcher.token_combine(dispatcher.combine_preprocess(rows))
        return layer.finish(dispatcher.combine_postprocess(rows).view_as(hidden))

    def _dispatcher_of(self, slot_pass: SlotPass) -> Any:
        """The dispatcher for the slots of a pass.

        All layers have the same one, because it keeps nothing that a backward pass needs.
        """
        from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

        from megatron_fssdp.dispatchers.deduplicated import DeduplicatedTokenDispatcher
        from megatron_fssdp.dispatchers.known_splits import KnownSplitsDispatcher
        from megatron_fssdp.dispatchers.smart_schedule import SmartScheduleTokenDispatcher

        kind: type = MoEAlltoAllTokenDispatcher
        options: dict[str, Any] = {}
        if slot_pass.plan.in_steps:
            kind = SmartScheduleTokenDispatcher
            options["ring"] = self.runtime.strategy.ring(self.groups.device, self.groups.topology)
        elif slot_pass.plan.deduplicated:
            kind, options["topology"] = DeduplicatedTokenDispatcher, self.groups.topology
        elif slot_pass.splits is not None:
            kind = KnownSplitsDispatcher
        key = kind.__name__, slot_pass.slots.slots_per_device
        if key not in self._dispatchers:
            self._dispatchers[key] = self._dispatcher(kind, key[1], **options)
        if kind is KnownSplitsDispatcher:
            self._dispatchers[key].splits = slot_pass.splits
        return self._dispatchers[key]

    def _replica_bytes(self) -> int:
        if self.runtime.strategy.resident_slots:
            # Resident slots have parameters, gradients and both moments, also when they are empty.
            return self.size.num_layers * self.runtime.strategy.resident_slots * 4 * self.size.expert_bytes
        transfers = [slot_pass.transfers for slot_pass in self._passes.values()]
        of_layers = [transfer.slots.held_bytes for transfer in transfers if transfer is not None]
        # Parameters stay for the whole iteration. Gradients exist for one layer at a time.
        return sum(of_layers) + max(of_layers, default=0)

    def _finish(self) -> None:
        self.runtime.finish_gradients()
        self.runtime.end_passes()

    def _report(self, result: IterationResult) -> None:
        topology = self.groups.topology
        for plans in self._ran:
            is_of_passes = plans[-1].life in (ReplicaLife.LAYER_PASS, ReplicaLife.MICRO_BATCH)
            gathered = plans if is_of_passes else plans[-1:]
            for plan in gathered:
                num_between_nodes = transfer_traffic(plan.transfer, topology).num_between_nodes
                result.spag_inter_node_bytes += num_between_nodes * self.size.expert_bytes
        result.loads = self.runtime.end_iteration()
