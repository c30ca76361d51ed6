"""Variants and workloads in random turns on the ranks; what each iteration cost.

Shape legend: L layers, I iterations, D devices, E experts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.testbed.layer_stack import (
    IterationInput,
    IterationResult,
    LayerStack,
    MegatronStack,
    Pace,
    RuntimeStack,
    StackSize,
    make_parameters,
)
from benchmarks.testbed.links import INTERFACE, sent_and_received_bytes
from benchmarks.testbed.pacing import Timeline
from megatron_fssdp.config.strategy_settings import PlacementSettings
from megatron_fssdp.planning.cost.layer_profile import LayerProfile
from megatron_fssdp.planning.placement.placement import even_owners
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.reporting.chrome_trace import TraceSpan
from megatron_fssdp.runtime.exchange.expert_groups import ExpertGroups
from megatron_fssdp.strategies.registry import build_strategy


@dataclass(frozen=True)
class Variant:
    """One column of a run.

    Attributes:
        name: What reports call it.
        strategy: ``none``, or a placement strategy.
        settings: Of a placement strategy.
    """

    name: str
    strategy: str
    settings: PlacementSettings | None = None


@dataclass(frozen=True)
class Sample:
    """One measured iteration.

    Attributes:
        workload: Its name.
        variant: Its name.
        repetition: From 0.
        iteration: Of the workload, from 0; warm-ups came before the first.
        seconds: Of the slowest rank.
        transfer_s: Lanes' seconds of spAG and of spRS, summed over ranks and layers.
        exposed_s: Of these, those in which the rank's compute stood still.
        dispatch_bytes: Hidden states of the four all-to-alls between nodes and inside them, from the plans.
        transfer_bytes: Of spAG and spRS together, between nodes and inside them, from the plans.
        node_bytes: Most that one node's interface sent or received, with headers; 0 without namespaces.
        replica_bytes: Most that replicas take on one rank: all layers' parameters, a layer's gradients.
    """

    workload: str
    variant: str
    repetition: int
    iteration: int
    seconds: float
    transfer_s: tuple[float, float]
    exposed_s: tuple[float, float]
    dispatch_bytes: tuple[int, int]
    transfer_bytes: tuple[int, int]
    node_bytes: int
    replica_bytes: int


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        size: Of the model part.
        pace: Of compute.
        profile: What strategies may know of costs.
        num_nodes: Nodes of the ranks, equal ones.
        variants: In the order of reports.
        counts: Of every workload, ``[L, I, D, E]``.
        repetitions: Measured iterations of every pair of workload and variant.
        warm_up: Unmeasured ones before them, which fill the load history.
        seed: Of the turns and of the tokens.
        namespaces: Whether nodes have interfaces of their own.
        traced: Whether to keep spans of the last repetition.
    """

    size: StackSize
    pace: Pace
    profile: LayerProfile
    num_nodes: int
    variants: tuple[Variant, ...]
    counts: Mapping[str, np.ndarray]
    repetitions: int
    warm_up: int
    seed: int
    namespaces: bool
    traced: bool = False


@dataclass
class Cell:
    """One workload under one variant on this rank."""

    stack: LayerStack
    counts_LIDE: np.ndarray
    num_done: int = 0


@dataclass
class RankReport:
    """What a rank hands back; samples are the same on all."""

    samples: list[Sample] = field(default_factory=list)
    spans: list[TraceSpan] = field(default_factory=list)


