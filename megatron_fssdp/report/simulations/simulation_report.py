"""Results of a simulation: a ranking of strategies, written as JSON and CSV.

Shape letters: I iterations, L MoE layers.
"""

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_fssdp.simulation.break_even import BreakEven
from megatron_fssdp.simulation.lanes import PARTS
from megatron_fssdp.simulation.simulator import StrategyOutcome

RANKING_FILE = "ranking.json"
ITERATIONS_FILE = "iterations.csv"


@dataclass(frozen=True, eq=False)
class RankedStrategy:
    """One strategy in the ranking.

    Attributes:
        label: Name of the strategy, with settings if the name alone is ambiguous.
        outcome: Result of simulating the strategy.
        tokens: Tokens per rank and iteration from which the strategy pays, or None if they were not searched.
        bandwidth: Bandwidth of a node's network up to which the strategy pays, in bytes per second, or None
            if it was not searched.
        changed: Settings that are not the strategy's defaults, such as ``planner hecate``.
    """

    label: str
    outcome: StrategyOutcome
    tokens: BreakEven | None = None
    bandwidth: BreakEven | None = None
    changed: str = ""


@dataclass(frozen=True, eq=False)
class SimulationReport:
    """All results of a simulation that are shown and written.

    Attributes:
        title: One line that names loads, cluster and model.
        rows: Simulated strategies, in any order.
        plain: Result of simulating plain expert parallelism on the same loads.
        even_ep_s: Seconds of an iteration under plain expert parallelism with perfectly even loads. A
            strategy whose replicas save traffic can be faster.
        iterations: Numbers of the iterations, int64 ``[I]``.
        notes: Sentences on how the loads were scaled and what the simulation leaves out.
        of_own_model: Whether the layers have the sizes of the recorded run, so that its measured parts can
            stand beside the simulated ones.
    """

    title: str
    rows: tuple[RankedStrategy, ...]
    plain: StrategyOutcome
    even_ep_s: float
    iterations: np.ndarray
    notes: tuple[str, ...] = ()
    of_own_model: bool = False

    @property
    def warm_up(self) -> int:
        """Number of first iterations that no mean of the ranking contains.

        This is the longest warm-up of the strategies, so that all of them are compared on the same loads.
        Strategies that do not get beyond their warm-up do not count.
        """
        return max((row.outcome.warm_up for row in self.rows if self.is_settled(row)), default=0)

    def is_settled(self, row: RankedStrategy) -> bool:
        """Whether a strategy gets beyond its warm-up in the simulated iterations."""
        return row.outcome.warm_up < len(self.iterations)

    def steady_s(self, outcome: StrategyOutcome) -> float:
        """Return the mean seconds of an iteration after the warm-up."""
        return float(outcome.iteration_s[self.warm_up :].mean())

    def steady_parts_s(self, outcome: StrategyOutcome) -> dict[str, float]:
        """Return the mean seconds of an iteration's parts after the warm-up, by the names in ``PARTS``."""
        return {part: float(seconds[self.warm_up :].mean()) for part, seconds in outcome.parts_s.items()}

    def steady_load(self, outcome: StrategyOutcome) -> float:
        """Return the max/mean device load after the warm-up, averaged over iterations and layers."""
        return float(outcome.load_max_over_mean_IL[self.warm_up :].mean())

    @property
    def plain_s(self) -> float:
        """Seconds of an iteration under plain expert parallelism, in the iterations that are ranked."""
        return self.steady_s(self.plain)

    @property
    def stars(self) -> tuple[str, ...]:
        """One line for each strategy that has a star in tables: its settings that are not the defaults."""
        return tuple(
            f"{row.label} *: with settings that are not its defaults, {row.changed}"
            for row in self.rows
            if row.changed
        )

    @property
    def ranked(self) -> list[RankedStrategy]:
        """Strategies from best to worst by the seconds of their steady state.

        Strategies that do not fit into memory come after the others, and before them those that are still
        warming up in the last iteration.
        """
        return sorted(
            self.rows,
            key=lambda row: (
                row.outcome.memory.runs_out,
                not self.is_settled(row),
                self.steady_s(row.outcome),
            ),
        )


def ranking_data(report: SimulationReport) -> dict[str, Any]:
    """Return the ranking as plain values for JSON."""
    return {
        "title": report.title,
        "notes": list(report.notes),
        "warm_up_iterations": report.warm_up,
        "ep_s": report.plain_s,
        "ep_with_even_loads_s": report.even_ep_s,
        "strategies": [_row_data(report, row) for row in report.ranked],
    }


def _row_data(report: SimulationReport, row: RankedStrategy) -> dict[str, Any]:
    outcome, memory, seconds = row.outcome, row.outcome.memory, report.steady_s(row.outcome)
    return {
        "strategy": row.label,
        "changed_settings": row.changed,
        "iteration_s": seconds,
        "speedup_over_ep": report.plain_s / seconds,
        "percent_of_ep_with_even_loads": 100 * report.even_ep_s / seconds,
        "warm_up_iterations": outcome.warm_up,
        "mean_s_with_warm_up": outcome.mean_s,
        "host_s": outcome.host_s,
        "load_max_over_mean": report.steady_load(outcome),
        "parts_s": report.steady_parts_s(outcome),
        "memory": {
            "peak_bytes": memory.total_bytes,
            "expert_bytes": memory.experts.total_bytes,
            "replica_bytes": memory.experts.above_expert_parallelism_bytes,
            "dense_bytes": memory.dense_bytes,
            "activation_bytes_estimated": memory.activation_bytes,
            "capacity_bytes": memory.capacity_bytes,
            "runs_out": memory.runs_out,
        },
        **{
            f"break_even_{key}": found
            and {"pays_now": found.pays_now, "at": found.value, "factor": found.factor}
            for key, found in (
                ("tokens_per_rank", row.tokens),
                ("bandwidth_bytes_per_s", row.bandwidth),
            )
        },
    }


def write_report(report: SimulationReport, folder: Path) -> None:
    """Write ``ranking.json`` and ``iterations.csv`` into a folder."""
    text = json.dumps(ranking_data(report), indent=2) + "\n"
    (folder / RANKING_FILE).write_text(text, encoding="utf-8")
    counts = {
        "replicas": "replicas",
        "moved_experts": "gathered",
        "between_nodes_experts": "gathered_between_nodes",
        "cross_node_pairs": "cross_node",
    }
    parts = [f"{part.replace(' ', '_').replace('-', '_')}_s" for part in PARTS]
    header = ["strategy", "iteration", "iteration_s", *parts, "load_max_over_mean", *counts]
    with (folder / ITERATIONS_FILE).open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*header, "resharded_experts"])
        for row in report.ranked:
            outcome = row.outcome
            numbers = [outcome.of_layers(name).sum(axis=1) for name in counts.values()]
            load_I = outcome.load_max_over_mean_IL.mean(axis=1)
            for i, iteration in enumerate(report.iterations):
                seconds = [outcome.iteration_s[i], *(outcome.parts_s[part][i] for part in PARTS)]
                writer.writerow(
                    [
                        *(row.label, int(iteration), *(f"{value:.9g}" for value in seconds)),
                        *(f"{load_I[i]:.6g}", *(int(number_I[i]) for number_I in numbers)),
                        int(outcome.moved_I[i]),
                    ]
                )
