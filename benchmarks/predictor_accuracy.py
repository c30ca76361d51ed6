"""Compares simulated with measured seconds of the testbed, over workloads, strategies and link rates.

    python -m benchmarks.predictor_accuracy RESULTS… --out DIR [--cluster CLUSTER.yaml…]

RESULTS are ``testbed.json`` files of ``python -m benchmarks.testbed`` (or their folders), one for each link
rate. Each file keeps the options from which the same loads are generated again. The simulator gets these
loads and a description of the testbed's cluster: the payload rate of the links between nodes and the stated
pace of compute.

The testbed does not state start-up times and the links inside a node. They come from ``--cluster``, a file
that ``testbed --profile`` wrote on such nodes. Without it, both cost nothing. Nothing is fitted to the
predicted seconds.

R² measures how far the measured medians are from the simulated ones. A constant bias therefore counts as an
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
from matplotlib.figure import Figure

from megatron_fssdp.config.cluster_description import ClusterDescription, LinkDescription
from megatron_fssdp.config.cluster_files import load_cluster
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.strategy.shipped_settings import EpSettings
from megatron_fssdp.report.colours import distinct_colours
from megatron_fssdp.simulation.moe_job import MoeJob
from megatron_fssdp.simulation.simulator import simulate

CONTROL_SUFFIX = " again"  # the testbed's second run of a variant, which has no simulation of its own
FREE = LinkDescription(alpha_s=0.0, bandwidth_bytes_per_s=1e15)
FP32_BYTES = 4


@dataclass(frozen=True)
class Comparison:
    """One workload under one strategy at one link rate.

    Attributes:
        rate: Rate of a node's link, as given to the testbed.
        workload: Name of the workload.
        strategy: Name of the testbed's variant.
        measured_s: Median seconds of the measured iterations.
        measured_spread: Interquartile range of the measured seconds, divided by their median.
        simulated_s: Median seconds of the same iterations in the simulator.
    """

    rate: str
    workload: str
    strategy: str
    measured_s: float
    measured_spread: float
    simulated_s: float

    @property
    def error(self) -> float:
        """Relative error of the simulation.

        It is positive if the simulation is slower than the measurement.
        """
        return self.simulated_s / self.measured_s - 1


def main() -> int:
    """Compare, print a table, and write JSON, a table and plots."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULTS")
    parser.add_argument("--out", type=Path, required=True, help="folder of the report")
    parser.add_argument(
        "--cluster",
        type=Path,
        nargs="+",
        help="cluster.yaml written by `testbed --profile`: one file, or one for each result",
    )
    options = parser.parse_args()
    try:
        records = [read(path) for path in options.results]
        clusters = clusters_of(options.cluster, len(records))
        comparisons = [
            one
            for record, measured in zip(records, clusters, strict=True)
            for one in compare(record, measured)
        ]
        if len(comparisons) < 2:
            raise ConfigurationError(
                f"got {len(comparisons)} comparison, wanted two or more; give results with more workloads"
            )
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    controls = [abs(of) for record in records for of in record.get("control_difference", {}).values()]
    figures = {**summary(comparisons), "worst_control_difference": max(controls, default=None)}
    table = report(comparisons, figures)
    print(table)
    record = {
        "summary": figures,
        "comparisons": [{**asdict(one), "error": one.error} for one in comparisons],
        "results": [str(path) for path in options.results],
        "clusters": [None if one is None else one.model_dump(mode="json") for one in clusters],
    }
    path = options.out / "predictor_accuracy"
    path.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(table + "\n", encoding="utf-8")
    for suffix in (".png", ".svg"):
        draw(comparisons, figures, path.with_suffix(suffix))
    print(f"wrote {path}.json, .md, .png and .svg")
    return 0


def clusters_of(paths: Sequence[Path] | None, num_results: int) -> list[ClusterDescription | None]:
    """Return the cluster description of each result, or None where no file was given.

    Raises:
        ConfigurationError: The number of files is neither one nor the number of results.
    """
    if paths is None:
        return [None] * num_results
    if len(paths) not in (1, num_results):
        raise ConfigurationError(
            f"--cluster: got {len(paths)} files for {num_results} results, wanted one file for all or one "
            "for each"
        )
    clusters: list[ClusterDescription | None] = [load_cluster(path) for path in paths]
    return clusters * num_results if len(clusters) == 1 else clusters


def read(path: Path) -> dict[str, Any]:
    """Read one result file of the testbed.

    Raises:
        ConfigurationError: The file cannot be read or is not a result of the testbed.
    """
    path = path / "testbed.json" if path.is_dir() else path
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path}: cannot be read ({error}); give a testbed.json") from None
    wanted = {"options", "size", "pace", "link_payload_bytes_per_s", "samples"}
    missing = sorted(wanted - set(record)) if isinstance(record, dict) else sorted(wanted)
    if missing:
        raise ConfigurationError(f"{path}: has no {', '.join(missing)}; give a testbed.json")
    for key in ("options", "size", "pace"):
        if not isinstance(record[key], dict):
            raise ConfigurationError(f"{path}: {key} is not an object; give a testbed.json")
    samples = record["samples"]
    if not isinstance(samples, list) or not samples or not all(map(_is_sample, samples)):
        raise ConfigurationError(
            f"{path}: samples are not a list of measured iterations, each with a workload, a variant, "
            "an iteration from 0 and seconds above 0; run the testbed again"
        )
    return dict(record)


