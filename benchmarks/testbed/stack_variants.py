"""Stacks of MoE layers under Megatron's own dispatcher and under this plugin's runtime.

Shape letters: D devices, E experts, L layers.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.testbed.expert_moves import ExpertMoves
from benchmarks.testbed.layer_stack import IterationResult, LayerStack
from benchmarks.testbed.pacing import Timeline
from benchmarks.testbed.stack_inputs import Pace, StackSize
from megatron_fssdp.planning.cost.layer_profile import LayerProfile
from megatron_fssdp.planning.dispatch.even_dispatch import EvenDispatch
from megatron_fssdp.planning.dispatch.token_dispatch import TokenDispatch
from megatron_fssdp.planning.placement.placement import ExpertPlacement, even_owners
from megatron_fssdp.runtime.exchange.exchange_selection import exchange_of
from megatron_fssdp.runtime.exchange.expert_groups import ExpertGroups
from megatron_fssdp.runtime.execution.layer_executor import MicroBatch
from megatron_fssdp.runtime.execution.layer_pass import run_layer
from megatron_fssdp.runtime.execution.moe_runtime import MoERuntime
from megatron_fssdp.runtime.execution.strategy_selector import StrategySelector
from megatron_fssdp.runtime.experts.expert_layout import ExpertWeights, ParametersByExpert
from megatron_fssdp.strategies.layer_plan import LayerContext
from megatron_fssdp.strategies.strategy import Strategy


def dispatch_tokens_DD(dispatch: TokenDispatch, num_devices: int) -> np.ndarray:
    """(token, k) pairs that each device sends to each device, int64 ``[D, D]``.

    The pairs on the diagonal stay on their device.

    Args:
        dispatch: The dispatch.
        num_devices: Number of devices, D.
    """
    return np.stack([dispatch.from_source(source).sum(axis=0) for source in range(num_devices)])


class MegatronStack(LayerStack):
    """Stack of the variant ``none``: Megatron's ``MoEAlltoAllTokenDispatcher`` and experts in autograd."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Imported here, because the caller must first decide about Megatron's CPU runtime.
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
        from megatron.core.transformer.transformer_config import TransformerConfig

        size, devices = self.size, self.groups.num_devices
        config = TransformerConfig(
            num_layers=size.num_layers,
            hidden_size=size.hidden_size,
            num_attention_heads=1,
            num_moe_experts=size.num_experts,
            moe_router_topk=size.top_k,
            moe_ffn_hidden_size=size.ffn_size,
            expert_model_parallel_size=devices,
            moe_token_dispatcher_type="alltoall",
            use_cpu_initialization=True,
            gradient_accumulation_fusion=False,
            add_bias_linear=False,
        )
        collection = ProcessGroupCollection()
        collection.ep = collection.tp_ep = self.groups.expert_parallel
        collection.expt_tp, _ = dist.new_subgroups_by_enumeration([[rank] for rank in range(devices)])
        owned = list(self.parameters[0])
        self._dispatchers = [
            MoEAlltoAllTokenDispatcher(len(owned), owned, config, collection) for _ in range(size.num_layers)
        ]

    def _moe(
        self, number: int, hidden: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> torch.Tensor:
        dispatcher = self._dispatchers[number]
        rows, row_probs = dispatcher.dispatch_preprocess(hidden.unsqueeze(1), routing_map, probs)
        rows, row_probs = dispatcher.token_dispatch(rows, row_probs)
        rows, rows_per_expert, row_probs = dispatcher.dispatch_postprocess(rows, row_probs)
        experts = [ExpertWeights.from_tensors(tensors) for tensors in self.parameters[number].values()]
        rows = self._experts(number, rows, row_probs, rows_per_expert.tolist(), experts)
        rows = dispatcher.token_combine(dispatcher.combine_preprocess(rows))
        output: torch.Tensor = dispatcher.combine_postprocess(rows)
        return output.view_as(hidden)

    def _report(self, result: IterationResult, counts_LDE: np.ndarray) -> None:
        devices = self.groups.num_devices
        owners = ExpertPlacement.owners_only(even_owners(self.size.num_experts, devices), devices)
        result.pairs_LDD = np.stack(
            [
                dispatch_tokens_DD(EvenDispatch(counts_DE, owners, self.groups.topology), devices)
                for counts_DE in counts_LDE
            ]
        )


class RuntimeStack(LayerStack):
    """Stack with this plugin's runtime under a placement strategy, called as by the Megatron adapter."""

    def __init__(
        self,
        size: StackSize,
        groups: ExpertGroups,
        parameters: Sequence[ParametersByExpert],
        pace: Pace | None,
        timeline: Timeline,
        *,
        strategy: Strategy,
        profile: LayerProfile,
    ) -> None:
        super().__init__(size, groups, parameters, pace, timeline)
        owner_E = even_owners(size.num_experts, groups.num_devices)
        profile = replace(profile, deduplicated=strategy.exchange == "deduplicated")
        self.runtime = MoERuntime(strategy)
        self._running: dict[int, MicroBatch] = {}
        for number, of_layer in enumerate(parameters):
            context = LayerContext(number + 1, owner_E, groups.topology, profile)
            self.runtime.add_layer(context, groups, of_layer)
        for executor in self.runtime.layers:
            executor.measure = True  # on every rank; by default only the first rank measures
        self._moves = ExpertMoves(self.runtime)
        self._selector: StrategySelector | None = None
        if strategy.selects:
            self._selector = StrategySelector(strategy, [groups.expert_parallel], torch.device("cpu"))
        self._num_done = 0

    def _owned(self) -> Sequence[ParametersByExpert]:
        return [layer.experts.parameters for layer in self.runtime.layers]

    def _begin(self) -> None:
        if self._selector is not None:
            report = self._selector.select(self.runtime.layers, self._num_done)
            if report is not None and report.changes and dist.get_rank() == 0:
                print(
                    f"[testbed] auto, after {self._num_done} iterations: {report.describe()[-1]}", flush=True
                )
        self.parameters = self._moves.before(self._num_done)
        self._num_done += 1
        self.runtime.begin_iteration(num_micro_batches=1)

    def _launch(self, number: int, hidden: torch.Tensor) -> torch.Tensor:
        return self.runtime.layers[number].launch(hidden, first=number == 0)

    def _moe(
        self, number: int, hidden: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> torch.Tensor:
        output, self._running[number] = run_layer(
            self.runtime.layers[number],
            hidden,
            probs,
            routing_map,
            partial(self._experts, number),
            exchange=exchange_of(
                "megatron",
                self.groups,
                deduplicated=self.runtime.layers[number].plan_iteration().deduplicated,
                most_choices=self.size.top_k,
            ),
            span=lambda step: self.timeline.span(f"{step} {number + 1}"),
        )
        return output

    def _replica_bytes(self) -> int:
        if self.runtime.strategy.resident_slots:
            # Resident slots have parameters, gradients and both moments, also when they are empty.
            return self.size.num_layers * self.runtime.strategy.resident_slots * 4 * self.size.expert_bytes
        of_layers = [one.materialization.weights.held_bytes for one in self._running.values()]
        # Parameters stay for the whole iteration. Gradients exist for one layer at a time.
        return sum(of_layers) + max(of_layers, default=0)

    def _finish(self) -> None:
        self.runtime.finish_gradients()

    def _report(self, result: IterationResult, counts_LDE: np.ndarray) -> None:
        topology, devices = self.groups.topology, self.groups.num_devices
        pairs = []
        for number, (layer, counts_DE) in enumerate(zip(self.runtime.layers, counts_LDE, strict=True)):
            plan = self._running[number].plan
            (dispatch,) = plan.dispatch([counts_DE], topology)
            pairs.append(dispatch_tokens_DD(dispatch, devices))
            result.spag_inter_node_bytes += plan.transfer.inter_node_bytes(self.size.expert_bytes, topology)
            for started in layer._journal:
                name = f"{'spAG' if started.is_gather else 'spRS'} {number + 1}"
                timer: Any = started.timer
                if timer.end_s:
                    result.transfers.append((name, timer.begin_s, timer.end_s))
                result.transfers += [(f"wait for {name}", *one) for one in timer.waits_s]
        result.pairs_LDD = np.stack(pairs)
        result.loads = self.runtime.end_iteration()
        if self._selector is not None:
            self._selector.note(result.seconds)
