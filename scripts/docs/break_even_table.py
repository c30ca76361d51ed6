"""Print the Markdown tables of docs/choosing.md, computed by the simulator; takes some minutes.

usage: python scripts/docs/break_even_table.py [JOB…]           (without JOB: all jobs)
"""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from megatron_fssdp.cli.simulate_command import SimulateRequest, run_simulation
from megatron_fssdp.reporting.simulation_report import RankedStrategy, SimulationReport
from megatron_fssdp.simulation.break_even import BreakEven

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


@dataclass(frozen=True)
class Job:
    """A model that is trained on a cluster.

    Attributes:
        title: Description of the job, as it stands above its table.
        cluster: Name of a cluster in ``configs/clusters``.
        parts: Names of the shipped configuration files that make up the run.
        overrides: ``key=value`` settings that replace values of these files.
    """

    title: str
    cluster: str
    parts: tuple[str, ...]
    overrides: tuple[str, ...]

    def request(self, workload: str, out: Path, iterations: int) -> SimulateRequest:
        """Return the request to simulate all strategies with their default settings."""
        return SimulateRequest(
            loads=workload,
            cluster=self.cluster,
            models=[Path(part) for part in self.parts],
            strategies=("ep", *self.strategies),
            out=out,
            iterations=iterations,
            # Loads differ from layer to layer but compute does not, so four layers stand for all.
            overrides=(*self.overrides, "model.num_layers=4"),
            with_break_even=workload == SEARCHED,
            with_plots=False,
        )

    @property
    def strategies(self) -> tuple[str, ...]:
        """Strategies that can run the job; SmartMoE refuses layers with one expert per device."""
        return STRATEGIES[:-1] if "models/mixtral-8x7b" in self.parts else STRATEGIES


def _job(title: str, model: str, cluster: str, batch: int, global_batch: int, *more: str) -> Job:
    return Job(
        title,
        cluster,
        (f"models/{model}", f"parallelism/{cluster}", "training/measure"),
        (f"training.micro_batch_size={batch}", f"training.global_batch_size={global_batch}", *more),
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
        "16,384 tokens per rank",
        "qwen3-30b-a3b",
        "h200",
        4,
        128,
        "parallelism.expert=32",
    ),
    "one-node": _job(
        "Mixtral 8x7B (8 experts, top-2) with EP 8 inside nodes of 8 H200, 16,384 tokens per rank",
        "mixtral-8x7b",
        "h200",
        4,
        128,
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
    reports = {workload: simulated(job, workload, iterations) for workload in WORKLOADS}
    searched = reports[SEARCHED]
    spans_nodes = any(row.bandwidth is not None for row in searched.rows)
    header = [
        "strategy",
        *(f"{words} (`{key}`)" for key, words in WORKLOADS.items()),
        "pays from, tokens per rank",
    ]
    lines = [f"**{job.title}**", "", _row([*header, *(["pays up to, Gb/s per node"] if spans_nodes else [])])]
    lines.append("|---" * (len(header) + spans_nodes) + "|")
    for strategy in job.strategies:
        cells = [f"`{strategy}`"]
        for report in reports.values():
            row = _of(report, strategy)
            speed_up = report.plain_s / report.steady_s(row.outcome)
            cells.append(f"{speed_up:.2f}" + (" (out of memory)" if row.outcome.memory.runs_out else ""))
        row, is_searched = _of(searched, strategy), strategy not in RARE
        cells.append(_limit(row.tokens if is_searched else None, 1.0))
        if spans_nodes:
            cells.append(_limit(row.bandwidth if is_searched else None, 8e-9))
        lines.append(_row(cells))
    skews = [
        f"`{key}` {_of(report, 'ep').outcome.load_max_over_mean_IL.mean():.2f}"
        for key, report in reports.items()
    ]
    ceilings = [f"`{key}` {report.plain_s / report.ceiling_s:.2f}" for key, report in reports.items()]
    lines += [
        "",
        f"Device load max/mean under `ep`: {', '.join(skews)}.",
        f"Speed with perfectly balanced routing, relative to `ep`: {', '.join(ceilings)}.",
    ]
    return "\n".join(lines) + "\n"


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
