"""Prints the tables of docs/choosing.md, Markdown, from the simulator; some minutes.

usage: python scripts/docs/break_even_table.py [JOB…]           (all of them without one)
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
    "W6": "the heat moves",
}
SEARCHED = "lognormal-medium"
"""The workload for which is searched where a strategy stops paying."""
RARE = ("flexmoe", "smartmoe")
"""Strategies that act every 25 iterations: the few iterations that are searched on say nothing of them."""
ITERATIONS = 100


@dataclass(frozen=True)
class Job:
    """What is trained where.

    Attributes:
        title: In words.
        cluster: A name of ``configs/clusters``.
        parts: Shipped files that make up the run.
        overrides: ``key=value`` over them.
    """

    title: str
    cluster: str
    parts: tuple[str, ...]
    overrides: tuple[str, ...]

    def request(self, workload: str, out: Path, iterations: int) -> SimulateRequest:
        """A simulation of all strategies with their default settings."""
        return SimulateRequest(
            loads=workload,
            cluster=self.cluster,
            models=[Path(part) for part in self.parts],
            strategies=("ep", *self.strategies),
            out=out,
            iterations=iterations,
            # Loads differ from layer to layer, compute does not: four layers stand for all.
            overrides=(*self.overrides, "model.num_layers=4"),
            with_break_even=workload == SEARCHED,
            with_plots=False,
        )

    @property
    def strategies(self) -> tuple[str, ...]:
        """Those that serve the job: SmartMoE refuses one expert a device."""
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
        "GPT-MoE-S (64 experts, top-2) on 4 nodes of 8 V100 with 100 Gb/s a node, 8,192 tokens a rank",
        "hecate-gpt-moe-s",
        "hecate-a",
        4,
        128,
    ),
    "fast-network": _job(
        "Qwen3-30B-A3B (128 experts, top-8) on 4 nodes of 8 H200, 3,200 Gb/s a node, 16,384 tokens a rank",
        "qwen3-30b-a3b",
        "h200",
        4,
        128,
        "parallelism.expert=32",
    ),
    "one-node": _job(
        "Mixtral 8x7B (8 experts, top-2) with EP 8 inside nodes of 8 H200, 16,384 tokens a rank",
        "mixtral-8x7b",
        "h200",
        4,
        128,
    ),
}


def simulated(job: Job, workload: str, iterations: int = ITERATIONS) -> SimulationReport:
    """What the simulator says of one job under one workload."""
    with tempfile.TemporaryDirectory() as folder:
        return run_simulation(job.request(workload, Path(folder), iterations), Console(quiet=True))


def table(name: str, iterations: int = ITERATIONS) -> str:
    """One job's table, Markdown.

    Args:
        name: A key of :data:`JOBS`.
        iterations: To simulate.
    """
    job = JOBS[name]
    reports = {workload: simulated(job, workload, iterations) for workload in WORKLOADS}
    searched = reports[SEARCHED]
    spans_nodes = any(row.bandwidth is not None for row in searched.rows)
    header = [
        "strategy",
        *(f"{words} (`{key}`)" for key, words in WORKLOADS.items()),
        "pays from, tokens a rank",
    ]
    lines = [f"**{job.title}**", "", _row([*header, *(["pays up to, Gb/s a node"] if spans_nodes else [])])]
    lines.append("|---" * (len(header) + spans_nodes) + "|")
    for strategy in job.strategies:
        cells = [f"`{strategy}`"]
        for report in reports.values():
            row = _of(report, strategy)
            speed_up = report.plain_s / row.outcome.mean_s
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
        f"Device load max/mean under `ep`: {', '.join(skews)}. Perfectly balanced routing would be × `ep`:",
    ]
    lines.append(f"{', '.join(ceilings)}.")
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
