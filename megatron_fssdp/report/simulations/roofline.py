"""The DDL-Roofline of a run as a table, as JSON and as a page (FasterMoE, §3.3, Fig. 5)."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from megatron_fssdp.report.colours import distinct_colours
from megatron_fssdp.report.figures import DASHES, GREY, new_figure
from megatron_fssdp.report.page import Page, Section, Subject
from megatron_fssdp.report.tables import Table
from megatron_fssdp.report.units import FLOPS, format_flops, unit_of
from megatron_fssdp.simulation.roofline import RooflinePoint, ideal_flops_per_s, semi_ideal_flops_per_s

LEGEND = (
    "R_CC: compute seconds over communication seconds. ideal: the throughput if communication ran entirely "
    "beside compute. semi-ideal: with even loads, and nothing beside compute. peak: of a device on experts' "
    "matrix products."
)


@dataclass(frozen=True)
class Roofline:
    """Data of a DDL-Roofline: the peak throughput, which determines both curves, and the points.

    Attributes:
        title: Title of the table and the page.
        peak_flops_per_s: Throughput of a device on expert GEMMs (``P_w``), in floating-point operations per
            second.
        points: Point of each strategy, by the strategy's name.
    """

    title: str
    peak_flops_per_s: float
    points: dict[str, RooflinePoint]


def roofline_table(roofline: Roofline) -> Table:
    """Return a table with one row for each strategy."""
    peak = roofline.peak_flops_per_s
    rows = []
    for name, point in roofline.points.items():
        reached = point.mean_flops_per_s
        bounds = (peak, semi_ideal_flops_per_s(point.ratio, peak), ideal_flops_per_s(point.ratio, peak))
        shares = [f"{100 * reached / bound:.0f}" for bound in bounds]
        rows.append((name, f"{point.ratio:.2f}", format_flops(reached), *shares))
    header = ("strategy", "R_CC", "per device", "% of peak", "% of semi-ideal", "% of ideal")
    return Table(header, tuple(rows))


def write_roofline(roofline: Roofline, path: Path) -> None:
    """Write the peak throughput and all points as JSON."""
    data = {
        "title": roofline.title,
        "peak_flops_per_s": roofline.peak_flops_per_s,
        "strategies": {
            name: {"ratio": point.ratio, "mean_flops_per_s": point.mean_flops_per_s, **asdict(point)}
            for name, point in roofline.points.items()
        },
    }
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def roofline_page(roofline: Roofline) -> Page:
    """Return the page with the curves and the points."""
    size, unit = unit_of(roofline.peak_flops_per_s, FLOPS)
    peak = roofline.peak_flops_per_s / size
    ratios = [point.ratio for point in roofline.points.values()]
    span = np.geomspace(min(0.1, min(ratios) / 2), max(10.0, max(ratios) * 2), 200)
    y_title = f"mean {unit} per device (Eq. 4)"
    figure = new_figure("", "compute seconds / communication seconds, R_CC (Eq. 3)", y_title, 460)
    figure.update_xaxes(type="log", dtick=1)
    figure.update_yaxes(type="log")
    curves = {"ideal (Eq. 5)": ideal_flops_per_s, "semi-ideal (Eq. 6)": semi_ideal_flops_per_s}
    for (name, curve), dash in zip(curves.items(), DASHES, strict=False):
        line = {"color": GREY, "dash": dash, "width": 2}
        figure.add_scatter(x=span, y=curve(span, peak), name=name, mode="lines", line=line, hoverinfo="skip")
    colours = distinct_colours(list(roofline.points))
    for i, ((name, point), colour) in enumerate(zip(roofline.points.items(), colours, strict=True)):
        figure.add_scatter(
            x=[point.ratio],
            y=[point.mean_flops_per_s / size],
            name=name,
            mode="markers",
            marker={"color": colour, "size": 11, "symbol": i},
            hovertemplate=f"R_CC %{{x:.2f}}, %{{y:.3g}} {unit}<extra>{name}</extra>",
        )
    table = roofline_table(roofline)
    words = "; ".join(f"{name} {flops}, {share} % of the peak" for name, _, flops, share, *_ in table.rows)
    subjects = [Subject(name, colour) for name, colour in zip(roofline.points, colours, strict=True)]
    section = Section("Roofline", LEGEND, [figure, table])
    return Page("roofline", roofline.title, f"Simulated: {words}.", (), subjects, [section])
