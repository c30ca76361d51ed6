"""Computes medians, ratios and tables from the testbed's samples."""

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import numpy as np

from benchmarks.result_file import quartiles
from benchmarks.testbed.measurement import Sample
from benchmarks.testbed.testbed_loads import device_max_over_mean, expert_max_over_mean

BALANCED = "W0"
REFERENCE = "none"


def summaries(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Return one entry for each workload and variant, sorted by their names.

    A speed-up compares a pair: the reference's seconds divided by the variant's in the same repetition, which
    had the same tokens. The ceiling is the median of the fastest variant under balanced routing.
    ``load_max_over_mean`` has the median and the 99th percentile of device loads, of all layers in all
    micro-batches.
    """
    by_cell: dict[tuple[str, str], list[Sample]] = {}
    for sample in samples:
        by_cell.setdefault((sample.workload, sample.variant), []).append(sample)
    balanced_s = [
        quartiles([sample.seconds for sample in cell])[1]
        for (name, _), cell in by_cell.items()
        if name == BALANCED
    ]
    ceiling_s = min(balanced_s, default=None)
    entries = []
    for (workload, variant), cell in sorted(by_cell.items()):
        seconds = quartiles([sample.seconds for sample in cell])
        reference = {sample.repetition: sample.seconds for sample in by_cell.get((workload, REFERENCE), [])}
        ratios = [
            reference[sample.repetition] / sample.seconds for sample in cell if sample.repetition in reference
        ]
        entries.append(
            {
                "workload": workload,
                "variant": variant,
                "repetitions": len(cell),
                "seconds": seconds,
                "speed_up": quartiles(ratios) if ratios else None,
                "percent_of_ceiling": None if ceiling_s is None else 100 * ceiling_s / seconds[1],
                "spag_hidden_share": _hidden_share(cell, 0),
                "sprs_hidden_share": _hidden_share(cell, 1),
                "dispatch_bytes_between_nodes": _median(sample.dispatch_bytes[0] for sample in cell),
                "dispatch_bytes_inside_nodes": _median(sample.dispatch_bytes[1] for sample in cell),
                "transfer_bytes_between_nodes": _median(sample.transfer_bytes[0] for sample in cell),
                "transfer_bytes_inside_nodes": _median(sample.transfer_bytes[1] for sample in cell),
                "busiest_node_bytes": _median(sample.node_bytes for sample in cell),
                "replica_bytes": max(sample.replica_bytes for sample in cell),
                "load_max_over_mean": np.percentile([sample.loads for sample in cell], (50, 99)).tolist(),
            }
        )
    return entries


def _median(values: Any) -> float:
    return float(np.median(list(values)))


def _hidden_share(cell: Sequence[Sample], kind: int) -> float | None:
    busy_s = sum(sample.transfer_s[kind] for sample in cell)
    return 1 - sum(sample.exposed_s[kind] for sample in cell) / busy_s if busy_s else None


def control_difference(entries: Sequence[Mapping[str, Any]], control: str) -> dict[str, float]:
    """Return the relative difference between the medians of the control and of the reference, by workload."""
    medians = {(entry["workload"], entry["variant"]): entry["seconds"][1] for entry in entries}
    return {
        workload: seconds / medians[workload, REFERENCE] - 1
        for (workload, variant), seconds in medians.items()
        if variant == control and (workload, REFERENCE) in medians
    }


@dataclass(frozen=True)
class AgainstBest:
    """Comparison of a variant that selects strategies with the best variant that does not."""

    workload: str
    best: str  # variant with the fewest seconds over all repetitions, the reference left out
    over_best: float  # total seconds of the selecting variant divided by those of the best one
    over_reference: float | None  # total seconds of the reference divided by those of the selecting variant


def against_best(samples: Sequence[Sample], chooser: str, without: Sequence[str] = ()) -> list[AgainstBest]:
    """Compare a selecting variant with the best fixed variant of each workload.

    The comparison uses sums over all repetitions instead of medians, because a training needs every
    iteration.
    """
    total_s: dict[tuple[str, str], float] = {}
    for sample in samples:
        key = (sample.workload, sample.variant)
        total_s[key] = total_s.get(key, 0.0) + sample.seconds
    comparisons = []
    for workload in dict.fromkeys(workload for workload, variant in total_s if variant == chooser):
        own_s = total_s[workload, chooser]
        others = {
            variant: seconds
            for (wanted, variant), seconds in total_s.items()
            if wanted == workload and variant not in (chooser, REFERENCE, *without)
        }
        if others:
            best = min(others, key=others.__getitem__)
            reference_s = total_s.get((workload, REFERENCE))
            over_reference = None if reference_s is None else reference_s / own_s
            comparisons.append(AgainstBest(workload, best, own_s / others[best], over_reference))
    return comparisons


def heat(counts_LIZDE: np.ndarray) -> dict[str, float]:
    """Return the mean max/mean load of experts and of devices in a micro-batch under plain placement.

    Args:
        counts_LIZDE: int64 ``[L, I, Z, D, E]``. Assignments of every source device to every expert.
    """
    flat = counts_LIZDE.reshape(-1, *counts_LIZDE.shape[3:])
    return {
        "expert_max_over_mean": float(np.mean([expert_max_over_mean(counts_DE) for counts_DE in flat])),
        "device_max_over_mean": float(np.mean([device_max_over_mean(counts_DE) for counts_DE in flat])),
    }


def table(entries: Sequence[Mapping[str, Any]], heats: Mapping[str, Mapping[str, float]]) -> str:
    """Return a Markdown table of medians, with quartiles in brackets."""
    lines = [
        "| workload | expert / device max/mean | variant | seconds | speed-up | % of ceiling "
        "| hidden spAG / spRS | MiB between / inside nodes | most for replicas MiB "
        "| device max/mean in micro-batches, median / 99 % |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in entries:
        heat = heats[row["workload"]]
        between = row["dispatch_bytes_between_nodes"] + row["transfer_bytes_between_nodes"]
        inside = row["dispatch_bytes_inside_nodes"] + row["transfer_bytes_inside_nodes"]
        ceiling, (median, high) = row["percent_of_ceiling"], row["load_max_over_mean"]
        lines.append(
            f"| {row['workload']} | {heat['expert_max_over_mean']:.2f} / {heat['device_max_over_mean']:.2f} "
            f"| {row['variant']} | {_spread(row['seconds'])} | {_spread(row['speed_up'])} "
            f"| {'–' if ceiling is None else f'{ceiling:.0f}'} "
            f"| {_share(row['spag_hidden_share'])} / {_share(row['sprs_hidden_share'])} "
            f"| {between / 2**20:.1f} / {inside / 2**20:.1f} | {row['replica_bytes'] / 2**20:.1f} "
            f"| {median:.2f} / {high:.2f} |"
        )
    return "\n".join(lines)


def result_rows(entries: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Return columns and rows for ``benchmarks/results``: seconds and speed-ups of every cell."""
    parts = ("low", "median", "high")
    columns = ["workload", "variant"]
    columns += [f"{quantity}, {part}" for quantity in ("seconds", "speed-up") for part in parts]
    rows = []
    for entry in entries:
        numbers = [*entry["seconds"], *(entry["speed_up"] or [None] * len(parts))]
        rounded = [None if number is None else round(number, 4) for number in numbers]
        rows.append([entry["workload"], entry["variant"], *rounded])
    return columns, rows


def _spread(values: Sequence[float] | None) -> str:
    return "–" if values is None else f"{values[1]:.3f} [{values[0]:.3f}, {values[2]:.3f}]"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f} %"


def host_facts() -> dict[str, Any]:
    """Return the facts about the machine that a reader of the figures needs."""
    return {
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "megatron-core": metadata.version("megatron-core"),
        "load_average_at_start": os.getloadavg()[0],
    }


def cpu_shares(before: Any, after: Any) -> dict[str, float]:
    """Return how the cores spent their time between two readings of ``psutil.cpu_times()``, as shares.

    ``steal`` is time that a virtual machine wanted to run but could not.
    """
    spent = {name: getattr(after, name) - getattr(before, name) for name in ("user", "system", "idle")}
    for name in ("softirq", "steal"):  # only Linux has them
        spent[name] = getattr(after, name, 0.0) - getattr(before, name, 0.0)
    total = sum(spent.values())
    return {name: seconds / total if total else 0.0 for name, seconds in spent.items()}
