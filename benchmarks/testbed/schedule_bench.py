"""Compares Parm's schedules with DeepSpeed-MoE's order on one MoE layer, over a grid of shapes.

The ranks of a tensor-parallel group have the same tokens. Routing is forced and even. There is no attention,
and experts take the time of a stated throughput. Before the measurement, results and gradients of all
schedules are compared.

Shape letters: T tokens of a tensor-parallel group, M model dim, F ffn dim, E experts.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional

from benchmarks.testbed.pacing import Timeline, paced_experts
from benchmarks.testbed.report import quartiles
from megatron_fssdp.collectives.rows.gathered_counts import gather_counts
from megatron_fssdp.collectives.rows.model_parallel import gather_tokens, split_tokens
from megatron_fssdp.config.strategy.strategy_settings import EpSettings
from megatron_fssdp.planning.cost.tensor_schedules import (
    Schedule,
    ScheduledLayer,
    best_schedule,
    predicted_seconds,
    rows_of_device,
)
from megatron_fssdp.planning.placement.placement import even_owners
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.runtime.exchange.exchange_selection import exchange_of
from megatron_fssdp.runtime.exchange.expert_groups import ExpertGroups
from megatron_fssdp.runtime.exchange.schedule_costs import measured_costs
from megatron_fssdp.runtime.execution.layer_executor import LayerExecutor
from megatron_fssdp.runtime.execution.layer_pass import run_layer
from megatron_fssdp.runtime.execution.moe_runtime import MoERuntime
from megatron_fssdp.runtime.experts.expert_activation import ExpertActivation
from megatron_fssdp.runtime.experts.expert_layout import ExpertWeights
from megatron_fssdp.runtime.experts.grouped_ffn import grouped_ffn
from megatron_fssdp.strategies.layer_plan import LayerContext
from megatron_fssdp.strategies.registry import build_strategy

ELEMENT_BYTES = 4  # fp32
TOLERANCE = 1e-5

VARIANTS: dict[str, tuple[Schedule, bool]] = {
    "baseline": ("baseline", False),
    "megatron": ("megatron", False),
    "s1": ("s1", False),
    "s2": ("s2", True),
    "s2 in turn": ("s2", False),
}
"""Schedule, and whether S2's collectives run at the same time (SAA) unless slices are too small."""

TOKENS, HIDDEN = (1024, 2048, 4096), (128, 256)
SHARES = (0.25, 0.5, 1.0, 2.0)


@dataclass(frozen=True)
class Shape:
    """Sizes of one layer.

    Attributes:
        num_tokens: Tokens of a tensor-parallel group, T.
        hidden_size: Model dimension, M.
        share: Rows per token, k·f.
    """

    num_tokens: int
    hidden_size: int
    share: float

    @property
    def num_rows(self) -> int:
        """Number of rows of a tensor-parallel group's tokens."""
        return round(self.num_tokens * self.share)


GRID = [Shape(*values) for values in product(TOKENS, HIDDEN, SHARES)]


@dataclass(frozen=True)
class Plan:
    """Settings of a measurement.

    Attributes:
        n_mp: Number of tensor-parallel ranks.
        n_esp: Number of ranks that share each expert.
        num_nodes: Number of equal nodes of the ranks.
        shapes: Grid of shapes to measure.
        num_experts: Number of experts, E.
        flops_per_s: Throughput of a rank on experts, in floating-point operations per second.
        repetitions: Number of measured iterations of every pair of shape and variant.
        warm_up: Number of unmeasured iterations before them.
        seed: Seed of the turns.
    """

    n_mp: int
    n_esp: int
    num_nodes: int
    shapes: tuple[Shape, ...]
    num_experts: int
    flops_per_s: float
    repetitions: int
    warm_up: int
    seed: int


