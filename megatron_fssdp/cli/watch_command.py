"""``megatron-fssdp watch``: loads, replicas and waits of a training in the terminal, while it runs."""

import time
from collections import deque
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from megatron_fssdp.records.metrics import IterationMetrics, RunSession

RECENT = 20
"""Iterations over which figures are averaged, as in the progress of ``train``."""

PAUSE_S = 1.0

_COLUMNS = ("ep_load_max_over_mean", "load_max_over_mean", "num_replicas", "spag_exposed_s", "sprs_exposed_s")


def watch_command(
    run: Annotated[Path, typer.Argument(help="Folder of a run (record_dir).", metavar="RUN")],
) -> None:
    """Show loads, replicas and waits of a training while it runs; elsewhere than on a terminal, once.

    It ends when the last iteration is recorded, or with Ctrl-C.
    """
    from rich.console import Console
    from rich.live import Live

    from megatron_fssdp.config.errors import ConfigurationError
    from megatron_fssdp.records.metrics_file import METRICS_FILE, MetricsTail

    console, path = Console(), run / METRICS_FILE
    if not run.is_dir():
        raise ConfigurationError(f"watch: {run} is no folder; give the record_dir or --out of a training")
    tail = MetricsTail(path)
    recent: deque[IterationMetrics] = deque(maxlen=RECENT)
    session: RunSession | None = None
    with Live(console=console, auto_refresh=False, transient=False) as live:
        while True:
            for record in tail.read():
                recent.append(record)
                session = record.session or session
            table = _table(run, list(recent), session)
            if not console.is_terminal:
                break
            live.update(table, refresh=True)
            if recent and session and recent[-1].iteration >= session.iterations:
                return
            time.sleep(PAUSE_S)
    console.print(table)


def _table(run: Path, recent: "list[IterationMetrics]", session: "RunSession | None") -> "Table":
    """A row for each MoE layer, with means over the recent iterations."""
    from megatron_fssdp.report.tables import Table, terminal_table
    from megatron_fssdp.report.units import format_seconds

    title = f"{run}: waiting for the first iteration"
    if recent:
        last = recent[-1]
        of = f"/{session.iterations}" if session and session.iterations else ""
        seconds = format_seconds(fmean(iteration.iteration_s for iteration in recent))
        strategy = f"{session.strategy}, " if session else ""
        title = f"{run}: {strategy}iteration {last.iteration}{of}, loss {last.lm_loss:.4f}, {seconds} each"
    header = ("layer", "load under plain EP", "load", "replicas", "waits for weights", "for gradients")
    rows = []
    for of_layer in zip(*(iteration.layers for iteration in recent), strict=False):
        *numbers, spag_s, sprs_s = (
            fmean(getattr(measured, name) for measured in of_layer) for name in _COLUMNS
        )
        cells = (*(f"{mean:.3g}" for mean in numbers), format_seconds(spag_s), format_seconds(sprs_s))
        rows.append((str(of_layer[0].layer), *cells))
    caption = f"means of the last {len(recent)} iterations; load: busiest / mean" if recent else ""
    return terminal_table(Table(header, tuple(rows)), title, caption)
