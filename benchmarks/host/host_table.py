"""Measures what the host of a rank plans for a layer under every strategy.

``python -m benchmarks.host.host_table`` prints ``MEASURED`` of ``planning/cost/host_seconds.py``, with
which the simulator counts host time; ``--write`` puts it there. Every strategy has its default settings and
plans one iteration after another, for the loads and costs of ``drifting_jobs.py``. ``fssdp`` is measured with
plans for each micro-batch, too, and with corrections. Times are medians of CPU milliseconds of one process.

Shape letters: E experts, D devices.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.host.drifting_jobs import drifting_loads, job_of, names
from benchmarks.result_file import write_result
from megatron_fssdp.config.cluster_description import load_cluster
from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES
from megatron_fssdp.planning.compiled_form import kernel_form
from megatron_fssdp.planning.cost import host_seconds
from megatron_fssdp.planning.cost.host_seconds import SIZES
from megatron_fssdp.planning.cost.link_seconds import topology_of
from megatron_fssdp.planning.dispatch.whole_tokens import KnownSplits
from megatron_fssdp.planning.loads import LoadHistory
from megatron_fssdp.planning.placement.placement import even_owners
from megatron_fssdp.planning.slot_tables import SlotTable
from megatron_fssdp.runtime.layers.layer_planner import packed, unpacked
from megatron_fssdp.runtime.slots.remap.shares import Shares
from megatron_fssdp.simulation.moe_job import MoeJob
from megatron_fssdp.simulation.simulator import layer_profile
from megatron_fssdp.strategies.auto.auto_strategy import selecting
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.layer_planning import plan_after_gate, plan_before_gate
from megatron_fssdp.strategies.registry import build_strategy

HISTORY_ITERATIONS = 4
"""Iterations before the measured ones, which only fill the history."""

PARTS = {
    "before_gate_ms": "before the gate",
    "after_gate_ms": "after the gate",
    "dispatch_ms": "share table of a micro-batch",
    "correction_ms": "correction after the gate",
}
SHARING = "sending and receiving a plan"
NOTHING_MS = 0.05
"""Shorter times are those of calls that plan nothing."""


def median_ms(name: str, job: MoeJob, iterations: int, **settings: object) -> list[float]:
    """CPU milliseconds of a layer for all of :data:`PARTS`, and for :data:`SHARING`."""
    num_experts, num_devices = job.num_experts, job.num_devices
    cluster = load_cluster("h200").model_copy(update={"num_nodes": max(1, num_devices // 8)})
    strategy = build_strategy(name, STRATEGIES[name].settings.model_validate(settings))
    profile = layer_profile(job, cluster, strategy.replica_life)
    topology = topology_of(cluster, num_devices)
    context = LayerContext(1, even_owners(num_experts, num_devices), topology, profile)
    history = LoadHistory(strategy.window, num_devices, num_experts)
    counts_IDE = drifting_loads(job, HISTORY_ITERATIONS + iterations)[:, 0].astype(np.int64)
    for counts_DE in counts_IDE[:HISTORY_ITERATIONS]:
        history.append(counts_DE)
    seconds = []
    for counts_DE in counts_IDE[HISTORY_ITERATIONS:]:
        if selecting(strategy):
            strategy.select([1], strategy.price([context], [history]))
        times = [time.process_time()]
        plan = plan_before_gate(strategy, context, history)
        corrects = plan.corrects
        times.append(time.process_time())
        plan = plan_after_gate(strategy, context, counts_DE, plan, 1)
        times.append(time.process_time())
        if plan.each_micro_batch:  # the device waits for its shares
            share_out(plan, counts_DE, context)
        times.append(time.process_time())
        unpacked(packed(plan), context)
        times.append(time.process_time())
        before_s, after_s, dispatch_s, sharing_s = np.diff(times)
        seconds.append((before_s, after_s * (not corrects), dispatch_s, after_s * corrects, sharing_s))
        history.append(counts_DE)
    return (1e3 * np.median(seconds, axis=0)).tolist()


def share_out(plan: LayerPlan, counts_DE: np.ndarray, context: LayerContext, rank: int = 1) -> None:
    """Share out the tokens of one rank's micro-batch, as ``PassBinder.for_micro_batch`` does."""
    slots = SlotTable.of(plan.placement, int(plan.placement.replicas_per_device_D.max()))
    tokens = plan.whole_tokens(counts_DE, context.topology, rank)
    KnownSplits.of(tokens, slots.expert_DU[rank])
    Shares.by_intervals(tokens.sent_ED, slots, torch.device("cpu"))


def as_source(times: dict[str, np.ndarray]) -> str:
    """The table as Python source."""
    lines = ["MEASURED = HostCosts("]
    for part, key in enumerate(PARTS):
        lines.append(f"    {key}={{")
        for name, own in times.items():
            if np.median(own[part]) >= NOTHING_MS:
                lines.append(
                    f'        "{name}": ({", ".join(f"{float(f'{value:.2g}'):g}" for value in own[part])}),'
                )
        lines.append("    },")
    return "\n".join([*lines, ")"]) + "\n"


def main() -> None:
    """Print the table, or write it into the package."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=15, help="iterations at each size")
    parser.add_argument("--write", action="store_true", help="put the table where the simulator reads it")
    parser.add_argument("--result", type=Path, help="file for benchmarks/results")
    given = parser.parse_args()
    print(f"planning kernels: {kernel_form()}; (experts, devices): {SIZES}")
    times = {
        name: np.array([median_ms(name, job_of(*size, 1), given.iterations) for size in SIZES]).T
        for name in names()
    }
    for planned_from, parts in (("first", [3]), ("each", [1, 2])):
        of_source = [
            median_ms("fssdp", job_of(*size, 1), given.iterations, planned_from=planned_from)
            for size in SIZES
        ]
        times["fssdp"][parts] = times["auto"][parts] = np.transpose(of_source)[parts]
    print(table := as_source(times))
    if given.write:
        path = Path(host_seconds.__file__)
        text = path.read_text(encoding="utf-8")
        path.write_text(text[: text.index("MEASURED = ")] + table, encoding="utf-8")
    if given.result:
        # What auto does after the gate is what fssdp does there, and all strategies send plans alike.
        of_fssdp = {("auto", part) for part in tuple(PARTS.values())[1:]}
        of_fssdp |= {(name, SHARING) for name in times if name != "fssdp"}
        columns = ("strategy", "part", *(f"ms, {num_experts} × {number}" for num_experts, number in SIZES))
        rows = [
            (name, part, *np.round(ms, 2))
            for name in times
            for part, ms in zip((*PARTS.values(), SHARING), times[name], strict=True)
            if np.median(ms) >= NOTHING_MS and (name, part) not in of_fssdp
        ]
        write_result(given.result, "How long does planning a layer take (experts × devices)?", columns, rows)


if __name__ == "__main__":
    main()