class ScheduledStack:
    """One MoE layer on this rank, in one shape, under any schedule.

    Args:
        groups: Process groups of the layer.
        shape: Sizes of the layer.
        num_experts: Number of experts, E.
        flops_per_s: Pace of experts, in floating-point operations per second. None for real compute.
    """

    def __init__(
        self, groups: ExpertGroups, shape: Shape, num_experts: int, flops_per_s: float | None
    ) -> None:
        assert groups.tensor_parallel is not None
        self.groups, self.shape, self.flops_per_s = groups, shape, flops_per_s
        hidden, ffn = shape.hidden_size, 4 * shape.hidden_size // groups.num_parts
        owner_E = even_owners(num_experts, groups.num_devices)
        parameters: dict[int, list[torch.nn.Parameter]] = {}
        for expert in np.flatnonzero(owner_E == groups.device).tolist():
            generator = torch.Generator().manual_seed(1000 * expert + groups.peer)
            fc1 = torch.randn(ffn, hidden, generator=generator) / hidden**0.5
            fc2 = torch.randn(hidden, ffn, generator=generator) / ffn**0.5
            parameters[expert] = [torch.nn.Parameter(fc1), torch.nn.Parameter(fc2)]
        self.parameters = parameters
        runtime = MoERuntime(build_strategy("ep", EpSettings()))
        self.executor: LayerExecutor = runtime.add_layer(
            LayerContext(1, owner_E, groups.topology), groups, parameters
        )
        # All ranks of a tensor-parallel group draw the same numbers.
        first = dist.get_process_group_ranks(groups.tensor_parallel)[0]
        rng = np.random.default_rng([first, shape.num_tokens])
        numbers = np.arange(shape.num_rows)
        rounds = numbers // shape.num_tokens
        routing_TE = np.zeros((shape.num_tokens, num_experts), dtype=bool)
        routing_TE[
            rng.permutation(shape.num_tokens)[numbers % shape.num_tokens], (numbers + rounds) % num_experts
        ] = True
        self.routing_map = torch.from_numpy(routing_TE)
        self.probs = self.routing_map * torch.from_numpy(rng.uniform(0.5, 1.5, routing_TE.shape)).float()
        size = (shape.num_tokens, hidden)
        self.hidden = torch.from_numpy(rng.standard_normal(size, np.float32))
        self.gradient = torch.from_numpy(rng.standard_normal(size, np.float32))
        self.num_rows = 0

    def run(self, variant: str) -> tuple[float, list[torch.Tensor]]:
        """Run a forward and a backward pass. Return the seconds, and the output with all gradients."""
        for tensors in self.parameters.values():
            for parameter in tensors:
                parameter.grad = None
        hidden, probs = (x.clone().requires_grad_() for x in (self.hidden, self.probs))
        dist.barrier()
        begin_s = time.perf_counter()
        output = self._forward(hidden, probs, *VARIANTS[variant])
        output.backward(self.gradient)
        seconds = time.perf_counter() - begin_s
        of_experts = [p.grad for tensors in self.parameters.values() for p in tensors]
        found = [output.detach(), hidden.grad, *of_experts]
        return seconds, [x for x in found if x is not None]

    def _forward(
        self, hidden: torch.Tensor, probs: torch.Tensor, schedule: Schedule, simultaneous: bool
    ) -> torch.Tensor:
        """Run the layer as the adapter does, but without a gate, because routing is forced."""
        peers, routing_map = self.groups.tensor_parallel, self.routing_map
        assert peers is not None
        divides_first = schedule in ("s1", "megatron")
        simultaneous = simultaneous and _layer(self.shape, self.groups, peers.size()).slices_pay
        if divides_first:
            hidden = split_tokens(hidden, peers)
            probs, routing_map = (x.chunk(peers.size())[peers.rank()] for x in (probs, routing_map))
        exchange = exchange_of(schedule, self.groups, simultaneous=simultaneous)
        output, _ = run_layer(self.executor, hidden, probs, routing_map, self._experts, exchange=exchange)
        return gather_tokens(output, peers) if divides_first else output

    def _experts(
        self,
        rows: torch.Tensor,
        probs: torch.Tensor,
        rows_per_expert: Sequence[int],
        experts: Sequence[ExpertWeights],
    ) -> torch.Tensor:
        self.num_rows = len(rows)
        if self.flops_per_s is None:
            return grouped_ffn(rows, probs, rows_per_expert, experts, ExpertActivation(functional.gelu))
        flops = 16 * self.shape.hidden_size**2 / self.groups.num_parts  # two products of 2 M F, F = 4 M
        tensors = [tensor for expert in experts for tensor in expert.tensors()]
        taken_s = len(rows) * flops / self.flops_per_s
        return paced_experts(rows, probs, tensors, taken_s, Timeline(), "experts")


