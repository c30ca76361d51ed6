"""Compares ``fssdp`` with the best other strategy in simulation: clusters × models × workloads, equal memory.

usage: python scripts/docs/equal_memory.py --result FILE.json       (a result of benchmarks/results)

Every shipped cluster runs every shipped model on all its devices, or on as many as its experts can be divided
by, under every generated workload. Models whose layers have the same sizes are one case. One layer is
simulated. Equal memory means equal slots: every strategy that places replicas may hold ``--slots`` replicas
of a layer on a device, and nothing else differs. Resident replicas (``flexmoe``) need more memory than that,
because they have optimizer states. The host's time of planning is left out unless ``--host`` is given.

It prints how many cases have ``fssdp`` at least ``--least`` times as fast as the best other strategy, and the
other cases, the worst first. Shape letters: I iterations.
"""

import argparse
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track

# Another checkout may be installed, but the numbers must be those of this one.
sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.result_file import write_result
from megatron_fssdp.config.cluster_description import load_cluster
from megatron_fssdp.config.run.composition import load_run
from megatron_fssdp.config.run.run_config import RunConfig
from megatron_fssdp.config.shipped_files import known_clusters, shipped_runs
from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES
from megatron_fssdp.simulation.moe_job import MoeJob, job_of_run
from megatron_fssdp.simulation.simulator import simulate
from megatron_fssdp.simulation.workloads import WORKLOADS, generated_loads

OTHERS = ("ep", "prophet", "fastermoe", "quota", "flexmoe", "smartmoe")
LEAST_TOKENS = 8192
"""Fewest tokens of a device in an iteration, as micro-batches of whole sequences."""
PAST = 3
"""Iterations before the simulated ones, so that costs are measured and a history exists."""


@dataclass(frozen=True)
class Case:
    """Names of a cluster, a model and a workload."""

    cluster: str
    model: str
    workload: str


@dataclass(frozen=True)
class Compared:
    """Mean seconds of an iteration under ``fssdp`` and under the best other strategy, and its name."""

    case: Case
    num_devices: int
    ours_s: float
    best_s: float
    best: str

    @property
    def speed(self) -> float:
        """Speed of ``fssdp`` divided by that of the best other strategy."""
        return self.best_s / self.ours_s


def run_of(model: str, sequences: int = 1) -> RunConfig:
    """A run of a model on one device with so many sequences; only the sizes of its layers are used."""
    parts = (f"models/{model}", "parallelism/h200", "training/measure")
    one_device = (
        "parallelism.num_nodes=1",
        "parallelism.nproc_per_node=1",
        "parallelism.expert_model_parallel_size=1",
    )
    return load_run(
        [Path(part) for part in parts],
        (*one_device, f"training.micro_batch_size={sequences}", f"training.global_batch_size={sequences}"),
    )


