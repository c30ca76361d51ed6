"""Compares simulated with measured seconds of the testbed, over workloads, strategies and link rates.

    python -m benchmarks.predictor_accuracy RESULTS… --out DIR [--cluster CLUSTER.yaml]

RESULTS are ``testbed.json`` files of ``python -m benchmarks.testbed`` (or their folders). Each file keeps the
options from which the same loads are generated again. The simulator gets these loads and a description of the
testbed's cluster: the payload rate of the links between nodes and the stated pace of compute.

The testbed does not state start-up times and the links inside a node. They come from ``--cluster``, a file
that ``testbed --profile`` wrote on such nodes. Without it, start-ups cost nothing and links inside nodes
little. Strategies plan with the costs that the testbed gave them. Nothing is fitted to the predicted
seconds. R² measures how far the measured medians are from the simulated ones, so a constant bias counts as an
error.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.testbed.__main__ import counts_of, parser, variant_of
from benchmarks.testbed.stack_inputs import StackSize
from megatron_fssdp.config.cluster_description import ClusterDescription, LinkDescription, load_cluster
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.simulation.moe_job import MoeJob
from megatron_fssdp.simulation.simulator import simulate
from megatron_fssdp.strategies.ep import EpSettings

CONTROL_SUFFIX = " again"  # the testbed's second run of a variant, which has no simulation of its own
INSIDE_OVER_BETWEEN = 100
"""Bandwidth inside nodes over that between them, without a profile; as in ``nominal_cluster``."""
FP32_BYTES = 4
KEYS = {"options", "size", "pace", "link_payload_bytes_per_s", "samples"}
"""What is read of a result of the testbed."""


@dataclass(frozen=True)
class Comparison:
    """One workload under one strategy at one link rate."""

    rate: str  # of a node's link, as given to the testbed
    workload: str
    strategy: str  # name of the testbed's variant
    measured_s: float  # median of the measured iterations
    measured_spread: float  # interquartile range of the measured seconds, divided by their median
    simulated_s: float  # median of the same iterations in the simulator

    @property
    def error(self) -> float:
        """Relative error. It is positive if the simulation is slower than the measurement."""
        return self.simulated_s / self.measured_s - 1


def main() -> int:
    """Compare, print a table, and write it as JSON."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("results", type=Path, nargs="+", metavar="RESULTS")
    arguments.add_argument("--out", type=Path, required=True, help="folder of the report")
    arguments.add_argument("--cluster", type=Path, help="cluster.yaml written by `testbed --profile`")
    options = arguments.parse_args()
    try:
        records = [read(path) for path in options.results]
        cluster = None if options.cluster is None else load_cluster(options.cluster)
        comparisons = [comparison for record in records for comparison in compare(record, cluster)]
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    controls = [abs(value) for record in records for value in record.get("control_difference", {}).values()]
    figures = {**summary(comparisons), "worst_control_difference": max(controls, default=None)}
    table = report(comparisons, figures)
    print(table)
    record = {
        "summary": figures,
        "comparisons": [{**asdict(comparison), "error": comparison.error} for comparison in comparisons],
        "results": [str(path) for path in options.results],
        "cluster": None if cluster is None else cluster.model_dump(mode="json"),
    }
    path = options.out / "predictor_accuracy.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path}")
    return 0


def read(path: Path) -> dict[str, Any]:
    """Read one result file of the testbed.

    Raises:
        ConfigurationError: The file cannot be read or is not a result of the testbed.
    """
    path = path / "testbed.json" if path.is_dir() else path
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        missing = sorted(KEYS - set(record))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigurationError(f"{path}: cannot be read ({error}); give a testbed.json") from None
    if missing or not record["samples"]:
        raise ConfigurationError(f"{path}: has no {', '.join(missing) or 'samples'}; give a testbed.json")
    return dict(record)


def compare(record: dict[str, Any], measured: ClusterDescription | None) -> list[Comparison]:
    """Compare all workloads and strategies of one result file."""
    options, size = parsed_options(record["options"]), StackSize(**record["size"])
    world_size = options.nodes * options.ranks_per_node
    known = None if options.cluster is None else load_cluster(options.cluster)
    known, cluster = (
        described_cluster(record, options.nodes, options.ranks_per_node, links) for links in (known, measured)
    )
    cells: dict[tuple[str, str], dict[int, float]] = {}
    for sample in record["samples"]:
        if not sample["variant"].endswith(CONTROL_SUFFIX):
            cell = cells.setdefault((sample["workload"], sample["variant"]), {})
            cell[sample["iteration"]] = sample["seconds"]

    @cache
    def counts_IZLDE(workload: str) -> np.ndarray:
        iterations = options.warm_up + options.repetitions
        counts_LIZDE = counts_of(options, workload, size, world_size, iterations)
        return np.ascontiguousarray(np.moveaxis(counts_LIZDE, 0, 2))

    comparisons = []
    for (workload, name), seconds in sorted(cells.items()):
        iterations, variant = sorted(seconds), variant_of(name)
        settings = variant.settings if variant.settings is not None else EpSettings()
        counts = counts_IZLDE(workload)
        job = described_job(size, record["pace"], world_size, counts.shape[1])
        # Strategies of the testbed know costs from the start, so no first iterations measure them.
        simulated = simulate(
            variant.strategy, settings, counts, cluster, job, planned_for=known, past_ILDE=counts[:0]
        )
        simulated_s = float(np.median(simulated.iteration_s[iterations]))
        low, median, high = np.quantile([seconds[number] for number in iterations], [0.25, 0.5, 0.75])
        spread = float((high - low) / median)
        comparisons.append(Comparison(options.rate, workload, name, float(median), spread, simulated_s))
    return comparisons


