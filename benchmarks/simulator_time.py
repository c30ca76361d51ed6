"""Times the simulator: CPU seconds of a long simulation, and of one layer-iteration on many devices.

Run: ``python -m benchmarks.simulator_time`` for 64 experts on 32 devices, and with ``--experts 512 --devices
4096 --layers 1 --iterations 4`` for one layer-iteration of that size. Few iterations are simulated. The
seconds of 1,000 iterations of 24 layers are computed from the difference of two runs, so that what happens
once does not count. Popularities are log-normal and drift from iteration to iteration, and every source draws
its tokens, so no two iterations are equal.

Shape letters: I iterations, L MoE layers, D devices, E experts.
"""

import argparse
import time
from pathlib import Path

import numpy as np

from benchmarks.result_file import write_result
from megatron_fssdp.config.cluster_files import load_cluster
from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES
from megatron_fssdp.config.strategy.strategy_settings import PlacementSettings
from megatron_fssdp.planning.compiled_form import kernel_form
from megatron_fssdp.simulation.moe_job import MoeJob
from megatron_fssdp.simulation.simulator import simulate

FULL_ITERATIONS, FULL_LAYERS = 1000, 24
HISTORY_ITERATIONS = 4
"""Iterations before the measured ones. Strategies that measure first have a profile from the start."""

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


def cpu_s(name: str, counts_ILDE: np.ndarray, job: MoeJob, devices_per_node: int, slots: int | None) -> float:
    """CPU seconds of simulating a strategy; the first iterations are its past."""
    cluster = load_cluster("h200")
    num_nodes = max(1, job.num_devices // devices_per_node)
    cluster = cluster.model_copy(update={"num_nodes": num_nodes, "devices_per_node": devices_per_node})
    known = STRATEGIES[name].settings
    keys = {} if slots is None or "slots" not in known.model_fields else {"slots": slots}
    past, counts = counts_ILDE[:HISTORY_ITERATIONS], counts_ILDE[HISTORY_ITERATIONS:]
    started_s = time.process_time()
    simulate(name, known.model_validate(keys), counts, cluster, job, past_ILDE=past)
    return time.process_time() - started_s


def names() -> list[str]:
    """All strategies that place experts."""
    return [
        name
        for name, entry in STRATEGIES.items()
        if entry.strategy is not None and issubclass(entry.settings, PlacementSettings)
    ]


def main() -> None:
    """Print a line for each strategy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--devices", type=int, default=32)
    parser.add_argument("--devices-per-node", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=24)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--slots", type=int, default=None, help="slots of a device; default: measured")
    parser.add_argument("--strategies", default=",".join(names()))
    parser.add_argument("--result", type=Path, help="file for benchmarks/results")
    given = parser.parse_args()
    job = job_of(given.experts, given.devices, given.layers)
    counts_ILDE = drifting_loads(job, given.iterations + HISTORY_ITERATIONS)
    print(f"{given.experts} experts on {given.devices} devices; planning kernels: {kernel_form()}")
    num_measured = given.layers * (given.iterations - given.iterations // 2)
    rows = []
    for name in given.strategies.split(","):
        half = counts_ILDE[: HISTORY_ITERATIONS + given.iterations // 2]
        arguments = (job, given.devices_per_node, given.slots)
        cpu_s(name, counts_ILDE[: HISTORY_ITERATIONS + 1], *arguments)
        layer_s = (cpu_s(name, counts_ILDE, *arguments) - cpu_s(name, half, *arguments)) / num_measured
        full_s = layer_s * FULL_ITERATIONS * FULL_LAYERS
        print(
            f"{name:<10} {1e3 * layer_s:9.3f} ms for a layer in an iteration, {full_s:8.1f} s for "
            f"{FULL_ITERATIONS} iterations of {FULL_LAYERS} layers",
            flush=True,
        )
        rows.append((name, round(1e3 * layer_s, 3), round(full_s, 1)))
    if given.result:
        question = f"How long does the simulator take, {given.experts} experts, {given.devices} devices?"
        columns = ("strategy", "ms of a layer-iteration", f"s of {FULL_ITERATIONS} × {FULL_LAYERS} of them")
        write_result(given.result, question, columns, rows)


if __name__ == "__main__":
    main()
