"""The ranking of strategies as text: cells for pages, and tables for the terminal."""

from rich import box
from rich.table import Table

from megatron_fssdp.reporting.simulation_report import RankedStrategy, SimulationReport
from megatron_fssdp.reporting.units import format_memory, format_seconds
from megatron_fssdp.simulation.break_even import BreakEven

_RANKING = (
    "strategy",
    "ms of an iteration",
    "warm-up",
    "× ep",
    "% of ceiling",
    "load max/mean",
    "peak memory",
)
_COSTS = ("host ms",)
_PAYS = ("pays from", "pays up to")
_WHOLE = ("strategy", "warm-up")
"""Columns whose cells stay on one line; the headings of the others are wrapped first."""


def ranking_cells(report: SimulationReport) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the ranking as text: the header, and one row for each strategy from best to worst.

    The break-even columns are left out if nothing was searched.
    """
    searched = any(row.tokens is not None or row.bandwidth is not None for row in report.rows)
    header = _RANKING + _COSTS + (_PAYS if searched else ())
    cells = [_cells(report, row) for row in report.ranked]
    return header, [tuple(row[name] for name in header) for row in cells]


def ranking_tables(report: SimulationReport) -> tuple[Table, Table]:
    """Return the ranking for the terminal, in two tables that need at most 80 columns each.

    The first ranks the strategies. The second says from which size of a job on each of them pays, and what it
    costs the host.
    """
    header, rows = ranking_cells(report)
    ranking = _table(header[: len(_RANKING)], report.title)
    others = _table((header[0], *header[len(_RANKING) :]))
    for cells in rows:
        ranking.add_row(*cells[: len(_RANKING)])
        others.add_row(cells[0], *cells[len(_RANKING) :])
    return ranking, others


def warm_up_text(report: SimulationReport, row: RankedStrategy) -> str:
    """Return the number of a strategy's warm-up iterations and their mean time as text."""
    count = row.outcome.warm_up
    if not count:
        return "–"
    if not report.is_settled(row):
        return f"all {count}"
    return f"{count} × {format_seconds(row.outcome.iteration_s[:count].mean())}"


def _table(header: tuple[str, ...], title: str | None = None) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for position, heading in enumerate(header):
        table.add_column(
            heading, justify="right" if position else "left", overflow="fold", no_wrap=heading in _WHOLE
        )
    return table


def _cells(report: SimulationReport, row: RankedStrategy) -> dict[str, str]:
    outcome = row.outcome
    seconds, memory = report.steady_s(outcome), format_memory(outcome.memory.total_bytes)
    return {
        "strategy": f"{row.label} *" if row.changed else row.label,  # a note explains the star
        "ms of an iteration": f"{1e3 * seconds:,.0f}" if seconds >= 1 else f"{1e3 * seconds:.4g}",
        "warm-up": warm_up_text(report, row),
        "× ep": f"{report.plain_s / seconds:.2f}",
        "% of ceiling": f"{100 * report.ceiling_s / seconds:.0f}",
        "load max/mean": f"{report.steady_load(outcome):.2f}",
        "peak memory": f"{memory}, too much" if outcome.memory.runs_out else memory,
        "host ms": f"{1e3 * outcome.host_s:.3g}",
        "pays from": _in_words(row.tokens, "{:,.0f} tokens"),
        "pays up to": _in_words(row.bandwidth, "{:.3g} Gb/s", 8e-9),
    }


def _in_words(found: BreakEven | None, form: str, unit: float = 1.0) -> str:
    if found is None:
        return "–"
    if found.value is None:
        return "always" if found.pays_now else "never"
    return form.format(found.value * unit)
