"""Compares strategies on nodes with links of limited rate (see docs/performance.md).

For example::

    python -m benchmarks.testbed --nodes 4 --ranks-per-node 2 --rate 400mbit --out DIR
    python -m benchmarks.testbed --profile --out DIR
"""

import argparse
import json
import os
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

_RECORDED = Path(__file__).parent / "recorded_loads"
LOADS = {
    "replay": _RECORDED / "gpt_moe_tiny_16_experts_loads.npz",
    "replay-micro": Path(__file__).parents[1] / "recordings" / "sources-16-top-2-none.npz",
}
"""Default records."""
MICRO_BATCHES = dict.fromkeys(("drift", "jump-micro", "replay-micro"), 4)
"""Default number of micro-batches of workloads whose micro-batches differ; of others it is 1."""
FSSDP_DEFAULTS = {"slots": 2, "reshard_interval": 0}
CONTROL = "none again"


def main() -> int:
    """Parse the options, enter private namespaces, and run the testbed."""
    options = parser().parse_args()
    from benchmarks.testbed.nodes import processes

    if options.loopback or processes.is_inside():
        return run(options)
    refusal = processes.namespaces_refusal()
    if refusal is not None:
        print(f"[testbed] this machine refuses to create namespaces: {refusal}", file=sys.stderr)
        print("[testbed] give --loopback to run without links of limited rate", file=sys.stderr)
        return 2
    try:
        return processes.run_inside(sys.argv[1:])
    except KeyboardInterrupt:
        return 130


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(
        prog="python -m benchmarks.testbed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = arguments.add_argument
    add("--nodes", type=int, default=4)
    add("--ranks-per-node", type=int, default=2)
    add("--rate", default="400mbit", help="rate of every node's link, in each direction")
    add(
        "--workloads",
        default="W0,W1,W3",
        help="W0 to W7, lognormal-weak/-medium/-strong, replay, drift, jump-micro, replay-micro",
    )
    add(
        "--micro-batches",
        type=int,
        help="of an iteration, among which its tokens are divided; default: 4 for drift, jump-micro and "
        "replay-micro, 1 for others",
    )
    add("--strategies", default="none,ep,fssdp", help="NAME or NAME:key=value;key=value")
    add("--repetitions", type=int, default=10)
    add(
        "--warm-up",
        type=int,
        default=3,
        help="unmeasured iterations of every workload and variant, which fill the history",
    )
    add("--out", type=Path, required=True, help="folder to write the results to")
    add(
        "--loads",
        type=Path,
        help="run, or file with counts_ILDE, that `replay` reads; file with counts_IZLDE for `replay-micro`",
    )
    add("--replay-from", type=int, default=400, help="first iteration of the record to replay")
    add("--layers", type=int, default=4)
    add("--experts", type=int, default=16)
    add("--top-k", type=int, default=2)
    add("--hidden", type=int, default=256)
    add("--ffn", type=int, default=1024)
    add("--tokens", type=int, default=1024, help="tokens of each rank in an iteration")
    add("--gflops", type=float, default=200, help="throughput of each rank on experts, in GFLOP/s")
    add(
        "--attention-ms",
        type=float,
        help="forward time of a layer's attention; default: both passes take a third of a balanced layer",
    )
    add("--cluster", type=Path, help="cluster.yaml of --profile, from which strategies know the links")
    add("--seed", type=int, default=0)
    add("--result", type=Path, help="also write medians to this file for benchmarks/results")
    add("--no-control", action="store_true", help="do not run `none` a second time under another name")
    add("--loopback", action="store_true", help="no namespaces and no limit of the links' rate")
    add("--profile", action="store_true", help="instead: measure the nodes' links and write cluster.yaml")
    return arguments


def run(options: argparse.Namespace) -> int:
    """Build the nodes, measure, and write the results."""
    from benchmarks.testbed.nodes import processes
    from benchmarks.testbed.nodes.links import Nodes, parse_rate, payload_bytes_per_s
    from megatron_fssdp.config.errors import ConfigurationError

    try:
        nodes = Nodes(options.nodes, parse_rate(options.rate))
        if not options.loopback:
            processes.end_with_the_command()
            nodes.build()
            print(f"[testbed] {nodes.num_nodes} nodes built, {options.rate} each", flush=True)
        _prepare_imports()
        options.out.mkdir(parents=True, exist_ok=True)
        payload = payload_bytes_per_s(nodes.rate_bits_per_s)
        if options.profile:
            _run_profile(options, nodes)
        else:
            _run_stacks(options, nodes, payload)
    except (ValueError, ConfigurationError, RuntimeError) as error:
        print(f"[testbed] {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _prepare_imports() -> None:
    """Import the modules that forked ranks share. Nothing is computed in this process."""
    os.environ["MEGATRON_FSSDP_DEVICE"] = "cpu"
    import torch.distributed  # noqa: F401

    from megatron_fssdp.megatron_adapter.cpu import cpu_runtime

    cpu_runtime.install()
    import megatron.core.transformer.moe.token_dispatcher  # noqa: F401


def _run_profile(options: argparse.Namespace, nodes: Any) -> None:
    """Measure the links between the nodes as ``megatron-fssdp profile`` does. Compute has the stated pace."""
    from benchmarks.testbed.measurement import profile_nodes
    from benchmarks.testbed.nodes.processes import run_on_nodes
    from megatron_fssdp.config.cluster_description import cluster_yaml

    cluster = run_on_nodes(
        profile_nodes,
        nodes,
        options.ranks_per_node,
        f"testbed, {options.rate}",
        options.nodes,
        options.repetitions,
        options.gflops * 1e9,
        namespaces=not options.loopback,
    )[0]
    path = options.out / "cluster.yaml"
    path.write_text(cluster_yaml(cluster), encoding="utf-8")
    print(f"[testbed] wrote {path}", flush=True)


def _run_stacks(options: argparse.Namespace, nodes: Any, payload: float) -> None:
    import psutil

    from benchmarks.result_file import write_result
    from benchmarks.testbed import correctness, measurement, report
    from benchmarks.testbed.expert_moves import MOMENTS
    from benchmarks.testbed.nodes.processes import run_on_nodes
    from benchmarks.testbed.stack_inputs import (
        Pace,
        StackSize,
        nominal_cluster,
        third_of_balanced_iteration_s,
    )
    from megatron_fssdp.config.cluster_description import load_cluster
    from megatron_fssdp.planning.cost.deduplicated_traffic import TokenChoices
    from megatron_fssdp.planning.cost.layer_profile import LayerProfile
    from megatron_fssdp.planning.cost.link_seconds import cluster_cost
    from megatron_fssdp.planning.placement.topology import Topology
    from megatron_fssdp.planning.transfer.message_size import message_rule

    facts = report.host_facts()
    world_size = options.nodes * options.ranks_per_node
    sizes = (options.layers, options.experts, options.top_k)
    size = StackSize(*sizes, options.hidden, options.ffn, options.tokens)
    topology = Topology.uniform(world_size, options.nodes)
    cluster = nominal_cluster(payload, options.gflops * 1e9)
    attention_s = (
        third_of_balanced_iteration_s(size, topology, cluster)
        if options.attention_ms is None
        else options.attention_ms / 1e3
    )
    pace = Pace(options.gflops * 1e9, attention_s)
    if options.cluster is not None:
        measured = cluster_cost(load_cluster(options.cluster))
        cluster = replace(measured, expert_flops_per_s=pace.expert_flops_per_s)
    profile = LayerProfile(
        attention_s,
        cluster,
        size.expert_bytes,
        size.token_bytes,
        size.flops_per_token,
        memory_capacity=2,
        owned_bytes=(1 + MOMENTS) * size.expert_bytes,
        messages=message_rule(on_cuda=False),
        choices=TokenChoices(size.top_k),
        exact_shares_s=_shares_s(size, topology),
    )
    variants = [variant_of(text) for text in options.strategies.split(",")]
    if not options.no_control and any(variant.name == "none" for variant in variants):
        variants.append(measurement.Variant(CONTROL, "none"))
    iterations = options.warm_up + options.repetitions
    # The balanced workload is always included, because it gives the ceiling.
    names = list(dict.fromkeys(["W0", *options.workloads.split(",")]))
    counts = {name: counts_of(options, name, size, world_size, iterations) for name in names}
    heats = {name: report.heat(counts_LIZDE) for name, counts_LIZDE in counts.items()}
    for name, heat in heats.items():
        print(
            f"[testbed] {name}: micro-batches {counts[name].shape[2]}, "
            f"expert max/mean {heat['expert_max_over_mean']:.2f}, "
            f"device max/mean {heat['device_max_over_mean']:.2f}"
        )
    print(f"[testbed] attention: {1e3 * attention_s:.1f} ms forward, twice as long backward", flush=True)
    where = {"namespaces": not options.loopback}

    small = StackSize(2, options.experts, options.top_k, 16, 32, 64 * (options.micro_batches or 1))
    small_counts = {name: counts_of(options, name, small, world_size, iterations) for name in names}
    differences = run_on_nodes(
        correctness.compare,
        nodes,
        options.ranks_per_node,
        small,
        options.nodes,
        variants,
        small_counts,
        profile,
        options.seed,
        **where,
    )[0]
    worst = max(differences.values())
    print(f"[testbed] real compute: worst relative difference from plain EP {worst:.1e}", flush=True)
    if worst > correctness.TOLERANCE:
        raise RuntimeError(
            f"results differ from plain expert parallelism: {differences}, wanted at most 1e-5"
        )

    settings = (size, pace, profile, options.nodes, tuple(variants), counts)
    times = (options.repetitions, options.warm_up, options.seed)
    plan = measurement.Plan(*settings, *times, namespaces=not options.loopback)
    before = psutil.cpu_times()
    samples = run_on_nodes(measurement.measure, nodes, options.ranks_per_node, plan, **where)[0]
    shares = report.cpu_shares(before, psutil.cpu_times())
    summaries = report.summaries(samples)
    control = report.control_difference(summaries, CONTROL)
    chosen = [
        auto
        for variant in variants
        if variant.strategy == "auto"
        for auto in report.against_best(samples, variant.name, [CONTROL])
    ]
    record = {
        "host": facts,
        "cpu_shares": shares,
        "options": {key: str(value) for key, value in vars(options).items()},
        "size": asdict(size),
        "pace": asdict(pace),
        "link_payload_bytes_per_s": payload,
        "worst_difference_from_ep": differences,
        "heat": heats,
        "control_difference": control,
        "auto_against_best": [asdict(auto) for auto in chosen],
        "summaries": summaries,
        "samples": [asdict(sample) for sample in samples],
    }
    _write(options, record, report.table(summaries, heats))
    if options.result is not None:
        question = "How much faster is each strategy than Megatron's own dispatcher on the testbed?"
        write_result(options.result, question, *report.result_rows(summaries))
    for auto in chosen:
        over = "" if auto.over_reference is None else f", {auto.over_reference:.3f} times as fast as `none`"
        print(f"[testbed] {auto.workload}: auto took {auto.over_best:.3f} of {auto.best}'s seconds{over}")
    for name, difference in control.items():
        print(f"[testbed] {name}: `none` a second time took {100 * difference:+.1f} %")
    print(
        f"[testbed] cores while measuring: idle {shares['idle']:.0%}, taken by other machines "
        f"{shares['steal']:.0%}; transfers slow down where little is left"
    )


def variant_of(text: str) -> Any:
    from benchmarks.testbed.measurement import Variant
    from megatron_fssdp.config.strategy.strategy_registry import resolve_strategy
    from megatron_fssdp.config.strategy.strategy_settings import PlacementSettings

    name, _, given = text.partition(":")
    overrides = [override for override in given.split(";") if override]
    if name == "fssdp":
        overrides = [f"{key}={value}" for key, value in FSSDP_DEFAULTS.items()] + overrides
    settings = resolve_strategy(name, overrides=overrides)
    return Variant(text, name, settings if isinstance(settings, PlacementSettings) else None)


def _shares_s(size: Any, topology: Any) -> float:
    """Seconds of exact shares on a rank, if all ranks compute theirs at once."""
    from megatron_fssdp.megatron_adapter.cpu.cpu_replacements import CpuDeviceMode
    from megatron_fssdp.runtime.slots.remap.shares import seconds_of_shares

    with CpuDeviceMode():
        return seconds_of_shares(size.num_experts, topology) * max(
            1, topology.num_devices / (os.cpu_count() or 1)
        )


def counts_of(options: argparse.Namespace, name: str, size: Any, world_size: int, iterations: int) -> Any:
    """Return the assignments of a workload, int64 ``[L, I, Z, D, E]``. Layers differ only in a replay."""
    import numpy as np

    from benchmarks.testbed.testbed_loads import replay
    from megatron_fssdp.config.errors import ConfigurationError
    from megatron_fssdp.records.load_sources import MICRO_BATCH_COUNTS
    from megatron_fssdp.records.loads import read_loads
    from megatron_fssdp.simulation.workloads import WORKLOADS, WorkloadShape

    number = options.micro_batches or MICRO_BATCHES.get(name, 1)
    shape = WorkloadShape(world_size, size.num_experts, size.tokens_per_rank, size.top_k, iterations, number)
    single = replace(shape, tokens_per_device=size.tokens_per_rank // number, num_micro_batches=1)
    wanted = (size.num_layers, iterations, number, world_size, size.num_experts)
    if name in WORKLOADS:
        of = shape if name in MICRO_BATCHES else single
        return np.broadcast_to(WORKLOADS[name].micro_batches(of, options.seed), wanted)
    if name not in LOADS:
        raise ConfigurationError(
            f"workload: got {name!r}, wanted one of {', '.join(WORKLOADS)}, {', '.join(LOADS)}"
        )
    path, first = options.loads or LOADS[name], options.replay_from
    if not path.exists():
        raise ConfigurationError(f"workload {name}: got no file {path}; give the record by --loads")
    if name == "replay":  # a run, or a file that can have any name
        recorded_ILDE = read_loads(path).counts_ILDE if path.is_dir() else np.load(path)["counts_ILDE"]
    else:
        recorded_IZLDE = np.load(path)[MICRO_BATCH_COUNTS]
        if recorded_IZLDE.shape[1] % number:
            got = f"a record of {recorded_IZLDE.shape[1]} micro-batches, wanted a multiple of {number}"
            raise ConfigurationError(f"workload {name}: got {got}; give other --micro-batches")
        # One micro-batch after the other, neighbours joined.
        joined = (number * len(recorded_IZLDE), -1, *recorded_IZLDE.shape[2:])
        recorded_ILDE = recorded_IZLDE.reshape(joined).sum(axis=1)
        single, first = replace(single, num_iterations=number * iterations), number * first
    of_layers = [recorded_ILDE[:, layer % recorded_ILDE.shape[1]] for layer in range(size.num_layers)]
    counts = np.stack([replay(recorded_IDE, single, first) for recorded_IDE in of_layers])
    return np.broadcast_to(counts.reshape(size.num_layers, iterations, -1, *wanted[3:]), wanted)


def _write(options: argparse.Namespace, record: dict[str, Any], table: str) -> None:
    record = {"finished": time.strftime("%Y-%m-%d %H:%M:%S"), **record}
    (options.out / "testbed.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (options.out / "testbed.md").write_text(table + "\n", encoding="utf-8")
    print(table)
    print(f"[testbed] wrote {options.out / 'testbed.json'} and .md", flush=True)


if __name__ == "__main__":
    sys.exit(main())
