"""Page sections on the course of a simulation: time, device loads and replicas of every iteration.

Shape letters: I iterations, L MoE layers, D devices.
"""

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from megatron_fssdp.reporting.html.curves import curve, even_load_line
from megatron_fssdp.reporting.html.iteration_bins import IterationBins
from megatron_fssdp.reporting.html.section import (
    GREY,
    Figure,
    Section,
    every_tick,
    iteration_axis,
    packed,
    titled,
)
from megatron_fssdp.reporting.page.what_if_section import CEILING
from megatron_fssdp.reporting.ranked_loads import ranked_load_D
from megatron_fssdp.reporting.simulation_report import SimulationReport
from megatron_fssdp.simulation.moe_job import MoeJob

MOST_POINTS = 600
_DASHES = ("solid", "dash", "dot", "dashdot")
"""Styles of curves, in turn, so that curves which coincide stay visible."""


def time_section(report: SimulationReport, colour_of: Mapping[str, str]) -> Section:
    """Make the section with the seconds of every iteration.

    Args:
        report: Results of the simulation.
        colour_of: Colour of each strategy.
    """
    curves = _curves(
        report, colour_of, {row.label: row.outcome.iteration_s for row in report.ranked}, "%{y:.4s}s"
    )
    ends = {"xref": "paper", "x0": 0, "x1": 1, "y0": report.ceiling_s, "y1": report.ceiling_s}
    line = {"color": GREY, "dash": "dash", "width": 1.5}
    layout = _layout(report, titled("simulated time", rangemode="tozero", tickformat="~s", ticksuffix="s"))
    layout["shapes"] += [{"type": "line", **ends, "line": line, "showlegend": True, "name": CEILING}]
    lead = "Simulated seconds of each iteration." + _warm_up_words(report)
    return Section("time", "Time of each iteration", lead, (Figure("time", curves, layout, 340),))


def device_load_section(report: SimulationReport, colour_of: Mapping[str, str]) -> Section:
    """Make the section with the busiest device's load by iteration, and the sorted loads of all devices.

    Args:
        report: Results of the simulation.
        colour_of: Colour of each strategy.
    """
    loads = {row.label: row.outcome.load_max_over_mean_IL.mean(axis=1) for row in report.ranked}
    layout = _layout(report, titled("max / mean device load")) | {
        "title": {"text": "Busiest device, max / mean"}
    }
    layout["shapes"] += [even_load_line()]
    bars: list[dict[str, Any]] = [
        {
            "type": "bar",
            "name": row.label,
            "x": list(range(1, row.outcome.tokens_ILD.shape[2] + 1)),
            "y": packed(ranked_load_D(row.outcome.tokens_ILD[report.warm_up :])),
            "marker": {"color": colour_of[row.label]},
            "hovertemplate": "%{y:.2f} × mean<extra>" + row.label + "</extra>",
        }
        for row in report.ranked
    ]
    sorted_layout = {
        "title": {"text": "All devices, sorted by load in each iteration after the warm-up"},
        "barmode": "group",
        "bargap": 0.25,
        "xaxis": titled("device, from the busiest to the least busy", **every_tick(len(bars[0]["x"]), 16)),
        "yaxis": titled("mean of load / mean load", rangemode="tozero"),
        "shapes": [even_load_line()],
    }
    lead = (
        "Tokens of the busiest device, divided by the mean of all devices, averaged over layers. 1 is even. "
        "A layer takes as long as its busiest device."
    )
    figures = (
        Figure("device-load", _curves(report, colour_of, loads, "%{y:.2f}"), layout, 340),
        Figure("device-load-ranked", bars, sorted_layout, 300),
    )
    return Section("device-load", "Device load", lead, figures)


def replica_section(report: SimulationReport, job: MoeJob, colour_of: Mapping[str, str]) -> Section:
    """Make the section with the number of replicas and the bytes of their weights, by iteration.

    Args:
        report: Results of the simulation.
        job: Training job, whose experts have this size.
        colour_of: Colour of each strategy.
    """
    title = "Replicas and bytes over time"
    replicas = {row.label: row.outcome.of_layers("replicas").sum(axis=1) for row in report.ranked}
    moved = {
        row.label: job.expert_bytes * row.outcome.of_layers("gathered").sum(axis=1) for row in report.ranked
    }
    if not any(values.any() for values in (*replicas.values(), *moved.values())):
        missing = "No simulated strategy has replicas."
        return Section("replicas", title, "", missing=missing)
    bytes_axis = titled("bytes of an iteration", rangemode="tozero", tickformat="~s", ticksuffix="B")
    figures = (
        Figure(
            "replicas",
            _curves(report, colour_of, replicas, "%{y:.4g} replicas"),
            _layout(report, titled("replicas, all layers", rangemode="tozero"))
            | {"title": {"text": "Replicas at the end of each iteration"}},
            300,
        ),
        Figure(
            "moved-bytes",
            _curves(report, colour_of, moved, "%{y:.4s}B"),
            _layout(report, bytes_axis) | {"title": {"text": "Weights that travel to replicas (spAG)"}},
            300,
        ),
    )
    lead = (
        "A replica is a copy of an expert on another device than its owner's. It computes a part of the "
        "expert's tokens, and its weights travel from the owner before."
    )
    return Section("replicas", title, lead, figures)


def _curves(
    report: SimulationReport,
    colour_of: Mapping[str, str],
    values: Mapping[str, NDArray[Any]],
    form: str,
) -> list[dict[str, Any]]:
    """Return one curve for each strategy. Later ones are thinner and dashed."""
    bins = IterationBins(report.iterations, MOST_POINTS)
    return [
        curve(
            name,
            packed(bins.middles),
            bins.mean(values_I),
            colour_of[name],
            {"width": max(1.2, 2.8 - 0.4 * i), "dash": _DASHES[i % len(_DASHES)]},
            form,
        )
        for i, (name, values_I) in enumerate(values.items())
    ]


def _layout(report: SimulationReport, y_axis: dict[str, Any]) -> dict[str, Any]:
    """Return the layout of a figure over iterations, in which the warm-up is grey."""
    shapes: list[dict[str, Any]] = []
    if report.warm_up:
        first, end = int(report.iterations[0]) - 0.5, int(report.iterations[report.warm_up - 1]) + 0.5
        ends = {"xref": "x", "x0": first, "x1": end, "yref": "paper", "y0": 0, "y1": 1}
        shapes.append({"type": "rect", **ends, "fillcolor": GREY, "opacity": 0.15, "line": {"width": 0}})
    return {
        "xaxis": iteration_axis(len(report.iterations)),
        "yaxis": y_axis,
        "hovermode": "x",
        "shapes": shapes,
    }


def _warm_up_words(report: SimulationReport) -> str:
    if not report.warm_up:
        return ""
    return (
        f" The grey area is the longest warm-up ({report.warm_up} "
        f"iteration{'s' if report.warm_up > 1 else ''}), which the ranking leaves out: until then, a "
        "strategy measures, has no past loads, or waits for its first turn."
    )
