"""Page section that ranks strategies on a described cluster, by simulation with the run's own loads."""

from typing import Any

from megatron_fssdp.reporting.colours import TIME_PARTS
from megatron_fssdp.reporting.html.section import GREY, Figure, Section, Table, titled
from megatron_fssdp.reporting.ranking_table import ranking_cells
from megatron_fssdp.reporting.simulation_report import SimulationReport
from megatron_fssdp.simulation.lanes import PARTS

_TITLE = "What if: strategies ranked on a cluster"
CEILING = "ep with balanced routing"
"""Name of the line at the seconds of plain expert parallelism with balanced routing."""

_NOT_ASKED = (
    "No cluster was given, so nothing was simulated. To rank all strategies on a cluster with this run's "
    "loads, give --cluster NAME (“megatron-fssdp configs” lists the names) or --cluster FILE.yaml "
    "(“megatron-fssdp profile” measures a cluster and writes the file)."
)


def what_if_section(report: SimulationReport | None) -> Section:
    """Make the section with bars of simulated seconds and the ranking.

    Args:
        report: Results of the simulation, or None. Without results, the section says how to get them.
    """
    if report is None:
        return Section("what-if", _TITLE, "", missing=_NOT_ASKED)
    lead = (
        f"{report.title}. These times are simulated, not measured: every strategy decides from the recorded "
        "loads, and the cluster's description gives the time of its decisions. The fastest is first."
    )
    figure, table = ranking_figure(report, "what-if"), ranking_page_table(report)
    return Section("what-if", _TITLE, lead, (figure,), table, notes=(*report.stars, *report.notes))


def ranking_figure(report: SimulationReport, name: str) -> Figure:
    """Return the figure with the parts of an iteration's time under every strategy, the fastest first.

    Args:
        report: Results of the simulation.
        name: Name of the figure on its page.
    """
    ranked = report.ranked
    parts_s = [report.steady_parts_s(row.outcome) for row in ranked]
    traces: list[dict[str, Any]] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": TIME_PARTS[part].name,
            "y": [row.label for row in ranked],
            "x": [found[part] for found in parts_s],
            "marker": {"color": TIME_PARTS[part].colour},
            "hovertemplate": "%{y}: %{x:.4g} s<extra>" + TIME_PARTS[part].name + "</extra>",
        }
        for part in PARTS
        if any(found[part] for found in parts_s)
    ]
    ceiling = {"xref": "x", "x0": report.ceiling_s, "x1": report.ceiling_s, "yref": "paper", "y0": 0, "y1": 1}
    line = {"color": GREY, "dash": "dash", "width": 1.5}
    layout = {
        "barmode": "stack",
        "bargap": 0.3,
        "xaxis": titled(
            "simulated time of an iteration", rangemode="tozero", tickformat="~s", ticksuffix="s"
        ),
        "yaxis": {"autorange": "reversed", "automargin": True},
        "shapes": [{"type": "line", **ceiling, "line": line, "showlegend": True, "name": CEILING}],
    }
    return Figure(name, traces, layout, 230 + 34 * len(ranked))


def ranking_page_table(report: SimulationReport) -> Table:
    """Return the ranking as a table for a page."""
    header, rows = ranking_cells(report)
    return Table(header, tuple(rows))
