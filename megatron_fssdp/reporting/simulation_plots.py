"""Plots of a simulation: seconds of every iteration, their parts, and device loads."""

from pathlib import Path
from typing import Any

import numpy as np

from megatron_fssdp.reporting.colours import TIME_PARTS, distinct_colours
from megatron_fssdp.reporting.figures import DPI, new_figure
from megatron_fssdp.reporting.ranked_loads import ranked_load_D
from megatron_fssdp.reporting.simulation_report import RankedStrategy, SimulationReport
from megatron_fssdp.simulation.lanes import PARTS

DASHES = ("-", "--", "-.", ":")
"""Styles of curves, in turn. Curves that coincide stay visible, as later ones are thinner and dashed."""


def draw_simulation(report: SimulationReport, folder: Path) -> list[Path]:
    """Draw all plots of a simulation, each as PNG and SVG.

    Args:
        report: Results of the simulation.
        folder: Folder to write the files to.

    Returns:
        Paths of the files.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    files = []
    for name, draw in (("iterations", _iterations), ("breakdown", _breakdown), ("device_load", _loads)):
        figure = new_figure((9, 5.2), " or give --no-plots")
        axes = figure.add_subplot()
        draw(axes, report)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        for suffix in ("png", "svg"):
            files.append(folder / f"{name}.{suffix}")
            figure.savefig(files[-1], dpi=DPI)
    return files


def _coloured(report: SimulationReport) -> list[tuple[RankedStrategy, str]]:
    colours = distinct_colours([row.label for row in report.rows])
    return list(zip(report.rows, colours, strict=True))


def _iterations(axes: Any, report: SimulationReport) -> None:
    factor, unit = _unit(report)
    for i, (row, colour) in enumerate(_coloured(report)):
        axes.plot(
            report.iterations,
            row.outcome.iteration_s * factor,
            color=colour,
            linewidth=max(1.2, 2.8 - 0.4 * i),
            linestyle=DASHES[i % len(DASHES)],
            label=f"{row.label} ({report.steady_s(row.outcome) * factor:.3g} {unit})",
            marker="o" if len(report.iterations) == 1 else None,
        )
    axes.axhline(report.ceiling_s * factor, color="0.35", linewidth=0.9, label="balanced routing")
    axes.set_ylim(bottom=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("iteration")
    axes.set_ylabel(f"simulated time, {unit}")
    axes.set_title("Simulated time of each iteration (in brackets: mean after the warm-up)", loc="left")
    _legend_below(axes)
    axes.margins(x=0.01)


def _breakdown(axes: Any, report: SimulationReport) -> None:
    factor, unit = _unit(report)
    labels = [row.label for row in report.rows]
    left = np.zeros(len(labels))
    parts_s = [report.steady_parts_s(row.outcome) for row in report.rows]
    for part in PARTS:
        widths = factor * np.array([found[part] for found in parts_s])
        if widths.any():
            axes.barh(labels, widths, left=left, color=TIME_PARTS[part].colour, label=TIME_PARTS[part].name)
        left += widths
    axes.axvline(
        report.ceiling_s * factor, color="0.35", linewidth=0.9, linestyle="--", label="balanced routing"
    )
    axes.invert_yaxis()
    axes.set_xlabel(f"simulated time of an iteration, {unit}, mean after the warm-up")
    axes.set_title("Parts of an iteration's time", loc="left")
    _legend_below(axes)


def _legend_below(axes: Any) -> None:
    """Put the legend below the axis, where no curve or bar goes through its labels."""
    axes.legend(frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3)


def _unit(report: SimulationReport) -> tuple[float, str]:
    """Return the unit in which the longest iteration is at least 1, after the factor from seconds to it."""
    longest_s = max(float(row.outcome.iteration_s.max()) for row in report.rows)
    units = ((1.0, "s"), (1e3, "ms"), (1e6, "µs"))
    return next((one for one in units if longest_s * one[0] >= 1), units[-1])


def _loads(axes: Any, report: SimulationReport) -> None:
    for i, (row, colour) in enumerate(_coloured(report)):
        ranked_D = ranked_load_D(row.outcome.tokens_ILD)
        axes.plot(
            np.arange(1, len(ranked_D) + 1),
            ranked_D,
            color=colour,
            linewidth=max(1.2, 2.8 - 0.4 * i),
            linestyle=DASHES[i % len(DASHES)],
            marker="o",
            markersize=3,
            label=row.label,
        )
    axes.axhline(1.0, color="0.35", linewidth=0.9, label="even load")
    axes.set_ylim(bottom=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("devices of a layer, from the busiest to the least busy")
    axes.set_ylabel("device load / mean")
    axes.set_title("Device loads, averaged over iterations and layers", loc="left")
    _legend_below(axes)