def make_groups(n_mp: int, n_esp: int, num_nodes: int) -> ExpertGroups:
    """Make process groups in Megatron's order: ranks of an expert and tensor-parallel ranks are adjacent."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    num_devices = world_size // n_esp

    def own(partition: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        group, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in partition])
        assert group is not None
        return group

    devices = own([range(part, world_size, n_esp) for part in range(n_esp)])
    parts = own([range(first, first + n_esp) for first in range(0, world_size, n_esp)])
    tensor_parallel = own([range(first, first + n_mp) for first in range(0, world_size, n_mp)])
    node_of_rank = np.arange(world_size) * num_nodes // world_size
    topology = Topology.from_labels(node_of_rank[rank % n_esp :: n_esp].tolist())
    assert topology.num_devices == num_devices
    numbers = gather_counts(torch.tensor([devices.rank()]), tensor_parallel).view(-1).tolist()
    return ExpertGroups(
        devices,
        topology,
        expert_tensor_parallel=parts if n_esp > 1 else None,
        parts=dist.new_group(range(world_size)) if n_esp > 1 else None,
        tensor_parallel=tensor_parallel,
        devices_of_peers=tuple(numbers),
    )


def measure_schedule_grid(plan: Plan) -> dict[str, Any]:
    """Measure all shapes under all variants. Every repetition has a new random order.

    This function runs on every rank.

    Raises:
        RuntimeError: The results of the schedules differ.
    """
    torch.set_num_threads(1)
    groups = make_groups(plan.n_mp, plan.n_esp, plan.num_nodes)
    worst = _largest_difference(groups, plan)
    if worst > TOLERANCE:
        raise RuntimeError(f"schedules differ by {worst:.1e}, wanted at most {TOLERANCE:.0e}")
    everyone = dist.new_group(range(dist.get_world_size()))
    order = np.random.default_rng(plan.seed)
    rows = []
    for number, shape in enumerate(plan.shapes):
        stack = ScheduledStack(groups, shape, plan.num_experts, plan.flops_per_s)
        layer = _layer(shape, groups, plan.n_mp)
        costs = measured_costs(layer, stack.hidden, groups, everyone, simultaneous=layer.slices_pay)
        predicted = predicted_seconds(layer, costs, ("s1", "s2", "megatron"))
        seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
        computed: dict[str, int] = {}
        for repetition in range(plan.warm_up + plan.repetitions):
            for choice in order.permutation(len(VARIANTS)):
                name = list(VARIANTS)[choice]
                taken, _ = stack.run(name)
                longest = torch.tensor([taken], dtype=torch.float64)
                dist.all_reduce(longest, op=dist.ReduceOp.MAX)
                computed[name] = stack.num_rows
                if repetition >= plan.warm_up:
                    seconds[name].append(float(longest))
        wanted = {name: rows_of_device(schedule, layer) for name, (schedule, _) in VARIANTS.items()}
        assert all(abs(computed[name] - wanted[name]) <= plan.num_experts for name in VARIANTS)
        parm = {name: predicted[name] for name in ("s1", "s2")}
        rows.append(
            {
                "tokens": shape.num_tokens,
                "hidden": shape.hidden_size,
                "rows_per_token": shape.share,
                "seconds": seconds,
                "predicted_s": predicted,
                "auto_of_s1_s2": best_schedule(parm),
                "auto": best_schedule(predicted),
            }
        )
        if dist.get_rank() == 0:
            print(f"[testbed] shape {number + 1} of {len(plan.shapes)} done", flush=True)
    return {"worst_difference": worst, "shapes": rows}


def _layer(shape: Shape, groups: ExpertGroups, n_mp: int) -> ScheduledLayer:
    return ScheduledLayer(
        num_tokens=shape.num_tokens,
        hidden_size=shape.hidden_size,
        num_rows=shape.num_rows,
        n_mp=n_mp,
        n_esp=groups.num_parts,
        n_ep=groups.num_devices,
        element_bytes=ELEMENT_BYTES,
    )


def _largest_difference(groups: ExpertGroups, plan: Plan) -> float:
    """Return the largest difference of outputs and gradients between schedules, with real compute."""
    stack = ScheduledStack(groups, Shape(32, 16, 2.0), plan.num_experts, None)
    worst, wanted = 0.0, None
    for variant in VARIANTS:
        _, found = stack.run(variant)
        wanted = wanted or found
        for got, right in zip(found, wanted, strict=True):
            worst = max(worst, float((got - right).abs().max() / right.abs().max()))
    longest = torch.tensor([worst])
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return float(longest)


def schedule_table(record: dict[str, Any]) -> str:
    """Return a Markdown table of speed-ups over the baseline, with one line for each shape, and a summary."""
    lines = [
        "| tokens | M | rows a token | baseline s | s1 | s2 | s2 in turn over s2 | megatron | auto of s1, s2 "
        "| auto |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in record["shapes"]:
        seconds = row["seconds"]
        ratios = {name: _ratio(seconds["baseline"], seconds[name]) for name in VARIANTS}
        in_turn = _ratio(seconds["s2 in turn"], seconds["s2"])
        lines.append(
            f"| {row['tokens']} | {row['hidden']} | {row['rows_per_token']} "
            f"| {quartiles(seconds['baseline'])[1]:.3f} | {_shown(ratios['s1'])} | {_shown(ratios['s2'])} "
            f"| {_shown(in_turn)} | {_shown(ratios['megatron'])} | {row['auto_of_s1_s2']} | {row['auto']} |"
        )
    return "\n".join([*lines, "", *_summary(record["shapes"])])


def _summary(rows: list[dict[str, Any]]) -> list[str]:
    medians = [{name: quartiles(found)[1] for name, found in row["seconds"].items()} for row in rows]
    number = len(rows)

    def share(is_so: list[bool]) -> str:
        return f"{sum(is_so)} of {number} shapes"

    pairs = list(zip(rows, medians, strict=True))
    of_two = [s[row["auto_of_s1_s2"]] <= 1.02 * min(s["s1"], s["s2"]) for row, s in pairs]
    of_all = [s[row["auto"]] <= 1.02 * min(s["s1"], s["s2"]) for row, s in pairs]
    return [
        *(
            f"{name} at least 1.5 times as fast as the baseline: "
            f"{share([s['baseline'] >= 1.5 * s[name] for s in medians])}"
            for name in ("s1", "s2")
        ),
        f"auto of s1 and s2 within 2 % of the better one: {share(of_two)}",
        f"auto of s1, s2 and megatron within 2 % of the better one of s1 and s2, or faster: {share(of_all)}",
        f"s2 not slower than in turn: {share([s['s2'] <= s['s2 in turn'] for s in medians])}",
    ]


def _ratio(slow: list[float], fast: list[float]) -> tuple[float, float, float]:
    """Return quartiles of the ratios of seconds in the same repetition."""
    return quartiles([a / b for a, b in zip(slow, fast, strict=True)])


def _shown(ratio: tuple[float, float, float]) -> str:
    low, median, high = ratio
    return f"{median:.2f} [{low:.2f}, {high:.2f}]"
