"""The loads of a simulation: recorded, or generated for the job.

Shape letters: I iterations, Z micro-batches, L MoE layers, D devices, E experts, N nodes.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np

from megatron_fssdp.config.cluster_description import ClusterDescription
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.loading import unknown_name
from megatron_fssdp.config.run.run_config import RunConfig
from megatron_fssdp.config.strategy.strategy_registry import BASELINE, STRATEGIES
from megatron_fssdp.planning.cost.deduplicated_traffic import TokenChoices, expected_hops
from megatron_fssdp.planning.cost.link_seconds import topology_of
from megatron_fssdp.planning.placement.placement import ExpertPlacement, even_owners
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.records.load_sources import read_any_loads
from megatron_fssdp.records.loads import RecordedLoads
from megatron_fssdp.records.rank_traces import RoutedModel
from megatron_fssdp.simulation.layout import cluster_of_devices, stages_of
from megatron_fssdp.simulation.moe_job import MoeJob, job_of_run
from megatron_fssdp.simulation.simulator import simulate
from megatron_fssdp.simulation.workloads import WORKLOADS, fitted_loads, generated_loads

_GENERATED_ITERATIONS = 20

_COMPARED_ITERATIONS = 50
"""Iterations, spread over a record, whose mean estimates different nodes and devices closely enough."""


def loads_for_job(
    source: str, job: MoeJob, chosen: slice = slice(None), seed: int = 0
) -> tuple[RecordedLoads, str]:
    """Read loads of any kind, or generate a workload, with the sizes of a job.

    ``chosen`` are positions of the record's iterations; its end is the number to generate. Return also a note
    on how the loads were generated, read or scaled, if they were. An unknown name and loads that do not fit
    the job are a ConfigurationError.
    """
    if source in WORKLOADS:
        count = chosen.stop or _GENERATED_ITERATIONS
        counts_ILDE = generated_loads(source, job, count, seed)
        loads = RecordedLoads(counts_ILDE, np.arange(1, count + 1), np.arange(1, job.num_layers + 1))
        return loads, f"loads: generated workload {source}, {WORKLOADS[source].description}"
    path = Path(source)
    if not path.exists():
        raise ConfigurationError(unknown_loads(source))
    model = RoutedModel(job.num_layers, job.num_experts, job.top_k)
    loads, how = read_any_loads(path, model, None if chosen.start else chosen.stop)
    loads = loads.of_iterations(chosen)
    counts, factor = fitted_loads(loads.counts_ILDE, job)
    scaled = "" if factor == 1.0 else f"tokens scaled by {factor:.4g} to the model's batch size"
    sources, devices = loads.counts_ILDE.shape[-2], counts.shape[-2]
    spread = "" if sources == devices else f"source devices of the record {sources}, of the model {devices}"
    note = "; ".join(filter(None, (how, spread, scaled)))
    return replace(loads, counts_ILDE=counts), note and f"loads: {note}"


def simulated_stage(
    run: RunConfig, record: RecordedLoads, cluster: ClusterDescription, asked: int | None = None
) -> tuple[MoeJob, RecordedLoads, ClusterDescription, str]:
    """Choose one pipeline stage of a run, by default the slowest: its job, loads and cluster, and a sentence.

    The slowest one has the most modelled seconds under plain expert parallelism with the mean loads of the
    record, which is of all MoE layers. Devices of the cluster have whole experts.

    Raises:
        ConfigurationError: The stage that is asked for does not exist, or no expert is in it.
    """
    stages, is_moe_L = stages_of(run), np.array(run.model.moe_layers)
    cluster = cluster_of_devices(cluster, run.parallelism.expert_tensor_size)
    if asked is not None and asked >= len(stages):
        raise ConfigurationError(
            f"--stage: got {asked}, wanted 0 to {len(stages) - 1}, as in the run's pipeline"
        )
    if len(stages) == 1:
        return job_of_run(run), record, cluster, ""
    jobs, seconds = dict[int, tuple[MoeJob, RecordedLoads]](), dict[int, float]()
    for stage in stages:
        layers = [layer for layer, _ in stage.layers if is_moe_L[layer]]
        if layers:
            job, loads = job_of_run(run, stage), record.of_layers((is_moe_L.cumsum()[layers] - 1).tolist())
            mean = np.rint(loads.counts_ILDE.mean(axis=0, keepdims=True)).astype(np.int32)
            number = stage.pipeline.stage
            jobs[number] = job, loads
            if asked is None:
                seconds[number] = simulate(
                    BASELINE, STRATEGIES[BASELINE].settings(), mean, cluster, job
                ).mean_s
    if asked is not None and asked not in jobs:
        raise ConfigurationError(f"--stage: got {asked}, which has no MoE layers, wanted one of {[*jobs]}")
    number = max(seconds, key=seconds.__getitem__) if asked is None else asked
    words = f"pipeline stage {number} of 0 to {len(stages) - 1} is simulated, MoE layers: "
    words += f"{jobs[number][0].num_layers}"
    if asked is None:
        least = min(seconds.values()) / seconds[number]
        words += (
            f". It is the slowest of those with experts under ep; the fastest takes {least:.0%} of its time"
        )
    return *jobs[number], cluster, words


def unknown_loads(source: str) -> str:
    """Return the message for loads that are neither of a run nor a workload."""
    name = unknown_name("workload or run", source, WORKLOADS)
    return f"--loads: {name}; or give the folder of a run or of traces, or a .npy or .csv file"


def with_recorded_choices(
    job: MoeJob, record: RecordedLoads, cluster: ClusterDescription
) -> tuple[MoeJob, str]:
    """Add to a job what its record knows about different nodes and devices of a token.

    Return also where these numbers come from. A job that does not fit the cluster raises a ValueError.
    """
    choices = recorded_choices(record, topology_of(cluster, job.num_devices), job.top_k)
    if choices is None:
        return job, "estimated from the loads"
    if job.choices is not None:
        choices = replace(choices, is_fused=job.choices.is_fused)
    factors = f"{choices.node_factor:.3f} and {choices.device_factor:.3f} times the estimate from the loads"
    return replace(job, choices=choices), f"as recorded, {factors}"


def recorded_choices(record: RecordedLoads, topology: Topology, top_k: int) -> TokenChoices | None:
    """Return the factors by which the nodes and devices of a record's tokens differ from their estimate.

    Both are of plain expert parallelism. None: not recorded, or for other numbers of nodes or devices.
    """
    if record.by_nodes_ILN is None or record.by_devices_ILD is None:
        return None
    histograms = record.by_nodes_ILN, record.by_devices_ILD
    known_I = np.flatnonzero(record.by_nodes_ILN.any(axis=(1, 2)))
    num_places = tuple(histogram.shape[2] for histogram in histograms)
    if num_places != (topology.num_nodes, topology.num_devices) or not len(known_I):
        return None
    known_I = known_I[:: -(-len(known_I) // _COMPARED_ITERATIONS)]
    counts_ILDE = record.counts_ILDE[known_I]
    num_experts = counts_ILDE.shape[3]
    owners = ExpertPlacement.owners_only(even_owners(num_experts, topology.num_devices), topology.num_devices)
    estimated = np.zeros(2)
    for counts_DE in counts_ILDE.reshape(-1, topology.num_devices, num_experts):
        hops = expected_hops(counts_DE, owners, topology, TokenChoices(top_k))
        estimated += hops.tokens_DN.sum(), hops.tokens_DD.sum()
    # Means of histograms over 1, 2, … places, which are the last axis.
    means = [
        np.average(np.arange(1, places + 1), weights=tokens[known_I].sum(axis=(0, 1)))
        for places, tokens in zip(num_places, histograms, strict=True)
    ]
    node_factor, device_factor = np.array(means) * counts_ILDE.sum() / top_k / estimated
    return TokenChoices(top_k, float(node_factor), float(device_factor))
