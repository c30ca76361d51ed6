"""Runs MoE layers on a virtual CUDA device under every strategy, and Megatron's own dispatcher.

Shape letters: T tokens of a rank, M model dimension, E experts, D devices.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.host_counts.counted_passes import EXPERTS, PLANNED_AFTER_GATE, PLANNED_AHEAD, CountedPasses
from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES
from megatron_fssdp.planning.cost.cost_model import ClusterCost, LinkCost
from megatron_fssdp.planning.cost.layer_profile import LayerProfile
from megatron_fssdp.planning.cost.tensor_schedules import Schedule
from megatron_fssdp.planning.placement.placement import even_owners
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.runtime.exchange.exchange_selection import exchange_of
from megatron_fssdp.runtime.exchange.expert_groups import ExpertGroups
from megatron_fssdp.runtime.execution.kept_exchanges import RecomputedFunction
from megatron_fssdp.runtime.execution.layer_executor import LayerExecutor
from megatron_fssdp.runtime.execution.layer_pass import run_layer
from megatron_fssdp.runtime.execution.moe_runtime import MoERuntime
from megatron_fssdp.runtime.experts.expert_activation import ExpertActivation
from megatron_fssdp.runtime.experts.grouped_ffn import grouped_ffn
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.registry import build_strategy
from megatron_fssdp.strategies.strategy import Strategy
from megatron_fssdp.testing.virtual_cuda import VirtualDevice, virtual_cuda

RANKS, NUM_LAYERS, NUM_ITERATIONS, NUM_MICRO_BATCHES = 4, 2, 4, 2
TOKENS, MODEL_DIM, FFN_DIM, NUM_EXPERTS, TOP_K = 32, 8, 16, 16, 2
MEGATRON = "Megatron's dispatcher"
ACTIVATION = ExpertActivation(functional.silu, gated=True)
# Experts are cheap to move, so that every strategy that compares costs moves some.
PROFILE = LayerProfile(
    non_moe_s=1.0,
    cluster=ClusterCost(LinkCost(0.0, 1e-3), LinkCost(0.0, 2e-3), expert_flops_per_s=1e3),
    expert_bytes=1,
    token_bytes=8,
    flops_per_token=1e3,
    memory_capacity=4,
)


@dataclass(frozen=True)
class Case:
    """A layer whose host work is counted.

    Attributes:
        name: Name in the table.
        strategy: Name of the strategy.
        settings: Settings of the strategy.
        schedule: Order of collectives with two ranks that share each expert and have the same tokens;
            ``None`` for whole experts and different tokens on all ranks.
        plans_after_gate: Whether the strategy plans with the counts of the micro-batch.
        transfers_first: Whether weights may be packed and sent before the rows: transfers share the
            dispatch's process group, or a correction gathers replicas.
    """

    name: str
    strategy: str
    settings: dict[str, Any] = field(default_factory=dict)
    schedule: Schedule | None = None
    plans_after_gate: bool = False
    transfers_first: bool = False


CASES = (
    Case("ep", "ep"),
    Case("fssdp", "fssdp", {"slots": 2}, plans_after_gate=True, transfers_first=True),
    Case("fssdp, no correction", "fssdp", {"slots": 2, "calibrate": False}),
    Case(
        "fssdp, rematerialize",
        "fssdp",
        {"slots": 2, "rematerialize": True},
        plans_after_gate=True,
        transfers_first=True,
    ),
    Case(
        "fssdp, no overlap",
        "fssdp",
        {"slots": 2, "overlap": False},
        plans_after_gate=True,
        transfers_first=True,
    ),
    Case("prophet", "prophet", {"slots": 2}),
    Case("fastermoe", "fastermoe", {"slots": 2}, plans_after_gate=True),
    Case(
        "fastermoe, smart schedule", "fastermoe", {"slots": 2, "smart_schedule": True}, plans_after_gate=True
    ),
    Case("quota", "quota", {"slots": 2}, plans_after_gate=True),
    Case("smartmoe", "smartmoe"),
    Case("flexmoe", "flexmoe", {"slots": 2}),
    Case("auto (fssdp)", "auto", plans_after_gate=True, transfers_first=True),
    Case("parm, s1", "parm", schedule="s1"),
    Case("parm, s2", "parm", schedule="s2"),
    Case("parm, megatron", "parm", schedule="megatron"),
    Case("parm, baseline", "parm", schedule="baseline"),
)


def count_on_rank(
    rank: int, world_size: int, cases: Sequence[Case], with_megatron: bool
) -> dict[str, CountedPasses]:
    """Count the host work of the cases on this rank.

    Args:
        rank: Number of this rank.
        world_size: Number of ranks.
        cases: Layers to run.
        with_megatron: Whether to count Megatron's dispatcher as well.

    Raises:
        AssertionError: The virtual device has findings.
    """
    groups = {True: _whole_experts(), False: _shared_experts(rank, world_size)}
    alone = dist.new_subgroups(1)[0]
    found = {}
    for case in cases:
        with virtual_cuda() as device:
            found[case.name] = _count_case(case, groups[case.schedule is None], device)
        device.assert_clean()
    if with_megatron:
        # Megatron warns about every library that is not installed.
        with warnings.catch_warnings(action="ignore"), virtual_cuda() as device:
            found[MEGATRON] = _count_megatron(alone, device)
    return found


def _whole_experts() -> ExpertGroups:
    """Process groups of ranks that own whole experts."""
    everyone = dist.group.WORLD
    assert everyone is not None
    return ExpertGroups(everyone, Topology.uniform(everyone.size(), 2), dist.new_group())


def _shared_experts(rank: int, world_size: int) -> ExpertGroups:
    """Process groups of ranks of which two share each expert and have the same tokens."""
    rows = [dist.new_group(list(range(peer, world_size, 2))) for peer in range(2)]
    columns = [dist.new_group([first, first + 1]) for first in range(0, world_size, 2)]
    device, peer = divmod(rank, 2)
    return ExpertGroups(
        rows[peer],
        Topology.uniform(world_size // 2, 1),
        expert_tensor_parallel=columns[device],
        parts=dist.group.WORLD,
        tensor_parallel=columns[device],
        devices_of_peers=(device, device),
    )


def _count_case(case: Case, groups: ExpertGroups, device: VirtualDevice) -> CountedPasses:
    """Run some iterations of a stack of layers, and count all passes after the first iteration."""
    strategy = build_strategy(case.strategy, STRATEGIES[case.strategy].settings.model_validate(case.settings))
    if strategy.selects:
        strategy.resume(dict.fromkeys(range(1, NUM_LAYERS + 1), "fssdp"))
    _mark_plans(strategy, device)
    runtime = MoERuntime(strategy)
    ring = strategy.ring(groups.device, groups.topology)
    groups = replace(groups, ring=ring, transfers=groups.transfers if strategy.overlaps else None)
    owner_E = even_owners(NUM_EXPERTS, groups.num_devices)
    for number in range(1, NUM_LAYERS + 1):
        runtime.add_layer(
            LayerContext(number, owner_E, groups.topology, PROFILE),
            groups,
            {int(e): _draw_expert(groups.num_parts) for e in np.flatnonzero(owner_E == groups.device)},
            most_choices=TOP_K,
        )
    passes = CountedPasses()
    rng = np.random.default_rng(groups.device)
    for iteration in range(NUM_ITERATIONS):
        if strategy.resident_slots and iteration == 2:
            for layer in runtime.layers:
                _keep_replicas(layer, strategy)
        runtime.begin_iteration(NUM_MICRO_BATCHES)
        # In the first iteration, ranks connect to each other, for which the host waits once.
        counted = passes if iteration else CountedPasses()
        run: Callable[..., Tensor] = partial(_run_stack, runtime, case.schedule, device, counted)
        if iteration == NUM_ITERATIONS - 1:
            run = _recomputed(run)
        outputs = [run(*_draw_inputs(rng)) for _ in range(NUM_MICRO_BATCHES)]
        for output in outputs:
            output.sum().backward()
        runtime.finish_gradients()
        runtime.end_iteration()
    return passes


def _recomputed(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same function under an activation checkpoint that keeps exchanges, as in the adapter."""
    return lambda *inputs: checkpoint(RecomputedFunction(run), *inputs, use_reentrant=True)


