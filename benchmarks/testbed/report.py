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
        quartiles([one.seconds for one in cell])[1] for (name, _), cell in by_cell.items() if name == BALANCED
    ]
    ceiling_s = min(balanced_s, default=None)
    found = []
    for (workload, variant), cell in sorted(by_cell.items()):
        seconds = quartiles([one.seconds for one in cell])
        reference = {one.repetition: one.seconds for one in by_cell.get((workload, REFERENCE), [])}
        ratios = [reference[one.repetition] / one.seconds for one in cell if one.repetition in reference]
        found.append(
            {
                "workload": workload,
                "variant": variant,
                "repetitions": len(cell),
                "seconds": seconds,
                "speed_up": quartiles(ratios) if ratios else None,
                "percent_of_ceiling": None if ceiling_s is None else 100 * ceiling_s / seconds[1],
                "spag_hidden_share": _hidden_share(cell, 0),
                "sprs_hidden_share": _hidden_share(cell, 1),
                "dispatch_bytes_between_nodes": _median(one.dispatch_bytes[0] for one in cell),
                "dispatch_bytes_inside_nodes": _median(one.dispatch_bytes[1] for one in cell),
                "transfer_bytes_between_nodes": _median(one.transfer_bytes[0] for one in cell),
                "transfer_bytes_inside_nodes": _median(one.transfer_bytes[1] for one in cell),
                "busiest_node_bytes": _median(one.node_bytes for one in cell),
                "replica_bytes": max(one.replica_bytes for one in cell),
                "load_max_over_mean": np.percentile([one.loads for one in cell], (50, 99)).tolist(),
            }
        )
    return found


def _median(values: Any) -> float:
    return float(np.median(list(values)))


def _hidden_share(cell: Sequence[Sample], kind: int) -> float | None:
    busy_s = sum(one.transfer_s[kind] for one in cell)
    return 1 - sum(one.exposed_s[kind] for one in cell) / busy_s if busy_s else None


def control_difference(found: Sequence[Mapping[str, Any]], control: str) -> dict[str, float]:
    """Return the relative difference between the medians of the control and of the reference, by workload."""
    medians = {(one["workload"], one["variant"]): one["seconds"][1] for one in found}
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
    found = []
    for workload in dict.fromkeys(workload for workload, variant in total_s if variant == chooser):
        own_s = total_s[workload, chooser]
        others = {
            variant: seconds
            for (of, variant), seconds in total_s.items()
            if of == workload and variant not in (chooser, REFERENCE, *without)
        }
        if others:
            best = min(others, key=others.__getitem__)
            reference_s = total_s.get((workload, REFERENCE))
            over_reference = None if reference_s is None else reference_s / own_s
            found.append(AgainstBest(workload, best, own_s / others[best], over_reference))
    return found


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


def table(found: Sequence[Mapping[str, Any]], heats: Mapping[str, Mapping[str, float]]) -> str:
    """Return a Markdown table of medians, with quartiles in brackets."""
    lines = [
        "| workload | expert / device max/mean | variant | seconds | speed-up | % of ceiling "
        "| hidden spAG / spRS | MiB between / inside nodes | most for replicas MiB "
        "| device max/mean in micro-batches, median / 99 % |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in found:
        of = heats[one["workload"]]
        between = one["dispatch_bytes_between_nodes"] + one["transfer_bytes_between_nodes"]
        inside = one["dispatch_bytes_inside_nodes"] + one["transfer_bytes_inside_nodes"]
        ceiling, (median, high) = one["percent_of_ceiling"], one["load_max_over_mean"]
        lines.append(
            f"| {one['workload']} | {of['expert_max_over_mean']:.2f} / {of['device_max_over_mean']:.2f} "
            f"| {one['variant']} | {_spread(one['seconds'])} | {_spread(one['speed_up'])} "
            f"| {'–' if ceiling is None else f'{ceiling:.0f}'} "
            f"| {_share(one['spag_hidden_share'])} / {_share(one['sprs_hidden_share'])} "
            f"| {between / 2**20:.1f} / {inside / 2**20:.1f} | {one['replica_bytes'] / 2**20:.1f} "
            f"| {median:.2f} / {high:.2f} |"
        )
    return "\n".join(lines)


def result_rows(found: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Return columns and rows for ``benchmarks/results``: seconds and speed-ups of every cell."""
    parts = ("low", "median", "high")
    columns = ["workload", "variant", *(f"{what}, {it}" for what in ("seconds", "speed-up") for it in parts)]
    rows = []
    for one in found:
        numbers = [*one["seconds"], *(one["speed_up"] or [None] * len(parts))]
        rounded = [None if it is None else round(it, 4) for it in numbers]
        rows.append([one["workload"], one["variant"], *rounded])
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
