"""Print the Markdown tables of docs/choosing.md, computed by the simulator; takes some minutes.

usage: python scripts/docs/break_even_table.py [JOB…]           (without JOB: all jobs)
"""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from megatron_fssdp.cli.analysis.simulate_command import SimulateRequest, run_simulation
from megatron_fssdp.config.cluster_files import load_cluster
from megatron_fssdp.config.run.composition import load_run
from megatron_fssdp.planning.replica_life import ReplicaLife
from megatron_fssdp.report.simulations.simulation_report import RankedStrategy, SimulationReport
from megatron_fssdp.report.units import format_memory
from megatron_fssdp.simulation.break_even import BreakEven
from megatron_fssdp.simulation.device_memory import device_memory
from megatron_fssdp.simulation.moe_job import job_of_run

STRATEGIES = ("fssdp", "prophet", "quota", "fastermoe", "flexmoe", "smartmoe")
WORKLOADS = {
    "W0": "balanced",
    "lognormal-medium": "uneven, steady",
    "W3": "one hot expert",
    "W6": "moving hot device",
}
SEARCHED = "lognormal-medium"
"""The workload under which the break-even values are searched."""
RARE = ("flexmoe", "smartmoe")
"""Strategies that act every 25 iterations. The search simulates only a few iterations, so it skips them."""
ITERATIONS = 100
FOUR_LAYERS = ("model.num_layers=4",)
"""Changes of a model to simulate four of its MoE layers, which stand for all: only their loads differ."""


@dataclass(frozen=True)
class WholeModel:
    """Memory of a job whose layers are represented by a few simulated ones.

    Parameters, activations and replicas grow with the number of layers. So the memory that replicas and
    uneven loads add to the simulated layers, times :attr:`factor`, is what they add to the whole model.

    Attributes:
        base_bytes: Peak memory of the whole model with even loads and without replicas, in bytes.
        simulated_base_bytes: The same for the simulated layers.
        capacity_bytes: Memory of a device, in bytes.
        factor: Number of layers of the model per simulated layer.
    """

    base_bytes: int
    simulated_base_bytes: int
    capacity_bytes: int
    factor: float

    @property
    def simulated_capacity_bytes(self) -> int:
        """Memory of a device for the simulated layers, so that each layer has its part of free memory."""
        return int(self.simulated_base_bytes + (self.capacity_bytes - self.base_bytes) / self.factor)

    def gib(self, simulated_bytes: int) -> float:
        """Return the memory of the whole model in GiB, from that of the simulated layers in bytes."""
        return (self.base_bytes + self.factor * (simulated_bytes - self.simulated_base_bytes)) / 2**30


@dataclass(frozen=True)
class Job:
    """A model that is trained on a cluster.

    Attributes:
        title: Description of the job, as it stands above its table.
        cluster: Name of a cluster in ``configs/clusters``.
        parts: Names of the shipped configuration files that make up the run.
        overrides: ``key=value`` settings that replace values of these files.
        slots: Largest number of replicas of a layer on a device, or None for as many as fit into memory.
        few_layers: ``key=value`` settings that leave the simulated layers of the model.
    """

    title: str
    cluster: str
    parts: tuple[str, ...]
    overrides: tuple[str, ...]
    slots: int | None = None
    few_layers: tuple[str, ...] = FOUR_LAYERS

    def request(self, workload: str, out: Path, iterations: int) -> SimulateRequest:
        """Return the request to simulate all strategies with their default settings, except for ``slots``."""
        return SimulateRequest(
            loads=workload,
            cluster=self.cluster,
            models=[Path(part) for part in self.parts],
            strategies=("ep", *STRATEGIES),
            out=out,
            iterations=iterations,
            overrides=(*self.overrides, *self.few_layers),
            cluster_overrides=(f"memory_bytes={self.whole_model.simulated_capacity_bytes}",),
            strategy_overrides=() if self.slots is None else (f"slots={self.slots}",),
            with_break_even=workload == SEARCHED,
            with_plots=False,
        )

    @property
    def whole_model(self) -> WholeModel:
        """Memory of the whole model and of its simulated layers.

        Raises:
            ValueError: A device does not have the memory that the job needs with even loads.
        """
        cluster = load_cluster(self.cluster)
        jobs = [
            job_of_run(load_run([Path(part) for part in self.parts], (*self.overrides, *more)))
            for more in ((), self.few_layers)
        ]
        whole, few = (
            device_memory(job, cluster, slots=0, life=ReplicaLife.ITERATION).total_bytes for job in jobs
        )
        if cluster.memory_bytes is None or whole > cluster.memory_bytes:
            raise ValueError(
                f"{self.title}: needs {format_memory(whole)} with even loads, more than a device has; give "
                "it smaller micro-batches or more devices"
            )
        return WholeModel(whole, few, cluster.memory_bytes, jobs[0].num_layers / jobs[1].num_layers)