def _run_stack(
    runtime: MoERuntime,
    schedule: Schedule | None,
    device: VirtualDevice,
    passes: CountedPasses,
    hidden: Tensor,
    probs: Tensor,
    routing_map: Tensor,
) -> Tensor:
    """Run the layers one after the other, and count the pass of each layer."""

    def compute(*arguments: Any) -> Tensor:
        device.mark(EXPERTS)
        return grouped_ffn(*arguments, activation=ACTIVATION)

    for layer in runtime.layers:
        begin = len(device.events)
        if layer.groups.transfers is not None:
            hidden = layer.launch(hidden, first=layer.is_first)
        exchange = None if schedule is None else exchange_of(schedule, layer.groups)
        hidden, _ = run_layer(layer, hidden, probs, routing_map, compute, exchange=exchange)
        passes.count(device, begin)
    return hidden


def _mark_plans(strategy: Strategy, device: VirtualDevice) -> None:
    """Note in the device's log when the strategy makes a plan."""
    before_gate, after_gate = strategy.before_gate, strategy.after_gate

    def plan_before(*arguments: Any) -> LayerPlan:
        device.mark(PLANNED_AHEAD)
        return before_gate(*arguments)

    def plan_after(context: LayerContext, counts_DE: np.ndarray, plan: LayerPlan, number: int) -> LayerPlan:
        found = after_gate(context, counts_DE, plan, number)
        if found is not plan:
            device.mark(PLANNED_AFTER_GATE)
        return found

    strategy.before_gate, strategy.after_gate = plan_before, plan_after  # type: ignore[method-assign]


