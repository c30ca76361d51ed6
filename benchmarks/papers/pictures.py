"""Pictures of ``docs/papers-….md``: simulated values in the layout of the papers' figures and tables."""

from collections.abc import Callable, Iterable
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.papers.fastermoe import fastermoe_statements as fastermoe
from benchmarks.papers.fastermoe import fastermoe_systems as systems
from benchmarks.papers.hecate import hecate_runs as hecate
from benchmarks.papers.parm import parm_tables as parm
from benchmarks.papers.parm.parm_layers import COLUMNS, PAIRS, cell_of
from benchmarks.papers.parm.parm_testbeds import Testbed
from benchmarks.papers.pro_prophet import pro_prophet_cells as pro_prophet
from benchmarks.papers.setting import Setting
from benchmarks.papers.skews import SKEWS
from megatron_fssdp.planning.cost.tensor_schedules import Group, Kind
from megatron_fssdp.simulation.roofline import ideal_flops_per_s, semi_ideal_flops_per_s

PAPER, SIMULATED = "#444444", "#4477aa"
OF_FIGURE_6: tuple[tuple[Kind, Group], ...] = (
    ("all_gather", "mp"),
    ("all_reduce", "esp"),
    ("all_to_all", "ep"),
    ("all_to_all", "ep_esp"),
)
"""Collectives of Fig. 6. Only the costs of the first are published."""

OTHERS = ("#66ccee", "#228833", "#ccbb44", "#ee6677")


def draw_all(folder: Path, keys: Iterable[str]) -> list[Path]:
    """Draw one picture for each paper.

    Args:
        folder: Folder for the files ``papers_….svg``.
        keys: Keys of the papers.
    """
    settings = {"svg.fonttype": "none", "svg.hashsalt": "papers", "font.family": "sans-serif", "font.size": 8}
    files = []
    with matplotlib.rc_context(settings):
        for key in keys:
            files.append(folder / f"papers_{key}.svg")
            DRAWN[key]().savefig(files[-1], metadata={"Date": None})
    return files


def _pairs(axes: Axes, labels: list[str], paper: list[float], simulated: list[float]) -> None:
    """Draw two bars beside each other for every label."""
    places = range(len(labels))
    axes.bar([place - 0.2 for place in places], paper, 0.4, color=PAPER, label="paper")
    axes.bar([place + 0.2 for place in places], simulated, 0.4, color=SIMULATED, label="simulated")
    axes.set_xticks(list(places), labels, rotation=45, ha="right")


def _groups(axes: Axes, labels: list[str], series: dict[str, list[float]]) -> None:
    """Draw a group of bars for every label, one for each series."""
    width = 0.8 / len(series)
    for index, (name, values) in enumerate(series.items()):
        places = [place + (index - (len(series) - 1) / 2) * width for place in range(len(labels))]
        axes.bar(places, values, width, label=name, color=OTHERS[index % len(OTHERS)])
    axes.set_xticks(range(len(labels)), labels, rotation=20, ha="right")


def _marked(axes: Axes, first: float, last: float, value: float, words: str, *, below: bool = False) -> None:
    """Draw a number of the paper as a line over some groups, with its words above or below the line."""
    axes.plot([first - 0.45, last + 0.45], [value, value], color=PAPER, linestyle="--", linewidth=1)
    axes.annotate(
        words,
        (last + 0.45, value),
        xytext=(0, -2 if below else 2),
        textcoords="offset points",
        ha="right",
        va="top" if below else "bottom",
        color=PAPER,
    )
    axes.margins(y=0.12)