def _is_sample(sample: Any) -> bool:
    if not isinstance(sample, dict):
        return False
    iteration, seconds = sample.get("iteration"), sample.get("seconds")
    return (
        isinstance(sample.get("workload"), str)
        and isinstance(sample.get("variant"), str)
        and isinstance(iteration, int)
        and iteration >= 0
        and isinstance(seconds, float | int)
        and 0 < seconds < float("inf")
    )


def compare(record: dict[str, Any], measured: ClusterDescription | None) -> list[Comparison]:
    """Compare all workloads and strategies of one result file."""
    options, size = parsed_options(record["options"]), record["size"]
    world_size = options.nodes * options.ranks_per_node
    cluster = described_cluster(record, options.nodes, options.ranks_per_node, measured)
    job = described_job(size, record["pace"], world_size)
    cells: dict[tuple[str, str], dict[int, float]] = {}
    for sample in record["samples"]:
        if not sample["variant"].endswith(CONTROL_SUFFIX):
            cell = cells.setdefault((sample["workload"], sample["variant"]), {})
            cell[sample["iteration"]] = sample["seconds"]

    @cache
    def counts_ILDE(workload: str) -> np.ndarray:
        return drawn_counts(options, workload, size, world_size)

    found = []
    for (workload, variant), seconds in sorted(cells.items()):
        iterations = sorted(seconds)
        simulated_s = simulated_iterations_s(variant, counts_ILDE(workload), cluster, job)[iterations]
        quarters = np.quantile([seconds[number] for number in iterations], [0.25, 0.5, 0.75])
        found.append(
            Comparison(
                options.rate,
                workload,
                variant,
                float(quarters[1]),
                float((quarters[2] - quarters[0]) / quarters[1]),
                float(np.median(simulated_s)),
            )
        )
    return found


def described_cluster(
    record: dict[str, Any], num_nodes: int, per_node: int, measured: ClusterDescription | None
) -> ClusterDescription:
    """Return a description of the testbed's cluster, with measured start-up times and links inside a node.

    Raises:
        ConfigurationError: The measured cluster has other nodes than the testbed.
    """
    payload = record["link_payload_bytes_per_s"]
    pace = record["pace"]["expert_flops_per_s"]
    inter = LinkDescription(
        alpha_s=0.0 if measured is None else measured.inter_node.alpha_s, bandwidth_bytes_per_s=payload
    )
    compute = {"expert_flops_per_s": pace, "non_expert_flops_per_s": pace}
    if measured is not None:
        if (measured.num_nodes, measured.devices_per_node) != (num_nodes, per_node):
            raise ConfigurationError(
                f"cluster {measured.name} has {measured.num_nodes} nodes of {measured.devices_per_node}, the "
                f"testbed had {num_nodes} of {per_node}; give the cluster.yaml of the same nodes and rate"
            )
        return measured.model_copy(update={"inter_node": inter, **compute})
    return ClusterDescription(
        name="testbed",
        num_nodes=num_nodes,
        devices_per_node=per_node,
        intra_node=FREE,
        inter_node=inter,
        **compute,
    )


def described_job(size: dict[str, Any], pace: dict[str, Any], num_devices: int) -> MoeJob:
    """Return the job of the testbed's stack: paced attention, two matrices per expert, fp32, no optimizer."""
    elements = 2 * size["hidden_size"] * size["ffn_size"]
    return MoeJob(
        num_devices=num_devices,
        num_experts=size["num_experts"],
        top_k=size["top_k"],
        tokens_per_micro_batch=size["tokens_per_rank"],
        num_micro_batches=1,
        token_bytes=size["hidden_size"] * FP32_BYTES,
        expert_elements=elements,
        expert_flops_per_token=2.0 * elements,
        dtype_bytes=FP32_BYTES,
        gradient_bytes=FP32_BYTES,
        before_layer_flops_L=(0.0,) * size["num_layers"],
        before_gate_flops_L=(pace["attention_s"] * pace["expert_flops_per_s"],) * size["num_layers"],
        on_cuda=False,
    )


def parsed_options(texts: dict[str, str]) -> argparse.Namespace:
    """Return the testbed's options from the texts that its result file keeps."""
    from benchmarks.testbed.__main__ import _parser

    parser = _parser()
    options = parser.parse_args(["--out", texts["out"]])
    for action in parser._actions:
        text = texts.get(action.dest)
        if text is not None and text != "None" and action.nargs != 0:
            setattr(options, action.dest, action.type(text) if callable(action.type) else text)
    return options


