"""Runs variants and workloads in random turns on the ranks, and measures each iteration.

Shape letters: L layers, I iterations, Z micro-batches, D devices, E experts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.testbed.layer_stack import IterationResult, LayerStack, make_parameters
from benchmarks.testbed.nodes.links import INTERFACE, sent_and_received_bytes
from benchmarks.testbed.slot_stack import SlotStack
from benchmarks.testbed.stack_inputs import IterationInput, Pace, StackSize
from megatron_fssdp.config.cluster_description import ClusterDescription
from megatron_fssdp.config.strategy.strategy_settings import PlacementSettings
from megatron_fssdp.megatron_adapter.diagnosis.cluster_profiler import ProfileSettings, measure_cluster
from megatron_fssdp.planning.cost.layer_profile import LayerProfile
from megatron_fssdp.planning.loads import max_over_mean
from megatron_fssdp.planning.placement.placement import even_owners
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.runtime.experts.expert_layout import ParametersByExpert
from megatron_fssdp.runtime.layers.expert_groups import ExpertGroups
from megatron_fssdp.strategies.registry import build_strategy


@dataclass(frozen=True)
class Variant:
    """One strategy with settings that a run measures."""

    name: str  # in reports
    strategy: str  # ``none``, or the name of a placement strategy
    settings: PlacementSettings | None = None  # None for ``none``


@dataclass(frozen=True)
class Sample:
    """One measured iteration."""

    workload: str
    variant: str
    repetition: int  # from 0; warm-ups have no number
    iteration: int  # index in the workload, from 0, warm-ups included
    seconds: float  # of the slowest rank
    cpu_s: float  # seconds of a core that the thread of a rank's passes used, averaged over ranks
    transfer_s: tuple[float, float]  # of spAG and spRS on the transfer lanes, summed over ranks and layers
    exposed_s: tuple[float, float]  # the part of transfer_s in which the rank's compute waited
    dispatch_bytes: tuple[int, int]
    """Bytes of hidden states in the four all-to-alls, between and inside nodes, by the forward routing."""
    transfer_bytes: tuple[int, int]  # of spAG and spRS together, between and inside nodes, from the plans
    node_bytes: int
    """Most bytes that one node's interface sent or received, headers included. 0 without namespaces."""
    replica_bytes: int
    """Largest memory of replicas on a rank: parameters of all layers and gradients of one layer."""
    loads: tuple[float, ...]  # max/mean device load of every micro-batch and layer


@dataclass(frozen=True)
class Plan:
    """Settings of a measurement."""

    size: StackSize
    pace: Pace
    profile: LayerProfile  # costs that strategies know, for an iteration of one micro-batch
    num_nodes: int  # equal nodes of the ranks
    variants: tuple[Variant, ...]  # in the order of reports
    counts: Mapping[str, np.ndarray]  # assignments of every workload, int64 [L, I, Z, D, E]
    repetitions: int  # measured iterations of every pair of workload and variant
    warm_up: int  # unmeasured iterations before them, which fill the load history
    seed: int  # of the turns and of the tokens
    namespaces: bool  # whether nodes have their own network interfaces


@dataclass
class Cell:
    """One workload under one variant on this rank."""

    stack: LayerStack
    counts_LIZDE: np.ndarray
    num_done: int = 0


def measure(plan: Plan) -> list[Sample]:
    """Measure all pairs of workload and variant once in each round. Every round has a new random order.

    This function runs on every rank. The samples are the same on all ranks.
    """
    torch.set_num_threads(1)
    rank = dist.get_rank()
    groups = make_groups(plan.num_nodes)
    owned = np.flatnonzero(even_owners(plan.size.num_experts, groups.num_devices) == rank).tolist()
    parameters = make_parameters(plan.size, owned)
    samples: list[Sample] = []
    cells = {
        (workload, variant.name): Cell(
            make_stack(
                *(variant, plan.size, groups, parameters, plan.pace),
                micro_batch_profile(plan.profile, counts_LIZDE.shape[2]),
            ),
            counts_LIZDE,
        )
        for workload, counts_LIZDE in plan.counts.items()
        for variant in plan.variants
    }
    order = np.random.default_rng(plan.seed)  # the same on all ranks
    names = list(cells)
    for round_number in range(plan.warm_up + plan.repetitions):
        for choice in order.permutation(len(names)):
            name = names[choice]
            cell = cells[name]
            counts_LZE = cell.counts_LIZDE[:, cell.num_done, :, rank]
            # All variants of a workload get the same tokens.
            seed = (plan.seed, list(plan.counts).index(name[0]), cell.num_done, rank)
            inputs = IterationInput.draw(counts_LZE.swapaxes(0, 1), plan.size, seed)
            dist.barrier()
            before = sent_and_received_bytes(INTERFACE) if plan.namespaces else (0, 0)
            result = cell.stack.run(inputs)
            after = sent_and_received_bytes(INTERFACE) if plan.namespaces else (0, 0)
            moved = max(after[0] - before[0], after[1] - before[1])
            sample = _sample(plan, groups.topology, name, round_number, cell.num_done, result, moved)
            cell.num_done += 1
            if round_number >= plan.warm_up:
                samples.append(sample)
        if rank == 0:
            number = round_number - plan.warm_up + 1
            phase = f"repetition {number} of {plan.repetitions}" if number > 0 else "warm-up"
            print(f"[testbed] {phase} done", flush=True)
    return samples


