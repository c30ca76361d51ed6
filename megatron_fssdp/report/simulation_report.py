"""Results of a simulation: a ranking of strategies, as tables, JSON and CSV.

Shape letters: I iterations, L MoE layers.
"""

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table as TerminalTable

from megatron_fssdp.report.colours import column_name
from megatron_fssdp.report.page import Table, terminal_table
from megatron_fssdp.report.units import format_memory, format_seconds
from megatron_fssdp.simulation.simulator import StrategyOutcome

_FIRST = 6  # columns of the ranking fit into 80 characters
_WHOLE = ("strategy", "warm-up", "% of force-balanced")  # cells of these columns stay on one line

# Columns of ``iterations.csv`` that are sums over the layers, and the simulator's names for them.
_COUNTS = {
    "replicas": "replicas",
    "moved_experts": "gathered",
    "between_nodes_experts": "gathered_between_nodes",
    "cross_node_pairs": "cross_node",
}


@dataclass(frozen=True, eq=False)
class RankedStrategy:
    """A strategy in the ranking."""

    label: str  # its name
    outcome: StrategyOutcome
    changed: str = ""  # settings that are not the strategy's defaults, such as "planner hecate"


@dataclass(frozen=True, eq=False)
class SimulationReport:
    """All results of a simulation that are shown and written."""

    title: str  # one line that names loads, cluster and model
    rows: tuple[RankedStrategy, ...]  # in any order
    plain: StrategyOutcome  # plain expert parallelism on the same loads
    ideal: StrategyOutcome  # one iteration of it with even loads (force-balanced); replicas can be faster
    iterations: np.ndarray  # numbers of the iterations, int64 [I]
    notes: tuple[str, ...] = ()  # on how the loads were scaled and what is left out

    @property
    def warm_up(self) -> int:
        """The longest warm-up of the strategies that get beyond theirs.

        No mean of the ranking contains these iterations, so that all are of the same loads.
        """
        return max((row.outcome.warm_up for row in self.rows if self.is_settled(row)), default=0)

    def is_settled(self, row: RankedStrategy) -> bool:
        """Whether a strategy gets beyond its warm-up in the simulated iterations."""
        return row.outcome.warm_up < len(self.iterations)

    def steady(self, values: NDArray[Any]) -> float:
        """Return the mean after the warm-up of values ``[I]`` or ``[I, L]``."""
        return float(values[self.warm_up :].mean())

    def steady_s(self, outcome: StrategyOutcome) -> float:
        """Return the mean seconds of an iteration after the warm-up."""
        return self.steady(outcome.iteration_s)

    def steady_parts_s(self, outcome: StrategyOutcome) -> dict[str, float]:
        """Return the mean seconds of an iteration's parts after the warm-up, by the names in ``PARTS``."""
        return {part: self.steady(seconds_I) for part, seconds_I in outcome.parts_s.items()}

    @property
    def plain_s(self) -> float:
        """Seconds of an iteration under plain expert parallelism, in the iterations that are ranked."""
        return self.steady_s(self.plain)

    @property
    def ranked(self) -> list[RankedStrategy]:
        """Strategies from best to worst by their steady seconds.

        After these come the strategies that are still warming up, and last those that do not fit into memory.
        """

        def rank(row: RankedStrategy) -> tuple[bool, bool, float]:
            return row.outcome.memory.runs_out, not self.is_settled(row), self.steady_s(row.outcome)

        return sorted(self.rows, key=rank)

    @property
    def table(self) -> Table:
        """The ranking."""
        rows = [self._cells(row) for row in self.ranked]
        return Table(tuple(rows[0]), tuple(tuple(cells.values()) for cells in rows))

    def terminal_tables(self) -> Sequence[TerminalTable]:
        """Return the ranking in two tables of at most 80 columns."""
        table = self.table
        return (
            terminal_table(table.columns(*range(_FIRST)), self.title, whole=_WHOLE),
            terminal_table(table.columns(0, *range(_FIRST, len(table.header))), whole=_WHOLE),
        )

    def _cells(self, row: RankedStrategy) -> dict[str, str]:
        outcome, count = row.outcome, row.outcome.warm_up
        seconds, memory = self.steady_s(outcome), format_memory(outcome.memory.total_bytes)
        warm_up = f"{count} × {format_seconds(outcome.iteration_s[:count].mean())}" if count else "–"
        return {
            "strategy": f"{row.label} *" if row.changed else row.label,  # a note explains the star
            "ms of an iteration": f"{1e3 * seconds:,.0f}" if seconds >= 1 else f"{1e3 * seconds:.4g}",
            "warm-up": warm_up if self.is_settled(row) else f"all {count}",
            "× ep": f"{self.plain_s / seconds:.2f}",
            "% of force-balanced": f"{100 * self.ideal.mean_s / seconds:.0f}",
            "load max/mean": f"{self.steady(outcome.load_max_over_mean_IL):.2f}",
            "peak memory": f"{memory}, too much" if outcome.memory.runs_out else memory,
            "host ms": f"{1e3 * outcome.host_s:.3g}",
        }


def ranking_data(report: SimulationReport) -> dict[str, Any]:
    """Return the ranking for JSON."""
    return {
        "title": report.title,
        "notes": list(report.notes),
        "warm_up_iterations": report.warm_up,
        "ep_s": report.plain_s,
        "force_balanced_s": report.ideal.mean_s,
        "strategies": [_row_data(report, row) for row in report.ranked],
    }


def _row_data(report: SimulationReport, row: RankedStrategy) -> dict[str, Any]:
    outcome, memory, seconds = row.outcome, row.outcome.memory, report.steady_s(row.outcome)
    return {
        "strategy": row.label,
        "changed_settings": row.changed,
        "iteration_s": seconds,
        "speedup_over_ep": report.plain_s / seconds,
        "percent_of_force_balanced": 100 * report.ideal.mean_s / seconds,
        "warm_up_iterations": outcome.warm_up,
        "mean_s_with_warm_up": outcome.mean_s,
        "host_s": outcome.host_s,
        "load_max_over_mean": report.steady(outcome.load_max_over_mean_IL),
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
    }


def write_report(report: SimulationReport, folder: Path) -> None:
    """Write ``ranking.json`` and ``iterations.csv`` into a folder."""
    text = json.dumps(ranking_data(report), indent=2) + "\n"
    (folder / "ranking.json").write_text(text, encoding="utf-8")
    with (folder / "iterations.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        for number, row in enumerate(report.ranked):
            outcome = row.outcome
            columns = {
                "iteration_s": outcome.iteration_s,
                **{column_name(part): seconds_I for part, seconds_I in outcome.parts_s.items()},
                "load_max_over_mean": outcome.load_max_over_mean_IL.mean(axis=1),
                **{name: outcome.of_layers(field).sum(axis=1) for name, field in _COUNTS.items()},
                "resharded_experts": outcome.moved_I,
            }
            if number == 0:
                writer.writerow(["strategy", "iteration", *columns])
            for iteration, *values in zip(report.iterations, *columns.values(), strict=True):
                writer.writerow([row.label, iteration, *(f"{value:.9g}" for value in values)])