def drawn_counts(
    options: argparse.Namespace, workload: str, size: dict[str, Any], world_size: int
) -> np.ndarray:
    """Return the loads of the testbed: int64 ``[I, L, D, E]``."""
    from benchmarks.testbed.__main__ import _counts
    from benchmarks.testbed.stack_inputs import StackSize

    iterations = options.warm_up + options.repetitions
    counts_LIDE = _counts(options, workload, StackSize(**size), world_size, iterations)
    return np.ascontiguousarray(np.swapaxes(counts_LIDE, 0, 1))


def simulated_iterations_s(
    variant: str, counts_ILDE: np.ndarray, cluster: ClusterDescription, job: MoeJob
) -> np.ndarray:
    """Return the simulated seconds of every iteration, warm-ups included: float64 ``[I]``."""
    from benchmarks.testbed.__main__ import _variant

    chosen = _variant(variant)
    settings = chosen.settings if chosen.settings is not None else EpSettings()
    return simulate(chosen.strategy, settings, counts_ILDE, cluster, job).iteration_s


def summary(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """Return R², mean and worst relative error of all comparisons, and by rate, workload and strategy."""
    groups = {
        key: {
            name: _figures([one for one in comparisons if getattr(one, key) == name])
            for name in dict.fromkeys(getattr(one, key) for one in comparisons)
        }
        for key in ("rate", "workload", "strategy")
    }
    return {**_figures(comparisons), "by": groups}


def _figures(comparisons: Sequence[Comparison]) -> dict[str, float | int | None]:
    measured = np.array([one.measured_s for one in comparisons])
    simulated = np.array([one.simulated_s for one in comparisons])
    errors = simulated / measured - 1
    variance = ((measured - measured.mean()) ** 2).sum()
    return {
        "num_comparisons": len(comparisons),
        "r_squared": float(1 - ((measured - simulated) ** 2).sum() / variance) if variance > 0 else None,
        "mean_relative_error": float(np.abs(errors).mean()),
        "mean_signed_error": float(errors.mean()),
        "worst_relative_error": float(np.abs(errors).max()),
        "mean_measured_spread": float(np.mean([one.measured_spread for one in comparisons])),
    }


def report(comparisons: Sequence[Comparison], figures: dict[str, Any]) -> str:
    """Return a Markdown report: a table of all comparisons, then the summary figures."""
    rows = [
        "| rate | workload | strategy | measured ms | simulated ms | error |",
        "|---|---|---|--:|--:|--:|",
    ]
    rows += [
        f"| {one.rate} | {one.workload} | {one.strategy} | {1e3 * one.measured_s:.1f} "
        f"| {1e3 * one.simulated_s:.1f} | {one.error:+.1%} |"
        for one in comparisons
    ]
    rows.append("")
    if (noise := figures.get("worst_control_difference")) is not None:
        rows.append(f"- noise: a second measurement of `none` differed by up to {noise:.1%}")
    for key, names in {"all": {"": figures}, **figures["by"]}.items():
        for name, of in names.items():
            r_squared = "–" if of["r_squared"] is None else f"{of['r_squared']:.4f}"
            rows.append(
                f"- {key} {name}".rstrip() + f": R² {r_squared}, mean error {of['mean_relative_error']:.1%} "
                f"(signed {of['mean_signed_error']:+.1%}), worst {of['worst_relative_error']:.1%}, "
                f"{of['num_comparisons']} comparisons"
            )
    return "\n".join(rows)


def draw(comparisons: Sequence[Comparison], figures: dict[str, Any], path: Path) -> None:
    """Plot measured against simulated seconds. Each strategy has a colour, each rate a marker."""
    from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter

    figure = Figure(figsize=(6, 8), layout="constrained")
    axes = figure.subplots()
    strategies = list(dict.fromkeys(one.strategy for one in comparisons))
    rates = list(dict.fromkeys(one.rate for one in comparisons))
    for strategy, colour in zip(strategies, distinct_colours(strategies), strict=True):
        for marker, rate in zip("osD^vP*X" * len(rates), rates, strict=False):
            of = [one for one in comparisons if (one.strategy, one.rate) == (strategy, rate)]
            axes.scatter(
                [one.simulated_s for one in of],
                [one.measured_s for one in of],
                color=colour,
                marker=marker,
                label=f"{strategy}, {rate}",
            )
    both = [seconds for one in comparisons for seconds in (one.simulated_s, one.measured_s)]
    ends = [min(both) / 1.2, max(both) * 1.2]
    axes.plot(ends, ends, color="grey", linewidth=1, label="equal")
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axes.set_xlabel("simulated seconds of an iteration")
    axes.set_ylabel("measured seconds (median)")
    r_squared = figures["r_squared"]
    axes.set_title(
        f"R² {'–' if r_squared is None else format(r_squared, '.3f')}, "
        f"mean error {figures['mean_relative_error']:.1%}, {len(comparisons)} points"
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 7)))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(ScalarFormatter())
    figure.legend(fontsize="small", loc="outside lower center")
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