def layer_job(model: str, cluster: str, *, with_host: bool = False) -> MoeJob:
    """One MoE layer of a model on as many devices of a cluster as its experts can be divided by."""
    run = run_of(model)
    assert run.model.num_experts is not None
    num_devices, per_node = load_cluster(cluster).num_devices, load_cluster(cluster).devices_per_node
    while run.model.num_experts % num_devices or (num_devices > per_node and num_devices % per_node):
        num_devices -= 1
    job = job_of_run(run_of(model, -(-LEAST_TOKENS // run.model.seq_length)))
    return replace(
        job,
        num_devices=num_devices,
        num_micro_batches=1,
        before_layer_flops_L=(0.0,),
        before_gate_flops_L=job.before_gate_flops_L[-1:],
        after_layers_flops=0.0,
        reduces_at_end=False,
        host=job.host if with_host else None,
    )


def compared(case: Case, slots: int, iterations: int, with_host: bool) -> Compared:
    """Simulate a case under all strategies."""
    job, cluster = layer_job(case.model, case.cluster, with_host=with_host), load_cluster(case.cluster)
    # Nothing depends on the free memory, because the slots are given.
    cluster = cluster.model_copy(update={"memory_bytes": None})
    counts_ILDE = generated_loads(case.workload, job, PAST + iterations)

    def mean_s(name: str) -> float:
        known = STRATEGIES[name].settings
        settings = known.model_validate({"slots": slots} if "slots" in known.model_fields else {})
        outcome = simulate(name, settings, counts_ILDE[PAST:], cluster, job, past_ILDE=counts_ILDE[:PAST])
        return outcome.mean_s

    exchanges = job.num_experts > job.num_devices > 1
    others = {name: mean_s(name) for name in OTHERS if name != "smartmoe" or exchanges}
    best = min(others, key=lambda name: others[name])
    return Compared(case, job.num_devices, mean_s("fssdp"), others[best], best)


def all_cases(clusters: list[str], models: list[str], workloads: list[str]) -> Iterator[Case]:
    """All cases; models whose layers have the same sizes on a cluster are one."""
    for cluster in clusters:
        seen: set[MoeJob] = set()
        for model in models:
            job = replace(layer_job(model, cluster), dense_elements=0, activation_bytes=0.0)
            if job not in seen and job.num_devices > 1:
                seen.add(job)
                yield from (Case(cluster, model, workload) for workload in workloads)


def moe_models() -> list[str]:
    """Names of the shipped models that have experts."""
    names = [name.removeprefix("models/") for name in shipped_runs() if name.startswith("models/")]
    return [name for name in names if run_of(name).model.num_experts]


def by_workload(results: list[Compared], least: float) -> list[tuple[str, int, int, float, float]]:
    """For each workload: cases, cases at least ``least`` times as fast, median and worst speed."""
    rows = []
    for workload in dict.fromkeys(result.case.workload for result in results):
        speeds = [result.speed for result in results if result.case.workload == workload]
        reached = sum(speed >= least for speed in speeds)
        rows.append(
            (workload, len(speeds), reached, round(float(np.median(speeds)), 4), round(min(speeds), 4))
        )
    return rows


def report(results: list[Compared], least: float) -> str:
    """The rows by workload and the list of cases below ``least``, as Markdown."""
    lines = ["| workload | cases | reached | median | worst |", "|---|---|---|---|---|"]
    lines += [f"| {' | '.join(map(str, row))} |" for row in by_workload(results, least)]
    below = sorted((result for result in results if result.speed < least), key=lambda result: result.speed)
    reached = len(results) - len(below)
    lines += [
        "",
        f"`fssdp` ≥ {least} × the best other strategy: {reached} of {len(results)} cases "
        f"({100 * reached / len(results):.1f} %).",
        "",
        "| cluster | model | devices | workload | best other | `fssdp` / best |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {result.case.cluster} | {result.case.model} | {result.num_devices} | {result.case.workload} | "
        f"{result.best} | {result.speed:.3f} |"
        for result in below
    ]
    return "\n".join(lines)


def main() -> None:
    """Print the table and the list."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clusters", nargs="*", default=None, help="default: all shipped ones")
    parser.add_argument("--models", nargs="*", default=None, help="default: all shipped ones with experts")
    parser.add_argument("--workloads", nargs="*", default=list(WORKLOADS))
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--host", action="store_true", help="count the host's time of planning")
    parser.add_argument("--least", type=float, default=0.99)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--result", type=Path, help="file for benchmarks/results")
    given = parser.parse_args()
    models = given.models or moe_models()
    cases = list(all_cases(given.clusters or list(known_clusters()), models, given.workloads))
    print(f"{len(cases)} cases, {given.slots} slots, {given.iterations} iterations", flush=True)
    run = partial(compared, slots=given.slots, iterations=given.iterations, with_host=given.host)
    with ProcessPoolExecutor(given.processes) as pool:
        progress = track(pool.map(run, cases, chunksize=8), total=len(cases), console=Console(stderr=True))
        results = list(progress)
    print(report(results, given.least))
    if given.result:
        question = "How fast is fssdp, compared with the best other strategy with equal slots?"
        columns = ("workload", "cases", f"cases of at least {given.least}", "median speed", "worst speed")
        write_result(given.result, question, columns, by_workload(results, given.least))


if __name__ == "__main__":
    main()
