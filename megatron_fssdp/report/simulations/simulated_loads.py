"""The loads of a simulation: from a run's record, or generated for the job.

Shape letters: I iterations, Z micro-batches, L MoE layers, D devices, E experts, N nodes.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np

from megatron_fssdp.config.cluster_description import ClusterDescription
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.loading import unknown_name
from megatron_fssdp.planning.cost.deduplicated_traffic import TokenChoices, expected_hops
from megatron_fssdp.planning.cost.link_seconds import topology_of
from megatron_fssdp.planning.placement.placement import ExpertPlacement, even_owners
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.records.loads import LOADS_FILE, RecordedLoads, read_loads
from megatron_fssdp.simulation.moe_job import MoeJob
from megatron_fssdp.simulation.workloads import MICRO_BATCH_COUNTS, WORKLOADS, fitted_loads, generated_loads

_GENERATED_ITERATIONS = 20

_COMPARED_ITERATIONS = 50
"""Iterations, spread over a record, whose mean estimates different nodes and devices closely enough."""


def loads_for_job(
    source: str, job: MoeJob, chosen: slice = slice(None), seed: int = 0
) -> tuple[RecordedLoads, str]:
    """Read the loads of a run, or generate a workload, with the sizes of a job.

    ``chosen`` are positions of the record's iterations; its end is the number to generate. Return also a note
    on how the loads were generated or scaled, if they were. An unknown name and loads that do not fit the job
    are a ConfigurationError.
    """
    if source in WORKLOADS:
        count = chosen.stop or _GENERATED_ITERATIONS
        counts_ILDE = generated_loads(source, job, count, seed)
        loads = RecordedLoads(counts_ILDE, np.arange(1, count + 1), np.arange(1, job.num_layers + 1))
        return loads, f"loads: generated workload {source}, {WORKLOADS[source].description}"
    path = Path(source)
    if not path.exists():
        raise ConfigurationError(unknown_loads(source))
    found = _read(path).of_iterations(chosen)
    counts, factor = fitted_loads(found.counts_ILDE, job)
    note = "" if factor == 1.0 else f"loads: tokens scaled by {factor:.4g} to the model's batch size"
    return replace(found, counts_ILDE=counts), note


def _read(path: Path) -> RecordedLoads:
    """The loads of a run; those of an ``.npz`` file have an axis of micro-batches behind the iterations."""
    if path.is_dir() or path.name == LOADS_FILE:
        return read_loads(path.parent if path.is_file() else path)
    if path.suffix == ".npz":
        with np.load(path) as file:
            if MICRO_BATCH_COUNTS in file:
                counts_IZLDE = file[MICRO_BATCH_COUNTS]
                numbers = (np.arange(1, 1 + counts_IZLDE.shape[axis]) for axis in (0, 2))
                return RecordedLoads(counts_IZLDE, *numbers)
    raise ConfigurationError(
        f"--loads {path}: is another file, wanted the folder of a run, its {LOADS_FILE}, or an .npz file "
        f"with {MICRO_BATCH_COUNTS}"
    )


def unknown_loads(source: str) -> str:
    """Return the message for loads that are neither of a run nor a workload."""
    return f"--loads: {unknown_name('workload or run', source, WORKLOADS)}; or give the folder of a run"


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
