"""Jobs of any size for ``host_table.py``, with loads that change from iteration to iteration.

Popularities are log-normal and drift, and every source draws its tokens, so no two iterations are equal.

Shape letters: I iterations, L MoE layers, D devices, E experts.
"""

import numpy as np

from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES
from megatron_fssdp.config.strategy.strategy_settings import PlacementSettings
from megatron_fssdp.simulation.moe_job import MoeJob

LOAD_SIGMA, DRIFT_SIGMA = 1.0, 0.1
"""Standard deviations of the logarithm of popularities, and of its change in one iteration."""


def job_of(num_experts: int, num_devices: int, num_layers: int) -> MoeJob:
    """A job of 2,048 tokens on every device, two experts for each token, and experts of 16 MiB."""
    hidden, inner, tokens = 1024, 4096, 2048
    return MoeJob(
        num_devices=num_devices,
        num_experts=num_experts,
        top_k=2,
        tokens_per_micro_batch=tokens,
        num_micro_batches=1,
        token_bytes=2 * hidden,
        expert_elements=2 * hidden * inner,
        expert_flops_per_token=4.0 * hidden * inner,
        dtype_bytes=2,
        gradient_bytes=4,
        before_layer_flops_L=(0.0,) * num_layers,
        before_gate_flops_L=(tokens * 12.0 * hidden * hidden,) * num_layers,
    )


def drifting_loads(job: MoeJob, num_iterations: int, seed: int = 0) -> np.ndarray:
    """Counts of all layers, int32 ``[I, L, D, E]``."""
    rng = np.random.default_rng(seed)
    log_LE = LOAD_SIGMA * rng.normal(size=(job.num_layers, job.num_experts))
    counts = np.empty((num_iterations, job.num_layers, job.num_devices, job.num_experts), np.int32)
    for counts_LDE in counts:
        for layer, log_E in enumerate(log_LE):
            share_E = np.exp(log_E) / np.exp(log_E).sum()
            counts_LDE[layer] = rng.multinomial(int(job.pairs_per_device), share_E, size=job.num_devices)
        log_LE += DRIFT_SIGMA * rng.normal(size=log_LE.shape)
    return counts


def names() -> list[str]:
    """All strategies that place experts."""
    return [
        name
        for name, entry in STRATEGIES.items()
        if entry.strategy is not None and issubclass(entry.settings, PlacementSettings)
    ]