def make_groups(num_nodes: int) -> ExpertGroups:
    """Make two process groups of all ranks: one for the dispatch and one for the transfers."""
    ranks = list(range(dist.get_world_size()))
    topology = Topology.uniform(len(ranks), num_nodes)
    dispatch, transfers = dist.new_group(ranks), dist.new_group(ranks)
    assert isinstance(dispatch, dist.ProcessGroup)
    assert isinstance(transfers, dist.ProcessGroup)
    return ExpertGroups(dispatch, topology, transfers=transfers)


def micro_batch_profile(profile: LayerProfile, num_micro_batches: int) -> LayerProfile:
    """The costs if the tokens of an iteration are divided among so many micro-batches."""
    before_s = profile.non_moe_s / num_micro_batches
    return replace(profile, non_moe_s=before_s, num_micro_batches=num_micro_batches)


def make_stack(
    variant: Variant,
    size: StackSize,
    groups: ExpertGroups,
    parameters: Sequence[ParametersByExpert],
    pace: Pace | None,
    profile: LayerProfile,
) -> LayerStack:
    """Make the layer stack of a variant. Several stacks can share parameters."""
    if variant.settings is None:
        return LayerStack(size, groups, parameters, pace)
    strategy = build_strategy(variant.strategy, variant.settings)
    return SlotStack(size, groups, parameters, pace, strategy=strategy, profile=profile)


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
    summed = torch.tensor([*times_s, result.cpu_s], dtype=torch.float64)
    most = torch.tensor([result.seconds, moved_bytes, result.replica_bytes], dtype=torch.float64)
    dist.all_reduce(summed)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    node_D = topology.node_of_device_D
    crosses_DD = node_D[:, None] != node_D[None, :]
    inside_DD = ~crosses_DD & ~np.eye(len(node_D), dtype=bool)
    pairs_DD = result.pairs_ZLDD.sum((0, 1)).numpy()
    loads_D = result.pairs_ZLDD.sum(2).flatten(0, 1).numpy()
    per_pair = 4 * plan.size.token_bytes
    spag, sprs, spag_exposed, sprs_exposed, cpu_s = summed.tolist()
    # spAG and spRS are transposes of each other, and both use the data type of the experts.
    all_transferred = sum(load.spag_bytes + load.sprs_bytes for load in loads)
    between = 2 * result.spag_inter_node_bytes
    return Sample(
        name[0],
        name[1],
        round_number - plan.warm_up,
        iteration,
        float(most[0]),
        cpu_s / len(node_D),
        (spag, sprs),
        (spag_exposed, sprs_exposed),
        (int(pairs_DD[crosses_DD].sum()) * per_pair, int(pairs_DD[inside_DD].sum()) * per_pair),
        (between, all_transferred - between),
        int(most[1]),
        int(most[2]),
        tuple(round(max_over_mean(load_D), 3) for load_D in loads_D),
    )


def profile_nodes(name: str, num_nodes: int, repetitions: int, flops_per_s: float) -> ClusterDescription:
    """Measure the links between and inside nodes as ``megatron-fssdp profile`` does. Runs on every rank."""
    torch.set_num_threads(1)
    settings = ProfileSettings(name, num_nodes, "gloo", most_bytes=1 << 24, num_repetitions=repetitions)
    cluster = measure_cluster(
        settings, num_nodes, torch.device("cpu"), dist.get_world_size(), lambda line: print(line, flush=True)
    )
    compute = {"expert_flops_per_s": flops_per_s, "non_expert_flops_per_s": flops_per_s}
    sources = cluster.sources | dict.fromkeys(compute, "the testbed's pace")
    return cluster.model_copy(update={**compute, "sources": sources})
