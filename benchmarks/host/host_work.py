"""Prints what the host does in a forward pass of an MoE layer, under every strategy and in Megatron.

Run: ``python benchmarks/host/host_work.py``. No GPU is needed. A virtual device (``docs/contributing.md``)
executes the CUDA code paths on four CPU ranks and notes every operator, collective and host synchronization.
Megatron's own all-to-all dispatcher is counted in the same way. A virtual device has no times; those of plans
are measured by ``host_table.py``.
"""

import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

if not __package__:  # run as a file
    sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.host.counted_layers import CASES, RANKS, count_on_rank
from benchmarks.host.counted_passes import CountedPasses, most_of
from megatron_fssdp.testing import run_ranks


def counts_table(counts: dict[str, CountedPasses]) -> Table:
    """The counts of forward passes."""
    title = "Host work of a layer's forward pass on a virtual CUDA device (largest of all passes)"
    table = Table("layer", title=title)
    for head in (
        "host syncs",
        "recomputed",
        "operators before the sync",
        "operators from the sync to the first row",
        "plans ahead after the sync",
        "plans after the gate",
    ):
        table.add_column(head, justify="right")
    for name, passes in counts.items():
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


def main() -> None:
    """Count on four ranks and print the table."""
    counts = most_of(run_ranks(count_on_rank, RANKS, CASES, timeout_s=600))
    Console(width=150).print(counts_table(counts))


if __name__ == "__main__":
    main()