def described_cluster(
    record: dict[str, Any], num_nodes: int, per_node: int, measured: ClusterDescription | None
) -> ClusterDescription:
    """Return a description of the testbed's cluster, with measured start-up times and links inside a node.

    Raises:
        ConfigurationError: The measured cluster has other nodes than the testbed.
    """
    payload = record["link_payload_bytes_per_s"]
    if measured is None:
        inside = LinkDescription(alpha_s=0.0, bandwidth_bytes_per_s=INSIDE_OVER_BETWEEN * payload)
        measured = ClusterDescription(
            name="testbed",
            num_nodes=num_nodes,
            devices_per_node=per_node,
            intra_node=inside,
            inter_node=inside,
            inter_device=inside,
            expert_flops_per_s=1.0,
            non_expert_flops_per_s=1.0,
        )
    elif (measured.num_nodes, measured.devices_per_node) != (num_nodes, per_node):
        raise ConfigurationError(
            f"cluster {measured.name} has {measured.num_nodes} nodes of {measured.devices_per_node}, the "
            f"testbed had {num_nodes} of {per_node}; give the cluster.yaml of the same nodes and rate"
        )
    inter = LinkDescription(alpha_s=measured.inter_node.alpha_s, bandwidth_bytes_per_s=payload)
    compute = dict.fromkeys(
        ("expert_flops_per_s", "non_expert_flops_per_s"), record["pace"]["expert_flops_per_s"]
    )
    links = {"inter_node": inter, "inter_device": inter}
    return measured.model_copy(update={**links, **compute, "memory_bytes": None})


def described_job(
    size: StackSize, pace: dict[str, Any], num_devices: int, num_micro_batches: int = 1
) -> MoeJob:
    """Return the job of the testbed's stack: paced attention, two matrices per expert, fp32, no optimizer."""
    elements = 2 * size.hidden_size * size.ffn_size
    attention_flops = pace["attention_s"] * pace["expert_flops_per_s"]
    return MoeJob(
        num_devices=num_devices,
        num_experts=size.num_experts,
        top_k=size.top_k,
        tokens_per_micro_batch=size.tokens_per_rank / num_micro_batches,
        num_micro_batches=num_micro_batches,
        token_bytes=size.token_bytes,
        expert_elements=elements,
        expert_flops_per_token=2.0 * elements,
        dtype_bytes=FP32_BYTES,
        gradient_bytes=FP32_BYTES,
        before_layer_flops_L=(0.0,) * size.num_layers,
        before_gate_flops_L=(attention_flops / num_micro_batches,) * size.num_layers,
        on_cuda=False,
    )


def parsed_options(texts: dict[str, str]) -> argparse.Namespace:
    """Return the testbed's options from the texts that its result file keeps."""
    of_testbed = parser()
    options = of_testbed.parse_args(["--out", texts["out"]])
    for action in of_testbed._actions:
        text = texts.get(action.dest)
        if text is not None and text != "None" and action.nargs != 0:
            setattr(options, action.dest, action.type(text) if callable(action.type) else text)
    return options


def summary(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """Return R², mean and worst relative error of all comparisons, and by rate, workload and strategy."""
    groups = {
        key: {
            name: _figures([comparison for comparison in comparisons if getattr(comparison, key) == name])
            for name in dict.fromkeys(getattr(comparison, key) for comparison in comparisons)
        }
        for key in ("rate", "workload", "strategy")
    }
    return {**_figures(comparisons), "by": groups}


def _figures(comparisons: Sequence[Comparison]) -> dict[str, float | int | None]:
    measured = np.array([comparison.measured_s for comparison in comparisons])
    errors = np.array([comparison.error for comparison in comparisons])
    variance = ((measured - measured.mean()) ** 2).sum()
    missed = ((errors * measured) ** 2).sum()
    return {
        "num_comparisons": len(comparisons),
        "r_squared": float(1 - missed / variance) if variance > 0 else None,
        "mean_relative_error": float(np.abs(errors).mean()),
        "mean_signed_error": float(errors.mean()),
        "worst_relative_error": float(np.abs(errors).max()),
        "mean_measured_spread": float(np.mean([comparison.measured_spread for comparison in comparisons])),
    }


def report(comparisons: Sequence[Comparison], figures: dict[str, Any]) -> str:
    """Return a Markdown report: a table of all comparisons, then the summary figures."""
    rows = [
        "| rate | workload | strategy | measured ms | simulated ms | error |",
        "|---|---|---|--:|--:|--:|",
    ]
    rows += [
        f"| {case.rate} | {case.workload} | {case.strategy} | {1e3 * case.measured_s:.1f} "
        f"| {1e3 * case.simulated_s:.1f} | {case.error:+.1%} |"
        for case in comparisons
    ]
    rows.append("")
    if (noise := figures.get("worst_control_difference")) is not None:
        rows.append(f"- noise: a second measurement of `none` differed by up to {noise:.1%}")
    for key, names in {"all": {"": figures}, **figures["by"]}.items():
        for name, group in names.items():
            r_squared = "–" if group["r_squared"] is None else f"{group['r_squared']:.4f}"
            rows.append(
                f"- {key} {name}".rstrip() + f": R² {r_squared}, mean error "
                f"{group['mean_relative_error']:.1%} (signed {group['mean_signed_error']:+.1%}), worst "
                f"{group['worst_relative_error']:.1%}, {group['num_comparisons']} comparisons"
            )
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
