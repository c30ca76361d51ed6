"""Makes loads that fit the sizes of a job: adapts recorded loads, or generates named workloads.

Shape letters: I iterations, L MoE layers, D devices, E experts.
"""

import numpy as np

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.simulation.moe_job import MoeJob
from megatron_fssdp.simulation.workloads import WORKLOADS, WorkloadShape


def generated_loads(name: str, job: MoeJob, num_iterations: int, seed: int = 0) -> np.ndarray:
    """A workload of ``WORKLOADS`` for every layer of a job: (token, k) pairs, int32 ``[I, L, D, E]``.

    ``seed`` is that of the first layer. Each next layer uses the next number.
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
    """Adapt recorded loads, integers ``[I, L, sources, E]``, to a job with other devices or tokens.

    If the record has fewer source devices than the job, neighbouring devices get the same counts. If it has
    more, the counts of neighbours are added. All counts are then scaled and rounded, so that the mean device
    has the job's number of tokens.

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
    """Counts multiplied by ``factor`` and rounded: int32 of the same shape."""
    return np.rint(counts_ILDE * factor).astype(np.int32)
