"""The testbed's layers on a virtual CUDA device, under every strategy and under Megatron's dispatcher."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from benchmarks.host.counted_passes import EXPERTS, PLANNED_AFTER_GATE, PLANNED_AHEAD, CountedPasses
from benchmarks.testbed.layer_stack import LayerStack, make_parameters
from benchmarks.testbed.measurement import make_groups
from benchmarks.testbed.slot_stack import SlotStack
from benchmarks.testbed.stack_inputs import IterationInput, LayerInput, MicroBatchInput, StackSize
from devtools.measured_profile import CHEAP_TO_MOVE
from devtools.virtual_cuda import VirtualDevice, virtual_cuda
from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES
from megatron_fssdp.planning.dispatch.token_dispatch import DispatchPolicy
from megatron_fssdp.planning.placement.placement import even_owners
from megatron_fssdp.runtime.layers.expert_groups import ExpertGroups
from megatron_fssdp.simulation.workloads import WORKLOADS, WorkloadShape
from megatron_fssdp.strategies.auto.auto_strategy import selecting
from megatron_fssdp.strategies.fssdp import fssdp_strategy
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.registry import build_strategy
from megatron_fssdp.strategies.strategy import Strategy

RANKS, NUM_ITERATIONS, UNCOUNTED = 4, 9, 6
SIZE = StackSize(2, 16, 2, 8, 16, 32)
MEGATRON = "Megatron's dispatcher"
PROFILE = replace(CHEAP_TO_MOVE, memory_capacity=4)


@dataclass(frozen=True)
class Case:
    """A layer whose host work is counted."""

    name: str  # in the table
    strategy: str | None  # None: Megatron's dispatcher alone
    settings: dict[str, Any] = field(default_factory=dict)
    plans_after_gate: bool = False
    """Whether the strategy plans with the counts of the micro-batch, for which the host waits before it."""
    shares: DispatchPolicy | None = None  # of ``fssdp``, instead of what the price says


CASES = (
    Case(MEGATRON, None),
    Case("ep", "ep"),
    Case("fssdp", "fssdp", {"slots": 2}, shares="even"),
    Case("fssdp, exact shares", "fssdp", {"slots": 2}, shares="exact"),
    Case("fssdp, rematerialize", "fssdp", {"slots": 2, "rematerialize": True}),
    Case("fssdp, no overlap", "fssdp", {"slots": 2, "overlap": False}),
    Case("prophet", "prophet", {"slots": 2}),
    Case("fastermoe", "fastermoe", {"slots": 2}, plans_after_gate=True),
    Case("quota", "quota", {"slots": 2}, plans_after_gate=True),
    Case("smartmoe", "smartmoe"),
    Case("auto (fssdp)", "auto"),
)


def count_on_rank(rank: int, world_size: int, cases: Sequence[Case]) -> dict[str, CountedPasses]:
    """Count the host work of the cases on this rank.

    Raises:
        AssertionError: The virtual device has findings in this package.
    """
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    groups = make_groups(2)
    shape = WorkloadShape(world_size, SIZE.num_experts, SIZE.tokens_per_rank, SIZE.top_k, NUM_ITERATIONS)
    counts_IE = WORKLOADS["W1"].counts(shape)[:, rank]
    passes = {}
    for case in cases:
        MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = None  # It belongs to the device of the last case.
        # Megatron warns about every library that is not installed.
        with warnings.catch_warnings(action="ignore"), virtual_cuda() as device:
            passes[case.name] = _count_case(case, groups, device, counts_IE)
        # Megatron views a copy of the counts as an array before the copy is complete, and reads it later.
        findings = [str(finding) for finding in device.findings if "megatron_fssdp" in str(finding)]
        assert not findings, findings
    return passes


def _count_case(
    case: Case, groups: ExpertGroups, device: VirtualDevice, counts_IE: np.ndarray
) -> CountedPasses:
    """Run some iterations of a stack of layers, and count all passes after the first iterations."""
    owned = np.flatnonzero(even_owners(SIZE.num_experts, groups.num_devices) == groups.device).tolist()
    parameters = [
        {e: [torch.nn.Parameter(part.detach().cuda()) for part in tensors] for e, tensors in of_layer.items()}
        for of_layer in make_parameters(SIZE, owned)
    ]
    arguments: dict[str, Any] = {}
    base: type[LayerStack] = LayerStack
    if case.strategy is not None:
        settings = STRATEGIES[case.strategy].settings.model_validate(case.settings)
        strategy = build_strategy(case.strategy, settings)
        if selecting(strategy):
            strategy.resume(dict.fromkeys(range(1, SIZE.num_layers + 1), "fssdp"))
        if case.shares is not None:
            fssdp_strategy.with_cheaper_shares = partial(_with_shares, case.shares)
        _mark_plans(strategy, device)
        groups = replace(groups, transfers=groups.transfers if strategy.overlaps else None)
        base, arguments = SlotStack, {"strategy": strategy, "profile": PROFILE}

    class Counted(base):  # type: ignore[misc, valid-type]
        passes, recomputes = CountedPasses(), False

        def _moe(self, *inputs: Any) -> torch.Tensor:
            def counted(*inputs: Any) -> torch.Tensor:
                begin = len(device.events)
                output: torch.Tensor = super(Counted, self)._moe(*inputs)
                self.passes.count(device, begin)
                return output

            if not self.recomputes:
                return counted(*inputs)
            output: torch.Tensor = checkpoint(counted, *inputs, use_reentrant=True)
            return output

        def _experts(self, *inputs: Any, **more: Any) -> torch.Tensor:
            device.mark(EXPERTS)
            output: torch.Tensor = super()._experts(*inputs, **more)
            return output

        def _report(self, result: Any) -> None:
            if case.strategy is not None:  # A virtual device has no times of transfers.
                self.runtime.end_iteration()

    stack = Counted(SIZE, groups, parameters, None, **arguments)
    for iteration, counts_E in enumerate(counts_IE):
        rng = np.random.default_rng((iteration, groups.device))
        drawn = MicroBatchInput.draw(np.array([counts_E] * SIZE.num_layers), SIZE, rng)
        inputs = MicroBatchInput(
            drawn.hidden.cuda(),
            tuple(LayerInput(layer.routing_map.cuda(), layer.probs.cuda()) for layer in drawn.layers),
            drawn.gradient.cuda(),
        )
        # Ranks connect to each other at first, for which the host waits, and fssdp corrects its first plans.
        if iteration == UNCOUNTED:
            stack.passes = CountedPasses()
        stack.recomputes = iteration == NUM_ITERATIONS - 1
        stack.run(IterationInput((inputs,)))
    return stack.passes


def _with_shares(shares: DispatchPolicy, plan: LayerPlan, *_: Any) -> LayerPlan:
    return replace(plan, dispatch_policy=shares)


def _mark_plans(strategy: Strategy, device: VirtualDevice) -> None:
    """Note in the device's log when the strategy makes a plan."""
    before_gate, after_gate = strategy.before_gate, strategy.after_gate

    def plan_before(*arguments: Any) -> LayerPlan:
        device.mark(PLANNED_AHEAD)
        return before_gate(*arguments)

    def plan_after(context: LayerContext, counts_DE: np.ndarray, plan: LayerPlan, number: int) -> LayerPlan:
        corrected = after_gate(context, counts_DE, plan, number)
        if corrected is not plan:
            device.mark(PLANNED_AFTER_GATE)
        return corrected

    strategy.before_gate, strategy.after_gate = plan_before, plan_after  # type: ignore[method-assign, assignment]