def _parm() -> Figure:
    figure = Figure((10, 9), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=(2, 1))
    tables = upper.subplots(3, 1, sharex=True)
    for axes, (name, rows) in zip(tables, parm.TABLE_IV.items(), strict=True):
        labels = [f"{column}\n{n_mp}, {n_esp}" for column in COLUMNS for n_mp, n_esp in PAIRS]
        paper = [rows[pair][index] for index in range(len(COLUMNS)) for pair in PAIRS]
        simulated = [parm.speedup(name, pair, column) for column in COLUMNS for pair in PAIRS]
        _pairs(axes, labels, paper, simulated)
        axes.set_ylabel(f"{parm.NAMES[name]}: speed-up")
        axes.tick_params("x", rotation=0)
        for label in axes.get_xticklabels():
            label.set_horizontalalignment("center")
    axes.set_xlabel("testbed and number of GPUs; N_MP, N_ESP")
    tables[0].legend(loc="upper left")
    upper.suptitle("Table IV: speed-up over DeepSpeed-MoE")
    *of_figure_6, of_figure_7 = lower.subplots(1, 3)
    for axes, column in zip(of_figure_6, ("T-A", "T-B 32"), strict=True):
        _collectives(axes, column)
    speedups = [layer.speedup("parm") for layer in cell_of("T-B 32", (4, 4))]
    of_figure_7.hist(speedups, bins=20, range=(3, 7), color=SIMULATED, label="simulated")
    of_figure_7.axvline(4.91, color=PAPER, linestyle="--", label="paper, mean")
    of_figure_7.set_title("Fig. 7: layers of T-B 32, (4, 4)")
    of_figure_7.set_xlabel("Parm over DeepSpeed-MoE")
    of_figure_7.set_ylabel("layers")
    of_figure_7.legend(loc="upper left")
    return figure


def _collectives(axes: Axes, column: str) -> None:
    """Draw the assumed seconds of collectives over their sizes (Fig. 6), N_MP = N_ESP = 4."""
    costs = Testbed(*COLUMNS[column]).costs(4, 4)
    millions = np.linspace(0.2, 16, 50)
    for (kind, group), color in zip(OF_FIGURE_6, (PAPER, *OTHERS), strict=False):
        seconds = [costs[kind, group].time_s(4e6 * number) for number in millions]
        axes.plot(millions, [1e3 * value for value in seconds], color=color, label=f"{kind}, {group}")
    axes.set_title(f"Fig. 6: collectives of {column}")
    axes.set_xlabel("million numbers")
    axes.set_ylabel("milliseconds")
    axes.legend(loc="upper left")


def _fastermoe() -> Figure:
    sigma, models = SKEWS["fastermoe"].sigma, list(systems.MODELS)
    last_johnny = len(systems.ON_JOHNNY) - 1
    latency = fastermoe.AS_STATED
    figure = Figure((10, 9), layout="constrained")
    upper, lower, lowest = figure.subplots(3, 1)
    zero = {
        f"over ZeRO stage {stage}": [
            systems.over_zero(model, sigma, stage, systems.both(latency)) for model in models
        ]
        for stage in (1, 2, 3)
    }
    _groups(upper, models, zero)
    _marked(upper, 0, last_johnny, 6.63, "paper, stage 3, johnny, at most 6.63")
    _marked(upper, 0, last_johnny, 3.94, "paper, stage 2, johnny, at most 3.94")
    _marked(upper, last_johnny + 1, len(models) - 1, 17.87, "paper, stage 3, trevor, at most 17.87")
    upper.set_title("Fig. 10: speed-up of FasterMoE (paper: only its largest values are in the text)")
    parts = {
        "shadowing": systems.shadowing(latency),
        "smart schedule": systems.SMART_SCHEDULE,
        "both": systems.both(latency),
    }
    _groups(
        lower,
        models,
        {name: [systems.speedup(model, sigma, system) for model in models] for name, system in parts.items()},
    )
    _marked(lower, 0, last_johnny, 1.95, "paper, shadowing, 1.95", below=True)
    _marked(lower, 0, last_johnny, 2.20, "paper, both, 2.20")
    _marked(lower, last_johnny + 1, len(models) - 1, 4.74, "paper, shadowing, 4.74")
    _marked(lower, last_johnny + 1, len(models) - 1, 5.72, "paper, both, 5.72")
    lower.set_title("Fig. 13: speed-up of the MoE layers over FastMoE (paper: largest values)")
    for axes in (upper, lower):
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
        axes.set_ylabel("speed-up")
    _roofline(lowest, systems.setting_of("MoE-GPT", sigma), {"FastMoE": systems.FASTMOE, **parts})
    return figure


