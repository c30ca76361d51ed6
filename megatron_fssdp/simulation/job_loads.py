"""Makes loads that fit the sizes of a job: adapts recorded loads, or generates named workloads.

Shape letters: I iterations, L MoE layers, D devices, E experts, N nodes.
"""

import numpy as np

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.planning.cost.deduplicated_traffic import TokenChoices, expected_hops
from megatron_fssdp.planning.placement.placement import ExpertPlacement, even_owners
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.simulation.moe_job import MoeJob
from megatron_fssdp.simulation.workloads import WORKLOADS, WorkloadShape

COMPARED_ITERATIONS = 50
"""Most iterations of a record for which different nodes and devices are estimated, spread over the record.

The mean of thousands of tokens hardly changes with more of them.
"""


def generated_loads(name: str, job: MoeJob, num_iterations: int, seed: int = 0) -> np.ndarray:
    """Generate a named workload for every layer, each layer with its own seed.

    Args:
        name: A key of ``WORKLOADS``.
        job: Training job whose sizes the loads have.
        num_iterations: Number of iterations, I.
        seed: Seed of the first layer. Each next layer uses the next number.

    Returns:
        int32 ``[I, L, D, E]``. (token, k) pairs that each source device sends to each expert.
    """
    shape = WorkloadShape(
        num_devices=job.num_devices,
        num_experts=job.num_experts,
        tokens_per_device=max(1, round(job.tokens_per_micro_batch * job.num_micro_batches)),
        top_k=job.top_k,
        num_iterations=num_iterations,
    )
    layers = [WORKLOADS[name].counts(shape, seed + layer) for layer in range(job.num_layers)]
    return np.stack(layers, axis=1).astype(np.int32)


def fitted_loads(counts_ILDE: np.ndarray, job: MoeJob) -> tuple[np.ndarray, float]:
    """Adapt recorded loads to a job that can have another number of devices or tokens.

    If the record has fewer source devices than the job, neighbouring devices get the same counts. If it has
    more, the counts of neighbours are added. All counts are then scaled and rounded, so that the mean device
    has the job's number of tokens.

    Args:
        counts_ILDE: Recorded counts, integers ``[I, L, sources, E]``.
        job: Training job whose sizes the loads must have.

    Returns:
        The adapted counts, int32 ``[I, L, D, E]``, and the factor by which tokens were scaled (1.0: not
        scaled).

    Raises:
        ConfigurationError: The record has other layers or experts than the job, or its number of devices does
            not match.
    """
    num_iterations, num_layers, num_sources, num_experts = counts_ILDE.shape
    if (num_layers, num_experts) != (job.num_layers, job.num_experts) or not num_iterations:
        raise ConfigurationError(
            f"--loads: got {num_iterations} recorded iterations of {num_layers} MoE layers with "
            f"{num_experts} experts, wanted at least one of {job.num_layers} layers with {job.num_experts} "
            "experts, as in --model; give the run's own model"
        )
    wanted = job.num_devices
    if max(wanted, num_sources) % min(wanted, num_sources):
        raise ConfigurationError(
            f"--loads: got a record of {num_sources} devices, but the model has "
            f"parallelism.expert_model_parallel_size {wanted}; one must divide the other, so change it"
        )
    if wanted < num_sources:
        counts_ILDE = counts_ILDE.reshape(num_iterations, num_layers, wanted, -1, num_experts).sum(axis=3)
    elif wanted > num_sources:
        counts_ILDE = np.repeat(counts_ILDE, wanted // num_sources, axis=2)
    mean = float(counts_ILDE.sum(axis=3, dtype=np.int64).mean())
    if mean <= 0:
        raise ConfigurationError("--loads: the record has no tokens; record the run again")
    factor = job.pairs_per_device / mean
    if abs(factor - 1) < 1e-3:
        return counts_ILDE.astype(np.int32, copy=False), 1.0
    return scaled_loads(counts_ILDE, factor), factor


def scaled_loads(counts_ILDE: np.ndarray, factor: float) -> np.ndarray:
    """Return counts multiplied by ``factor`` and rounded: int32 of the same shape."""
    return np.rint(counts_ILDE * factor).astype(np.int32)


def recorded_choices(
    counts_ILDE: np.ndarray,
    by_nodes_ILN: np.ndarray | None,
    by_devices_ILD: np.ndarray | None,
    topology: Topology,
    top_k: int,
) -> TokenChoices | None:
    """Compare the nodes and devices of a record's tokens with their estimate from the loads.

    Both belong to the owners of plain expert parallelism.

    Args:
        counts_ILDE: (token, k) pairs of each source device and expert, integers ``[I, L, D, E]``.
        by_nodes_ILN: Tokens with experts on 1, 2, … N nodes, integers ``[I, L, N]``, or None.
        by_devices_ILD: Tokens with experts on 1, 2, … D devices, integers ``[I, L, D]``, or None.
        topology: Nodes of the job's devices.
        top_k: Number of experts of each token.

    Returns:
        The factors by which the record differs from the estimate. None if the record does not know it, or if
        it knows it for other numbers of nodes or devices than the job has.
    """
    if by_nodes_ILN is None or by_devices_ILD is None:
        return None
    shape = (by_nodes_ILN.shape[2], by_devices_ILD.shape[2])
    known_I = np.flatnonzero(by_nodes_ILN.any(axis=(1, 2)))
    if shape != (topology.num_nodes, topology.num_devices) or not len(known_I):
        return None
    known_I = known_I[:: -(-len(known_I) // COMPARED_ITERATIONS)]
    num_experts, num_tokens = counts_ILDE.shape[3], counts_ILDE[known_I].sum() / top_k
    owners = ExpertPlacement.owners_only(even_owners(num_experts, topology.num_devices), topology.num_devices)
    estimated = np.zeros(2)
    for counts_DE in counts_ILDE[known_I].reshape(-1, topology.num_devices, num_experts):
        hops = expected_hops(counts_DE, owners, topology, TokenChoices(top_k))
        estimated += hops.tokens_DN.sum(), hops.tokens_DD.sum()
    recorded = np.array([_mean_places(histogram[known_I]) for histogram in (by_nodes_ILN, by_devices_ILD)])
    node_factor, device_factor = recorded * num_tokens / estimated
    return TokenChoices(top_k, float(node_factor), float(device_factor))


def _mean_places(tokens: np.ndarray) -> float:
    """Mean of a histogram over 1, 2, … places, which are its last axis."""
    numbers = np.arange(1, tokens.shape[-1] + 1)
    return float((tokens * numbers).sum() / tokens.sum())
