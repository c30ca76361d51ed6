"""Shows the DDL-Roofline of a run as a table and a plot (FasterMoE, §3.3, Fig. 5)."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from megatron_fssdp.reporting.colours import distinct_colours
from megatron_fssdp.reporting.figures import DPI, new_figure
from megatron_fssdp.simulation.roofline import RooflinePoint, ideal_flops_per_s, semi_ideal_flops_per_s

_LEGEND = (
    "R_CC: compute seconds over communication seconds. ideal: the throughput if communication ran entirely "
    "beside compute. semi-ideal: with even loads, and nothing beside compute. peak: of a device on experts' "
    "matrix products."
)
_MARKERS = "osD^vP*X"
_UNITS = ((1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1e6, "MFLOP/s"), (1.0, "FLOP/s"))


@dataclass(frozen=True)
class Roofline:
    """Data of a DDL-Roofline: the peak throughput, which determines both curves, and the points.

    Attributes:
        title: Title of the table and the plot.
        peak_flops_per_s: Throughput of a device on expert GEMMs (``P_w``), in floating-point operations per
            second.
        points: Point of each strategy, by the strategy's name.
    """

    title: str
    peak_flops_per_s: float
    points: dict[str, RooflinePoint]


def roofline_table(roofline: Roofline) -> Table:
    """Return a table with one row for each strategy."""
    scale, unit = _unit(roofline.peak_flops_per_s)
    table = Table(
        title=roofline.title,
        title_justify="left",
        caption=_LEGEND,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("strategy")
    for heading in ("R_CC", f"{unit} per device", "% of peak", "% of semi-ideal", "% of ideal"):
        table.add_column(heading, justify="right")
    peak = roofline.peak_flops_per_s
    for name, point in roofline.points.items():
        reached = point.mean_flops_per_s
        table.add_row(
            name,
            f"{point.ratio:.2f}",
            f"{reached / scale:.3g}",
            *(
                f"{100 * reached / bound:.0f}"
                for bound in (
                    peak,
                    semi_ideal_flops_per_s(point.ratio, peak),
                    ideal_flops_per_s(point.ratio, peak),
                )
            ),
        )
    return table


def write_roofline(roofline: Roofline, path: Path) -> None:
    """Write the peak throughput and all points as JSON."""
    data = {
        "title": roofline.title,
        "peak_flops_per_s": roofline.peak_flops_per_s,
        "strategies": {
            name: {
                "ratio": point.ratio,
                "mean_flops_per_s": point.mean_flops_per_s,
                "compute_s": point.compute_s,
                "communication_s": point.communication_s,
                "end_to_end_s": point.end_to_end_s,
            }
            for name, point in roofline.points.items()
        },
    }
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def draw_roofline(roofline: Roofline, path: Path) -> None:
    """Draw the curves and the points.

    Args:
        roofline: Data to draw.
        path: PNG or SVG file to write.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    figure = new_figure((7.5, 4.8))
    _draw(figure.add_subplot(), roofline)
    figure.savefig(path, dpi=DPI)


def _draw(axes: Any, roofline: Roofline) -> None:
    scale, unit = _unit(roofline.peak_flops_per_s)
    ratios = [point.ratio for point in roofline.points.values()]
    span = np.geomspace(min(0.1, min(ratios) / 2), max(10.0, max(ratios) * 2), 200)
    peak = roofline.peak_flops_per_s / scale
    axes.plot(span, ideal_flops_per_s(span, peak), color="black", label="ideal (Eq. 5)")
    axes.plot(
        span, semi_ideal_flops_per_s(span, peak), color="black", linestyle="--", label="semi-ideal (Eq. 6)"
    )
    colours = distinct_colours(list(roofline.points))
    for i, (name, point) in enumerate(roofline.points.items()):
        axes.plot(
            [point.ratio],
            [point.mean_flops_per_s / scale],
            linestyle="",
            marker=_MARKERS[i % len(_MARKERS)],
            markersize=8,
            color=colours[i],
            label=name,
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("compute seconds / communication seconds, R_CC (Eq. 3)")
    axes.set_ylabel(f"mean {unit} per device (Eq. 4)")
    axes.set_title(roofline.title, loc="left", fontsize=10)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(alpha=0.25, which="both", linewidth=0.5)
    axes.legend(frameon=False)


def _unit(flops_per_s: float) -> tuple[float, str]:
    return next((scale, unit) for scale, unit in _UNITS if flops_per_s >= scale or scale == 1.0)