def _roofline(axes: Axes, setting: Setting, simulated: dict[str, systems.System]) -> None:
    """Draw the DDL-Roofline with the points of parallelisms and systems."""
    ratio = np.geomspace(0.02, 10, 200)
    axes.plot(ratio, ideal_flops_per_s(ratio, 1.0), color=PAPER, linewidth=1, label="ideal (Eq. 5)")
    even = semi_ideal_flops_per_s(ratio, 1.0)
    axes.plot(ratio, even, color=PAPER, linewidth=1, linestyle="--", label="semi-ideal (Eq. 6)")
    places = {
        **systems.data_and_model_parallelism(setting),
        **{name: systems.place_of(system, setting) for name, system in simulated.items()},
    }
    for index, (name, place) in enumerate(places.items()):
        color = (*OTHERS, SIMULATED)[index % 5]
        axes.plot(place.ratio, place.share_of_peak, "osD^vPX"[index], color=color, markersize=7, label=name)
    axes.set_xscale("log")
    axes.set_xlabel("computation over communication, R_CC")
    axes.set_ylabel("share of the peak")
    axes.set_title("Fig. 5: the DDL-Roofline of MoE-GPT on johnny, simulated and calculated")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))


def _pro_prophet() -> Figure:
    sigma = SKEWS["pro-prophet"].sigma
    figure = Figure((10, 6.5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    cells = [
        (table, *cell, values)
        for table, (_, _, _, found) in pro_prophet.TABLES.items()
        for cell, values in found.items()
    ]
    labels = [f"{table.split(',')[0]}, K = {k}, {model[4:]}" for table, k, model, _ in cells]
    _pairs(
        upper,
        labels,
        [ours / theirs for *_, (theirs, ours) in cells],
        [pro_prophet.speedup(*cell, sigma, "Pro-Prophet", "FasterMoE") for *cell, _ in cells],
    )
    upper.set_title("Tables IV and V: speed-up of Pro-Prophet over FasterMoE")
    _pairs(
        lower,
        labels,
        [ours for *_, (_, ours) in cells],
        [pro_prophet.speedup(*cell, sigma, "Pro-Prophet") for *cell, _ in cells],
    )
    bounds = [pro_prophet.bound(*cell, sigma) for *cell, _ in cells]
    lower.plot(range(len(cells)), bounds, "_", color="#ee6677", markersize=16, label="perfectly even loads")
    lower.set_title("Tables IV and V: speed-up of Pro-Prophet over DeepSpeed-MoE, simulated as ep")
    for axes in (upper, lower):
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
        axes.set_ylabel("speed-up")
    return figure


def _hecate() -> Figure:
    sigma, models = SKEWS["hecate"].sigma, list(hecate.MODELS)
    figure = Figure((10, 7), layout="constrained")
    panels = (
        ("Fig. 9, cluster A, 16 GPUs", "hecate-a", 16, (1.40, 1.58)),
        ("Fig. 9, cluster A, 32 GPUs", "hecate-a", 32, (1.34, 1.78)),
        ("Fig. 10, cluster B, 32 GPUs", "hecate-b", 32, (1.26, 1.70)),
    )
    for axes, (title, cluster, devices, (low, high)) in zip(figure.subplots(3, 1), panels, strict=True):
        _groups(axes, models, hecate.speedups(cluster, devices, sigma))
        axes.axhspan(low, high, color=PAPER, alpha=0.15, label="paper, Hecate")
        axes.axhline(1, color=PAPER, linewidth=0.5)
        axes.set_title(f"{title}: speed-up over EP")
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
        axes.set_ylabel("speed-up")
    return figure


DRAWN: dict[str, Callable[[], Figure]] = {
    "parm": _parm,
    "fastermoe": _fastermoe,
    "pro-prophet": _pro_prophet,
    "hecate": _hecate,
}
