"""Pictures of ``docs/papers-….md``: simulated values in the layout of the papers' figures and tables."""

from collections.abc import Callable, Mapping
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.papers import fastermoe, hecate, parm
from benchmarks.papers.claims import SKEWS, Answer
from benchmarks.papers.hecate_systems import BASELINES, MODELS

PAPER, SIMULATED, PADDED = "#444444", "#4477aa", "#ee6677"
OTHERS = ("#66ccee", "#228833", "#ccbb44", "#ee6677")
BESIDE = {"loc": "upper left", "bbox_to_anchor": (1, 1)}


def draw_all(folder: Path, answers: Mapping[str, list[Answer]]) -> None:
    """Draw one picture for each paper, as ``papers_….svg``."""
    folder.mkdir(exist_ok=True)
    style = {"svg.fonttype": "none", "svg.hashsalt": "papers", "font.family": "sans-serif", "font.size": 8}
    with matplotlib.rc_context(style):
        for paper, found in answers.items():
            DRAWN[paper](found).savefig(folder / f"papers_{paper}.svg", metadata={"Date": None})


def _pairs(axes: Axes, labels: list[str], cells: list[Answer]) -> None:
    """Draw the paper's and the simulated bar beside each other for every cell of a table."""
    places = np.arange(len(cells))
    axes.bar(places - 0.2, [one.claim.low for one in cells], 0.4, color=PAPER, label="paper")
    axes.bar(places + 0.2, [one.values[0] for one in cells], 0.4, color=SIMULATED, label="simulated")
    axes.set_xticks(places, labels, rotation=45, ha="right")
    axes.set_ylabel("speed-up")


def _groups(axes: Axes, labels: list[str], series: dict[str, list[float]]) -> None:
    """Draw a group of bars for every label, one for each series."""
    width = 0.8 / len(series)
    for index, (name, values) in enumerate(series.items()):
        places = [place + (index - (len(series) - 1) / 2) * width for place in range(len(labels))]
        axes.bar(places, values, width, label=name, color=OTHERS[index % len(OTHERS)])
    axes.set_xticks(range(len(labels)), labels, rotation=20, ha="right")
    axes.set_ylabel("speed-up")


def _marked(axes: Axes, first: float, last: float, value: float, words: str, *, below: bool = False) -> None:
    """Draw a number of the paper as a line over some groups, with its words above or below the line."""
    axes.plot([first - 0.45, last + 0.45], [value, value], color=PAPER, linestyle="--", linewidth=1)
    place = {"xytext": (0, -2 if below else 2), "va": "top" if below else "bottom"}
    at = (last + 0.45, value)
    axes.annotate(words, at, textcoords="offset points", ha="right", color=PAPER, **place)
    axes.margins(y=0.12)


def _parm(answers: list[Answer]) -> Figure:
    figure = Figure((10, 9), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=(3, 1))
    tables = upper.subplots(3, 1, sharex=True)
    for axes, schedule in zip(tables, ("s1", "s2", "parm"), strict=True):
        cells = [one for one in answers if one.claim.settings.get("schedule") == schedule]
        cells = [one for one in cells if one.claim.quantity == "cell"]
        settings = [one.claim.settings for one in cells]
        _pairs(axes, [f"{of['column']}\n{of['n_mp']}, {of['n_esp']}" for of in settings], cells)
        axes.set_ylabel(f"{schedule.capitalize()}: speed-up")
        for label in axes.get_xticklabels():
            label.set(rotation=0, horizontalalignment="center")
    axes.set_xlabel("testbed and number of GPUs; N_MP, N_ESP")
    tables[0].legend(loc="upper left")
    upper.suptitle("Table IV: speed-up over DeepSpeed-MoE")
    of_figure_7 = lower.subplots()
    of_figure_7.hist(parm.of_figure_7(), bins=20, range=(3, 7), color=SIMULATED, label="simulated")
    of_figure_7.axvline(4.91, color=PAPER, linestyle="--", label="paper, mean")
    of_figure_7.set_title("Fig. 7: layers of T-B 32, (4, 4)")
    of_figure_7.set(xlabel="Parm over DeepSpeed-MoE", ylabel="layers")
    of_figure_7.legend(loc="upper left")
    return figure


