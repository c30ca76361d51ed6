"""Loads at the size of a job: recorded ones fitted to it, named ones generated for it.

Shape letters: I iterations, L MoE layers, D devices, E experts.
"""

import numpy as np

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.simulation.moe_job import MoeJob
from megatron_fssdp.simulation.workloads import WORKLOADS, WorkloadShape


def generated_loads(name: str, job: MoeJob, num_iterations: int, seed: int = 0) -> np.ndarray:
    """A named workload for every layer, each drawn with a seed of its own: int32 [I, L, D, E].

    Args:
        name: A key of ``WORKLOADS``.
        job: For its sizes.
        num_iterations: I.
        seed: Of the first layer.
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
    """Recorded loads for a job that may have another number of devices or tokens.

    Where the record has fewer sources, neighbours share one's; where it has more, theirs are added up.
    All counts are then scaled, and rounded, so that a device has the job's tokens on average.

    Args:
        counts_ILDE: The record.
        job: For its sizes.

    Returns:
        int32 [I, L, D, E], and by how much tokens were scaled (1.0: as recorded).

    Raises:
        ConfigurationError: The record has other layers or experts, or devices that cannot be mapped.
    """
    num_iterations, num_layers, num_sources, num_experts = counts_ILDE.shape
    if (num_layers, num_experts) != (job.num_layers, job.num_experts) or not num_iterations:
        raise ConfigurationError(
            f"--loads: {num_iterations} recorded iterations of {num_layers} MoE layers with {num_experts} "
            f"experts; wanted some of {job.num_layers} layers with {job.num_experts} experts, as --model says"
        )
    wanted = job.num_devices
    if max(wanted, num_sources) % min(wanted, num_sources):
        raise ConfigurationError(
            f"--loads: recorded on {num_sources} devices, the model has parallelism.expert {wanted}; one has "
            "to divide the other"
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
    """Counts times ``factor``, rounded: int32."""
    return np.rint(counts_ILDE * factor).astype(np.int32)
