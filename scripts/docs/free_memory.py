"""Simulates ``fssdp`` with little free memory: replicas that fit, their life, and speed over ``ep``.

usage: python scripts/docs/free_memory.py --result FILE.json        (a result of benchmarks/results)

A device has room for a model's training with even loads, and a few
GiB more. All layers of the model are on every device, without pipelines, in four micro-batches of one
sequence. Shape letters: I iterations.
"""

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import track

# Another checkout may be installed, but the numbers must be those of this one.
sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.result_file import write_result
from megatron_fssdp.config.cluster_description import ClusterDescription, load_cluster
from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES
from megatron_fssdp.planning.replica_life import ReplicaLife
from megatron_fssdp.simulation.moe_job import job_of_run
from megatron_fssdp.simulation.simulator import StrategyOutcome, device_memory, simulate
from megatron_fssdp.simulation.workloads import generated_loads
from scripts.docs.equal_memory import PAST, run_of

MODELS = {
    "deepseek-v3": 32,
    "qwen3-235b-a22b": 8,
    "qwen3-30b-a3b": 8,
    "mixtral-8x22b": 8,
    "hecate-gpt-moe-s": 8,
}
"""Models, and the ranks of an expert-parallel group."""
FREE_GIB = (1, 2, 4, 8, 16, 80)
MICRO_BATCHES = 4
ANSWER = "With EP 8 and 2 GiB more than even loads need, all models have at least 0.9 of the gain."
LIVES = (ReplicaLife.ITERATION, ReplicaLife.LAYER_PASS)
COLUMNS = (
    *("job", "free GiB", "shown", "kept replicas", "layers that keep", "replicas in a pass"),
    *("layers with passes", "speed over ep", "speed without limit", "part of gain"),
    *("missing GiB", "missing GiB of ep"),
)
"""Numbers of replicas are the most of a layer on a device, and those of layers means of iterations."""


def rows(case: tuple[str, int, str], iterations: int) -> list[list[object]]:
    """The rows of a model and a workload, one for each size of the free memory."""
    model, num_devices, workload = case
    job = replace(job_of_run(run_of(model)), num_devices=num_devices, num_micro_batches=MICRO_BATCHES)
    cluster = load_cluster("h200").model_copy(update={"memory_bytes": None})
    counts_ILDE = generated_loads(workload, job, PAST + iterations)
    even_bytes = device_memory(job, cluster).total_bytes

    def run(name: str, free_gib: float | None) -> tuple[ClusterDescription, StrategyOutcome]:
        limit = None if free_gib is None else even_bytes + int(free_gib * 2**30)
        limited = cluster.model_copy(update={"memory_bytes": limit})
        settings = STRATEGIES[name].settings()
        return limited, simulate(
            name, settings, counts_ILDE[PAST:], limited, job, past_ILDE=counts_ILDE[:PAST]
        )

    _, ep = run("ep", None)
    free = ep.mean_s / run("fssdp", None)[1].mean_s
    table: list[list[object]] = []
    for free_gib in FREE_GIB:
        limited, outcome = run("fssdp", free_gib)
        records = [layer for step in outcome.iterations for layers in step.micro_batches for layer in layers]
        layers = [layer for layer in records if layer.replicas]
        of_lives = [[layer.most_replicas for layer in layers if layer.life is life] for life in LIVES]
        speed = ep.mean_s / outcome.mean_s
        assert limited.memory_bytes is not None
        missing = [result.memory.total_bytes - limited.memory_bytes for result in (outcome, ep)]
        of_ours, of_ep = (max(0, num_bytes) / 2**30 for num_bytes in missing)
        kept, in_pass = (max(used, default=0) for used in of_lives)
        shown = f"{speed:.2f}{'†' if of_ours else ''} ({kept} + {in_pass})"
        layers_kept, layers_in_pass = (round(len(used) / iterations, 1) for used in of_lives)
        gain = round((speed - 1) / (free - 1), 3) if free > 1 else 1.0
        row = [f"{model}, EP {num_devices}, {workload}", f"{free_gib} GiB", shown, kept, layers_kept]
        row += [in_pass, layers_in_pass, round(speed, 3), round(free, 3), gain]
        table.append([*row, round(of_ours, 2), round(of_ep, 2)])
    return table


def main() -> None:
    """Simulate all cases and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--workloads", default="W1,lognormal-medium")
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--result", type=Path)
    options = parser.parse_args()
    cases = [(m, MODELS[m], w) for m in options.models.split(",") for w in options.workloads.split(",")]
    with ProcessPoolExecutor() as pool:
        ordered = pool.map(partial(rows, iterations=options.iterations), cases)
        table = [
            row for some in track(ordered, total=len(cases), console=Console(stderr=True)) for row in some
        ]
    for row in (COLUMNS, *table):
        print("|", *(f"{cell} |" for cell in row))
    if options.result is not None:
        write_result(options.result, "Which replicas fit, and what do they save?", COLUMNS, table, ANSWER)


if __name__ == "__main__":
    main()