def measure(plan: Plan) -> RankReport:
    """Runs on every rank: all pairs once in each round, in an order drawn anew for each."""
    torch.set_num_threads(1)
    rank = dist.get_rank()
    groups = make_groups(plan.num_nodes)
    owned = np.flatnonzero(even_owners(plan.size.num_experts, groups.num_devices) == rank).tolist()
    parameters = make_parameters(plan.size, owned)
    timeline, report = Timeline(), RankReport()
    cells = {
        (workload, variant.name): Cell(
            make_stack(variant, plan.size, groups, parameters, plan.pace, timeline, plan.profile), counts_LIDE
        )
        for workload, counts_LIDE in plan.counts.items()
        for variant in plan.variants
    }
    order = np.random.default_rng(plan.seed)  # the same on all ranks
    names = list(cells)
    for round_number in range(plan.warm_up + plan.repetitions):
        for choice in order.permutation(len(names)):
            name = names[choice]
            cell = cells[name]
            counts_LDE = cell.counts_LIDE[:, cell.num_done]
            # The same tokens for all variants of a workload.
            seed = (plan.seed, list(plan.counts).index(name[0]), cell.num_done, rank)
            inputs = IterationInput.draw(counts_LDE[:, rank], plan.size, seed)
            timeline.spans.clear()
            dist.barrier()
            before = sent_and_received_bytes(INTERFACE) if plan.namespaces else (0, 0)
            result = cell.stack.run(inputs, counts_LDE)
            after = sent_and_received_bytes(INTERFACE) if plan.namespaces else (0, 0)
            moved = max(after[0] - before[0], after[1] - before[1])
            sample = _sample(plan, groups.topology, name, round_number, cell.num_done, result, moved)
            cell.num_done += 1
            if round_number >= plan.warm_up:
                report.samples.append(sample)
            if plan.traced and round_number == plan.warm_up + plan.repetitions - 1:
                report.spans += _spans(rank, " ".join(name), timeline, result)
        if rank == 0:
            number = round_number - plan.warm_up + 1
            what = f"repetition {number} of {plan.repetitions}" if number > 0 else "warm-up"
            print(f"[testbed] {what} done", flush=True)
    return report


def make_groups(num_nodes: int) -> ExpertGroups:
    """All ranks, once for the dispatch and once for the transfers."""
    ranks = list(range(dist.get_world_size()))
    topology = Topology.uniform(len(ranks), num_nodes)
    return ExpertGroups(dist.new_group(ranks), topology, transfers=dist.new_group(ranks))


def make_stack(
    variant: Variant,
    size: StackSize,
    groups: ExpertGroups,
    parameters: Sequence[dict[int, list[torch.nn.Parameter]]],
    pace: Pace | None,
    timeline: Timeline,
    profile: LayerProfile,
) -> LayerStack:
    """A variant's stack; stacks may share parameters."""
    if variant.settings is None:
        return MegatronStack(size, groups, parameters, pace, timeline)
    strategy = build_strategy(variant.strategy, variant.settings)
    groups = replace(groups, ring=strategy.ring(groups.device, groups.topology))
    return RuntimeStack(size, groups, parameters, pace, timeline, strategy=strategy, profile=profile)


def _sample(
    plan: Plan,
    topology: Topology,
    name: tuple[str, str],
    round_number: int,
    iteration: int,
    result: IterationResult,
    moved_bytes: int,
) -> Sample:
    loads = result.loads
    times_s = [
        sum(getattr(load, key) for load in loads)
        for key in ("spag_s", "sprs_s", "spag_exposed_s", "sprs_exposed_s")
    ]
    summed = torch.tensor(times_s, dtype=torch.float64)
    most = torch.tensor([result.seconds, moved_bytes, result.replica_bytes], dtype=torch.float64)
    dist.all_reduce(summed)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    node_D = topology.node_of_device_D
    crosses_DD = node_D[:, None] != node_D[None, :]
    inside_DD = ~crosses_DD & ~np.eye(len(node_D), dtype=bool)
    pairs_DD = result.pairs_LDD.sum(axis=0)
    per_pair = 4 * plan.size.token_bytes
    spag, sprs, spag_exposed, sprs_exposed = summed.tolist()
    # Transposes of each other, and both in the experts' own dtype.
    all_transferred = sum(load.spag_bytes + load.sprs_bytes for load in loads)
    between = 2 * result.spag_inter_node_bytes
    return Sample(
        name[0],
        name[1],
        round_number - plan.warm_up,
        iteration,
        float(most[0]),
        (spag, sprs),
        (spag_exposed, sprs_exposed),
        (int(pairs_DD[crosses_DD].sum()) * per_pair, int(pairs_DD[inside_DD].sum()) * per_pair),
        (between, all_transferred - between),
        int(most[1]),
        int(most[2]),
    )


def _spans(rank: int, name: str, timeline: Timeline, result: IterationResult) -> list[TraceSpan]:
    lanes = [("compute", timeline.spans), ("transfers", result.transfers)]
    return [
        TraceSpan(rank, "waits" if what.startswith("wait") else lane, f"{what} ({name})", begin_s, end_s)
        for lane, spans in lanes
        for what, begin_s, end_s in spans
    ]
