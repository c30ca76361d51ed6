"""The DDL-Roofline of a run as a table, as JSON and as a page (FasterMoE, §3.3, Fig. 5)."""

import json
from dataclasses import asdict, dataclass

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

    @property
    def table(self) -> Table:
        """One row for each strategy."""
        peak, rows = self.peak_flops_per_s, []
        for name, point in self.points.items():
            reached = point.mean_flops_per_s
            bounds = (peak, semi_ideal_flops_per_s(point.ratio, peak), ideal_flops_per_s(point.ratio, peak))
            shares = [f"{100 * reached / bound:.0f}" for bound in bounds]
            rows.append((name, f"{point.ratio:.2f}", format_flops(reached), *shares))
        header = ("strategy", "R_CC", "per device", "% of peak", "% of semi-ideal", "% of ideal")
        return Table(header, tuple(rows))

    @property
    def json(self) -> str:
        """The peak throughput and all points as JSON."""
        strategies = {
            name: {"ratio": point.ratio, "mean_flops_per_s": point.mean_flops_per_s, **asdict(point)}
            for name, point in self.points.items()
        }
        data = {"title": self.title, "peak_flops_per_s": self.peak_flops_per_s, "strategies": strategies}
        return json.dumps(data, indent=2) + "\n"

    @property
    def page(self) -> Page:
        """The page with the curves and the points."""
        size, unit = unit_of(self.peak_flops_per_s, FLOPS)
        ratios = [point.ratio for point in self.points.values()]
        span = np.geomspace(min(0.1, min(ratios) / 2), max(10.0, max(ratios) * 2), 200)
        x_title = "compute seconds / communication seconds, R_CC (Eq. 3)"
        figure = new_figure("", x_title, f"mean {unit} per device (Eq. 4)", 460)
        figure.update_xaxes(type="log", dtick=1)
        figure.update_yaxes(type="log")
        curves = (("ideal (Eq. 5)", ideal_flops_per_s), ("semi-ideal (Eq. 6)", semi_ideal_flops_per_s))
        for (name, curve), dash in zip(curves, DASHES, strict=False):
            line, y = {"color": GREY, "dash": dash, "width": 2}, curve(span, self.peak_flops_per_s / size)
            figure.add_scatter(x=span, y=y, name=name, mode="lines", line=line, hoverinfo="skip")
        colours = distinct_colours(list(self.points))
        for i, ((name, point), colour) in enumerate(zip(self.points.items(), colours, strict=True)):
            figure.add_scatter(
                x=[point.ratio],
                y=[point.mean_flops_per_s / size],
                name=name,
                mode="markers",
                marker={"color": colour, "size": 11, "symbol": i},
                hovertemplate=f"R_CC %{{x:.2f}}, %{{y:.3g}} {unit}<extra>{name}</extra>",
            )
        table = self.table
        words = "; ".join(
            f"{name} {flops}, {share} % of the peak" for name, _, flops, share, *_ in table.rows
        )
        subjects = [Subject(name, colour) for name, colour in zip(self.points, colours, strict=True)]
        section = Section("Roofline", LEGEND, [figure, table])
        return Page("roofline", self.title, f"Simulated: {words}.", subjects, [section])
