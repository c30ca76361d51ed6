"""The ranking of simulated strategies: one table, two for the terminal, and a figure."""

from collections.abc import Sequence

import plotly.graph_objects as go
from rich.table import Table as TerminalTable

from megatron_fssdp.report.figures import GREY, time_bars
from megatron_fssdp.report.simulations.simulation_report import RankedStrategy, SimulationReport
from megatron_fssdp.report.tables import Table, terminal_table
from megatron_fssdp.report.units import format_memory, format_seconds
from megatron_fssdp.simulation.break_even import BreakEven

EVEN_EP = "ep with perfectly even loads"
"""Name of the reference: plain expert parallelism with balanced routing."""

_RANKING = (
    "strategy",
    "ms of an iteration",
    "warm-up",
    "× ep",
    "% of even ep",
    "load max/mean",
    "peak memory",
)
_PAYS = ("pays from", "pays up to")
_WHOLE = ("strategy", "warm-up")
"""Columns whose cells stay on one line; the headings of the others are wrapped first."""


def ranking_table(report: SimulationReport) -> Table:
    """Return the ranking: one row for each strategy from best to worst.

    The break-even columns are left out if nothing was searched.
    """
    searched = any(row.tokens is not None or row.bandwidth is not None for row in report.rows)
    header = (*_RANKING, "host ms", *(_PAYS if searched else ()))
    return Table(header, tuple(_cells(report, row)[: len(header)] for row in report.ranked))


def ranking_tables(report: SimulationReport) -> Sequence[TerminalTable]:
    """Return the ranking for 80 columns: the strategies, and what they cost the host and when they pay."""
    table, count = ranking_table(report), len(_RANKING)
    return (
        terminal_table(table.columns(*range(count)), report.title, whole=_WHOLE),
        terminal_table(table.columns(0, *range(count, len(table.header))), whole=_WHOLE),
    )


def ranking_figure(report: SimulationReport) -> go.Figure:
    """Return bars of the parts of an iteration's time under every strategy, the fastest first."""
    parts_s = [report.steady_parts_s(row.outcome) for row in report.ranked]
    figure = time_bars("simulated time of an iteration", [row.label for row in report.ranked], parts_s)
    figure.add_vline(
        x=report.even_ep_s,
        line={"color": GREY, "dash": "dash", "width": 1.5},
        name=EVEN_EP,
        showlegend=True,
    )
    return figure


def warm_up_text(report: SimulationReport, row: RankedStrategy) -> str:
    """Return the number of a strategy's warm-up iterations and their mean time as text."""
    count = row.outcome.warm_up
    if not count:
        return "–"
    if not report.is_settled(row):
        return f"all {count}"
    return f"{count} × {format_seconds(row.outcome.iteration_s[:count].mean())}"


def _cells(report: SimulationReport, row: RankedStrategy) -> tuple[str, ...]:
    outcome = row.outcome
    seconds, memory = report.steady_s(outcome), format_memory(outcome.memory.total_bytes)
    return (
        f"{row.label} *" if row.changed else row.label,  # a note explains the star
        f"{1e3 * seconds:,.0f}" if seconds >= 1 else f"{1e3 * seconds:.4g}",
        warm_up_text(report, row),
        f"{report.plain_s / seconds:.2f}",
        f"{100 * report.even_ep_s / seconds:.0f}",
        f"{report.steady_load(outcome):.2f}",
        f"{memory}, too much" if outcome.memory.runs_out else memory,
        f"{1e3 * outcome.host_s:.3g}",
        _break_even(row.tokens, "{:,.0f} tokens"),
        _break_even(row.bandwidth, "{:.3g} Gb/s", 8e-9),
    )


def _break_even(found: BreakEven | None, form: str, unit: float = 1.0) -> str:
    if found is None:
        return "–"
    if found.value is None:
        return "always" if found.pays_now else "never"
    return form.format(found.value * unit)
