"""From samples to medians, a table and a JSON file."""

import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import numpy as np

from benchmarks.testbed.measurement import Sample
from megatron_fssdp.simulation.workloads import device_max_over_mean, expert_max_over_mean

BALANCED = "W0"
REFERENCE = "none"


def quartiles(values: Sequence[float]) -> list[float]:
    """25th, 50th and 75th percentile; one value is all three."""
    if len(values) == 1:
        return [values[0]] * 3
    return statistics.quantiles(values, n=4, method="inclusive")


def summaries(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """One entry for each workload and variant, in the order in which workloads and variants are first named.

    Speed-ups are of pairs: the reference's seconds over the variant's in the same repetition, which had the
    same tokens. The ceiling is the fastest variant's median under balanced routing.
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
            }
        )
    return found


def _median(values: Any) -> float:
    return float(np.median(list(values)))


def _hidden_share(cell: Sequence[Sample], kind: int) -> float | None:
    busy_s = sum(one.transfer_s[kind] for one in cell)
    return 1 - sum(one.exposed_s[kind] for one in cell) / busy_s if busy_s else None


def control_difference(found: Sequence[Mapping[str, Any]], control: str) -> dict[str, float]:
    """How far the medians of one variant under two names lie apart, by workload; relative."""
    medians = {(one["workload"], one["variant"]): one["seconds"][1] for one in found}
    return {
        workload: seconds / medians[workload, REFERENCE] - 1
        for (workload, variant), seconds in medians.items()
        if variant == control and (workload, REFERENCE) in medians
    }


@dataclass(frozen=True)
class AgainstBest:
    """What a variant that chooses took, beside the best of those that do not.

    Attributes:
        workload: Its name.
        best: The variant with the fewest seconds over all repetitions, the reference aside.
        over_best: The variant's seconds over the best one's, both of all repetitions together.
        over_reference: The reference's seconds over the variant's, likewise; above 1 is faster.
    """

    workload: str
    best: str
    over_best: float
    over_reference: float | None


def against_best(samples: Sequence[Sample], chooser: str, without: Sequence[str] = ()) -> list[AgainstBest]:
    """A choosing variant against the best fixed one of each workload, in seconds of all repetitions.

    A training pays for every iteration, so sums count here and not medians.

    Args:
        samples: Of a run.
        chooser: The variant's name.
        without: Variants that are not compared with.
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


def heat(counts_LIDE: np.ndarray) -> dict[str, float]:
    """Mean over layers and iterations of the experts' and the devices' max/mean under plain placement."""
    flat = counts_LIDE.reshape(-1, *counts_LIDE.shape[2:])
    return {
        "expert_max_over_mean": float(np.mean([expert_max_over_mean(counts_DE) for counts_DE in flat])),
        "device_max_over_mean": float(np.mean([device_max_over_mean(counts_DE) for counts_DE in flat])),
    }


def table(found: Sequence[Mapping[str, Any]], heats: Mapping[str, Mapping[str, float]]) -> str:
    """A Markdown table, medians with quartiles in brackets."""
    lines = [
        "| workload | expert / device max/mean | variant | seconds | speed-up | % of ceiling "
        "| hidden spAG / spRS | MiB between / inside nodes | most for replicas MiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for one in found:
        of = heats[one["workload"]]
        between = one["dispatch_bytes_between_nodes"] + one["transfer_bytes_between_nodes"]
        inside = one["dispatch_bytes_inside_nodes"] + one["transfer_bytes_inside_nodes"]
        ceiling = one["percent_of_ceiling"]
        lines.append(
            f"| {one['workload']} | {of['expert_max_over_mean']:.2f} / {of['device_max_over_mean']:.2f} "
            f"| {one['variant']} | {_spread(one['seconds'])} | {_spread(one['speed_up'])} "
            f"| {'–' if ceiling is None else f'{ceiling:.0f}'} "
            f"| {_share(one['spag_hidden_share'])} / {_share(one['sprs_hidden_share'])} "
            f"| {between / 2**20:.1f} / {inside / 2**20:.1f} | {one['replica_bytes'] / 2**20:.1f} |"
        )
    return "\n".join(lines)


def _spread(values: Sequence[float] | None) -> str:
    return "–" if values is None else f"{values[1]:.3f} [{values[0]:.3f}, {values[2]:.3f}]"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f} %"


def host_facts() -> dict[str, Any]:
    """What a reader of the figures has to know of the machine."""
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
    """What the cores did between two readings of ``psutil.cpu_times()``, as shares of all their time.

    ``steal`` is time that a virtual machine wanted and did not get.
    """
    spent = {name: getattr(after, name) - getattr(before, name) for name in ("user", "system", "idle")}
    for name in ("softirq", "steal"):  # only Linux has them
        spent[name] = getattr(after, name, 0.0) - getattr(before, name, 0.0)
    total = sum(spent.values())
    return {name: seconds / total if total else 0.0 for name, seconds in spent.items()}
