"""Prints what the host does in a forward pass of an MoE layer, under every strategy and in Megatron.

Run: ``python benchmarks/host/host_work.py``. No GPU is needed. A virtual device (``docs/virtual-cuda.md``)
    executes the CUDA code paths on four CPU ranks and notes every operator, collective and host
    synchronization. Megatron's own all-to-all dispatcher is counted in the same way. A virtual device has no
    times. The second table therefore has host times of the decisions between the synchronization and the
    experts, at the sizes of real models.

Shape letters: E experts, D devices, T tokens.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

if not __package__:  # run as a file
    sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.host import transfer_host_cost
from benchmarks.host_counts.counted_layers import CASES, RANKS, count_on_rank
from benchmarks.host_counts.counted_passes import CountedPasses, most_of
from benchmarks.planner_time import DEVICES_PER_NODE, PROFILE, cases
from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES
from megatron_fssdp.planning.dispatch.token_dispatch import DispatchPolicy
from megatron_fssdp.planning.loads import LoadHistory
from megatron_fssdp.planning.placement.placement import even_owners
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.slots.slot_table import SlotTable
from megatron_fssdp.runtime.layers.slot_pass import source_table
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.registry import build_strategy
from megatron_fssdp.strategies.strategy import Strategy
from megatron_fssdp.testing import run_ranks

SIZES = ((64, 8), (64, 32), (256, 64))
"""Experts and devices of the second table."""


def counts() -> dict[str, CountedPasses]:
    """The largest counts of all ranks, by name of the case."""
    return most_of(run_ranks(count_on_rank, RANKS, CASES, timeout_s=600))


def counts_table(found: dict[str, CountedPasses]) -> Table:
    """The counts of forward passes.

    Args:
        found: Result of :func:`counts`.
    """
    table = Table(
        title="Host work of a layer's forward pass on a virtual CUDA device (largest of all passes)"
    )
    for head in (
        "layer",
        "host syncs",
        "recomputed",
        "operators before the sync",
        "operators from the sync to the first row",
        "plans ahead after the sync",
        "plans after the gate",
    ):
        table.add_column(head, justify="left" if head == "layer" else "right")
    for name, passes in found.items():
        first = passes.first
        numbers = (
            first.synchronizations,
            passes.again.synchronizations,
            first.operators_before,
            first.operators_after,
            first.plans_ahead,
            first.plans_after_gate,
        )
        table.add_row(name, *(str(number) for number in numbers))
    return table


def decision_table(repetitions: int) -> Table:
    """Median CPU milliseconds of decisions on one core.

    Args:
        repetitions: Number of measurements of each decision.
    """
    sizes = [f"{num_experts} experts, {num_devices} devices" for num_experts, num_devices in SIZES]
    table = Table("decision", *sizes, title="CPU milliseconds of the host's decisions (median)")
    columns = [_decisions(*size, repetitions) for size in SIZES]
    for name in columns[0]:
        table.add_row(name, *(f"{column[name]:.2f}" for column in columns))
    return table


def _decisions(num_experts: int, num_devices: int, repetitions: int) -> dict[str, float]:
    """Median CPU milliseconds of each decision at one size, by its name."""
    counts_DE, before_DE = cases(num_experts, num_devices, 2)
    topology = Topology.uniform(num_devices, max(1, num_devices // DEVICES_PER_NODE))
    context = LayerContext(1, even_owners(num_experts, num_devices), topology, PROFILE)
    history = LoadHistory(1, num_devices, num_experts)
    history.append(before_DE)
    owners = LayerPlan.owners_only(context, each_micro_batch=True)
    plan = _strategy("fssdp").before_gate(context, history)

    def dispatch(policy: DispatchPolicy) -> None:
        slots = SlotTable.of(plan.placement, 2)
        source_table(replace(plan, dispatch_policy=policy), slots, topology, 0, counts_DE)

    # Every call gets a new strategy, because Pro-Prophet's keeps its plans.
    calls: dict[str, Callable[[], object]] = {
        f"plan an iteration: {name} (in the backward pass)": partial(
            lambda name: _strategy(name).before_gate(context, history), name
        )
        for name in ("fssdp", "prophet")
    }
    calls |= {
        f"plan a micro-batch: {name} (after the gate)": partial(
            lambda name: _strategy(name).after_gate(context, counts_DE, owners, 1), name
        )
        for name in ("fastermoe", "quota")
    }
    calls |= {
        f"share table of a plan: {policy} (in the forward pass before)": partial(dispatch, policy)
        for policy in get_args(DispatchPolicy)
    }
    return {name: _median_ms(call, repetitions) for name, call in calls.items()}


def _strategy(name: str) -> Strategy:
    return build_strategy(name, STRATEGIES[name].settings.model_validate({"slots": 2}))


def _median_ms(call: Callable[[], object], repetitions: int) -> float:
    seconds = []
    for _ in range(repetitions):
        started_s = time.process_time()
        call()
        seconds.append(time.process_time() - started_s)
    return 1e3 * float(np.median(seconds))


def main() -> None:
    """Print both tables, and the host's time for the messages of transfers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=11, help="Measurements of each decision.")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(width=150)
    console.print(counts_table(counts()))
    console.print(decision_table(arguments.repetitions))
    transfer_host_cost.main([])


if __name__ == "__main__":
    main()