def _fastermoe(answers: list[Answer]) -> Figure:
    sigma, models = SKEWS["fastermoe"], list(fastermoe.MODELS)
    johnny, trevor = len(fastermoe.ON_JOHNNY) - 1, len(models) - 1
    figure = Figure((10, 6.5), layout="constrained")
    upper, lower = figure.subplots(2, 1)
    stages = (1, 2, 3)
    _groups(
        upper,
        models,
        {f"over ZeRO stage {it}": fastermoe.of_models(sigma, "both", models, over=it) for it in stages},
    )
    _marked(upper, 0, johnny, 6.63, "paper, stage 3, johnny, at most 6.63")
    _marked(upper, 0, johnny, 3.94, "paper, stage 2, at most 3.94")
    _marked(upper, johnny + 1, trevor, 17.87, "paper, stage 3, trevor, at most 17.87")
    upper.set_title("Fig. 10: speed-up of FasterMoE (paper: only its largest values are in the text)")
    parts = {"shadowing": "shadowing", "smart schedule": "schedule", "both": "both"}
    _groups(lower, models, {name: fastermoe.of_models(sigma, part, models) for name, part in parts.items()})
    _marked(lower, 0, johnny, 1.95, "paper, shadowing, 1.95", below=True)
    _marked(lower, 0, johnny, 2.20, "paper, both, 2.20")
    _marked(lower, johnny + 1, trevor, 4.74, "paper, shadowing, 4.74")
    _marked(lower, johnny + 1, trevor, 5.72, "paper, both, 5.72")
    lower.set_title("Fig. 13: speed-up of the MoE layers over FastMoE (paper: largest values)")
    for axes in (upper, lower):
        axes.legend(**BESIDE)
    return figure


def _pro_prophet(answers: list[Answer]) -> Figure:
    figure = Figure((10, 6.5), layout="constrained")
    for axes, over in zip(figure.subplots(2, 1, sharex=True), ("FasterMoE", "DeepSpeed-MoE"), strict=True):
        cells = [
            one
            for one in answers
            if one.claim.quantity == "cell"
            and (one.claim.settings["system"], one.claim.settings["over"]) == ("Pro-Prophet", over)
        ]
        settings = [one.claim.settings for one in cells]
        _pairs(axes, [f"{of['table']}, K = {of['k']}, {of['model'][4:]}" for of in settings], cells)
        if cells[0].padded:
            padded = [one.padded[0] for one in cells]
            axes.plot(range(len(cells)), padded, "_", color=PADDED, markersize=16, label="simulated, padded")
        axes.set_title(f"Tables IV and V: speed-up of Pro-Prophet over {over}")
        axes.legend(**BESIDE)
    return figure


def _hecate(answers: list[Answer]) -> Figure:
    figure = Figure((10, 7), layout="constrained")
    panels = [one.claim for one in answers if one.counts and one.claim.quantity == "of_models"]
    for axes, claim in zip(figure.subplots(len(panels), 1), panels, strict=True):
        systems = (*BASELINES, "Hecate")
        gains = {name: hecate.of_models(SKEWS["hecate"], **claim.settings, system=name) for name in systems}
        _groups(axes, list(MODELS), gains)
        axes.axhspan(claim.low, claim.high, color=PAPER, alpha=0.15, label="paper, Hecate")
        axes.axhline(1, color=PAPER, linewidth=0.5)
        axes.set_title(f"{claim.where}: {claim.what}")
        axes.legend(**BESIDE)
    return figure


DRAWN: dict[str, Callable[[list[Answer]], Figure]] = {
    "parm": _parm,
    "fastermoe": _fastermoe,
    "pro-prophet": _pro_prophet,
    "hecate": _hecate,
}