def _keep_replicas(layer: LayerExecutor, strategy: Strategy) -> None:
    """Give a layer the resident replicas that its strategy selects."""
    placement = strategy.replicate(layer.context, layer.history.mean_DE())
    here = [e for e in placement.experts_on(layer.groups.device) if e not in layer.experts.parameters]
    layer.keep(placement, {expert: _draw_expert(1) for expert in here})


def _draw_expert(num_parts: int) -> list[torch.nn.Parameter]:
    """Weights of this rank's part of an expert."""
    ffn = FFN_DIM // num_parts
    shapes = (2 * ffn, MODEL_DIM), (MODEL_DIM, ffn)
    return [torch.nn.Parameter(torch.randn(*shape, device="cuda")) for shape in shapes]


def _draw_inputs(rng: np.random.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states ``[T, M]``, probabilities ``[T, E]`` and routing map ``[T, E]`` of a micro-batch."""
    score_TE = rng.gumbel(size=(TOKENS, NUM_EXPERTS))
    score_TE[:, :2] += 2
    routing_TE = np.zeros(score_TE.shape, bool)
    np.put_along_axis(routing_TE, np.argsort(-score_TE, axis=1)[:, :TOP_K], True, axis=1)
    return (
        torch.randn(TOKENS, MODEL_DIM, device="cuda", requires_grad=True),
        torch.rand(TOKENS, NUM_EXPERTS, device="cuda", requires_grad=True),
        torch.from_numpy(routing_TE).to("cuda"),
    )


def _count_megatron(alone: dist.ProcessGroup, device: VirtualDevice) -> CountedPasses:
    """Count the host work of Megatron's all-to-all dispatcher with the same sizes, without fused kernels."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=MODEL_DIM,
        num_attention_heads=1,
        num_moe_experts=NUM_EXPERTS,
        moe_router_topk=TOP_K,
        moe_token_dispatcher_type="alltoall",
        add_bias_linear=False,
    )
    groups = ProcessGroupCollection()
    groups.ep = groups.tp_ep = dist.group.WORLD
    groups.tp = groups.expt_tp = alone
    own = np.split(np.arange(NUM_EXPERTS), dist.get_world_size())[dist.get_rank()].tolist()
    dispatcher = MoEAlltoAllTokenDispatcher(len(own), own, config, groups)
    passes = CountedPasses()
    rng = np.random.default_rng(dist.get_rank())

    def run(hidden: Tensor, probs: Tensor, routing_map: Tensor) -> Tensor:
        begin = len(device.events)
        rows, row_probs = dispatcher.dispatch_preprocess(hidden.unsqueeze(1), routing_map, probs)
        rows, row_probs = dispatcher.token_dispatch(rows, row_probs)
        rows, _, row_probs = dispatcher.dispatch_postprocess(rows, row_probs)
        device.mark(EXPERTS)
        rows = dispatcher.combine_preprocess(rows * row_probs.unsqueeze(1))
        output: Tensor = dispatcher.combine_postprocess(dispatcher.token_combine(rows))
        passes.count(device, begin)
        return output

    for step in (run, _recomputed(run)):
        for _ in range(NUM_MICRO_BATCHES):
            step(*_draw_inputs(rng)).sum().backward()
    return passes