def _job(
    title: str,
    model: str,
    cluster: str,
    batch: int,
    global_batch: int,
    *more: str,
    slots: int | None = None,
    few_layers: tuple[str, ...] = FOUR_LAYERS,
) -> Job:
    return Job(
        title,
        cluster,
        (f"models/{model}", f"parallelism/{cluster}", "training/measure"),
        (f"training.micro_batch_size={batch}", f"training.global_batch_size={global_batch}", *more),
        slots,
        few_layers,
    )


JOBS = {
    "slow-network": _job(
        "GPT-MoE-S (64 experts, top-2) on 4 nodes of 8 V100 with 100 Gb/s per node, 8,192 tokens per rank",
        "hecate-gpt-moe-s",
        "hecate-a",
        4,
        128,
    ),
    "fast-network": _job(
        "Qwen3-30B-A3B (128 experts, top-8) on 4 nodes of 8 H200, 3,200 Gb/s per node, "
        "16,384 tokens per rank in 8 micro-batches, at most 4 replicas of a layer on a device (slots=4)",
        "qwen3-30b-a3b",
        "h200",
        1,
        256,
        "parallelism.expert_model_parallel_size=32",
        "model.seq_length=2048",
        slots=4,
    ),
    "one-node": _job(
        "DeepSeekMoE 16B (64 experts, top-6) with EP 8 inside 4 nodes of 8 H200, 16,384 tokens per rank in "
        "4 micro-batches, at most 8 replicas of a layer on a device (slots=8)",
        "deepseekmoe-16b",
        "h200",
        1,
        128,
        slots=8,
        few_layers=("model.num_layers=5", "model.moe_layer_freq=[0, 1, 1, 1, 1]"),  # the first one is dense
    ),
}


def simulated(job: Job, workload: str, iterations: int = ITERATIONS) -> SimulationReport:
    """Simulate one job under one workload."""
    with tempfile.TemporaryDirectory() as folder:
        return run_simulation(job.request(workload, Path(folder), iterations), Console(quiet=True))


def table(name: str, iterations: int = ITERATIONS) -> str:
    """Return the Markdown table of one job.

    Args:
        name: A key of :data:`JOBS`.
        iterations: Number of iterations to simulate.
    """
    job = JOBS[name]
    whole = job.whole_model
    reports = {workload: simulated(job, workload, iterations) for workload in WORKLOADS}
    plain = {key: _of(report, "ep").outcome for key, report in reports.items()}
    fitting = {key: report for key, report in reports.items() if not plain[key].memory.runs_out}
    searched = reports[SEARCHED]
    spans_nodes = any(row.bandwidth is not None for row in searched.rows)
    header = [
        "strategy",
        *(f"{WORKLOADS[key]} (`{key}`)" for key in fitting),
        f"memory, GiB of {whole.capacity_bytes / 2**30:.0f}",
        "pays from, tokens per rank",
    ]
    lines = [f"**{job.title}**", "", _row([*header, *(["pays up to, Gb/s per node"] if spans_nodes else [])])]
    lines.append("|---" * (len(header) + spans_nodes) + "|")
    for strategy in STRATEGIES:
        rows = {key: _of(report, strategy) for key, report in fitting.items()}
        cells = [f"`{strategy}`", *(_speed_up(fitting[key], row) for key, row in rows.items())]
        cells.append(f"{max(whole.gib(row.outcome.memory.total_bytes) for row in rows.values()):.0f}")
        row, is_searched = _of(searched, strategy), strategy not in RARE and not _runs_out(rows[SEARCHED])
        cells.append(_limit(row.tokens if is_searched else None, 1.0))
        if spans_nodes:
            cells.append(_limit(row.bandwidth if is_searched else None, 8e-9))
        lines.append(_row(cells))
    skews = [f"`{key}` {fitting[key].steady_load(plain[key]):.2f}" for key in fitting]
    ceilings = [f"`{key}` {report.plain_s / report.even_ep_s:.2f}" for key, report in fitting.items()]
    needs = [
        f"`{key}` {whole.gib(outcome.memory.total_bytes):.0f}"
        + ("" if key in fitting else " (does not fit, so it has no column)")
        for key, outcome in plain.items()
    ]
    lines += [
        "",
        f"Device load max/mean under `ep`: {', '.join(skews)}.",
        f"Speed with perfectly balanced routing, relative to `ep`: {', '.join(ceilings)}.",
        f"Memory under `ep`, GiB: {', '.join(needs)}.",
    ]
    return "\n".join(lines) + "\n"


def _speed_up(report: SimulationReport, row: RankedStrategy) -> str:
    if _runs_out(row):
        return "does not fit"
    return f"{report.plain_s / report.steady_s(row.outcome):.2f}"


def _runs_out(row: RankedStrategy) -> bool:
    return row.outcome.memory.runs_out


def _of(report: SimulationReport, strategy: str) -> RankedStrategy:
    return next(row for row in report.rows if row.label == strategy)


def _limit(found: BreakEven | None, unit: float) -> str:
    if found is None:
        return "–"
    if found.value is None:
        return "always" if found.pays_now else "never"
    digits = f"{found.value * unit:.2g}"
    return f"{float(digits):,.0f}"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    for number, chosen in enumerate(sys.argv[1:] or JOBS):
        print(("\n" if number else "") + table(chosen), end="", flush=True)
