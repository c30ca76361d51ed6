"""Draws the device loads of several runs into one picture."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.written_files import refuse_non_folder, refuse_special_file, written_file
from megatron_fssdp.reporting.colours import distinct_colours
from megatron_fssdp.reporting.figures import DPI, new_figure
from megatron_fssdp.reporting.records.recorded_run import RecordedRun, distinct_names


def draw_device_loads(runs: Sequence[RecordedRun], png: Path) -> None:
    """Draw the max/mean device load of runs: as curves over iterations, and below as one strip for each run.

    Args:
        runs: Records of the runs.
        png: File to write.

    Raises:
        ConfigurationError: A run has no loads, matplotlib is not installed, or the file cannot be written.
    """
    for run in runs:
        if not run.layers:
            raise ConfigurationError(
                f"--png: {run.path} has no recorded loads of MoE layers; run it again with a strategy such "
                "as ep"
            )

    figure = new_figure((9, 4.0 + 1.3 * len(runs)))
    grid = figure.add_gridspec(1 + len(runs), 1, height_ratios=(3.2, *(1 for _ in runs)))
    curves = figure.add_subplot(grid[0])
    names = distinct_names(*runs)
    colours = distinct_colours([run.strategy for run in runs])
    for run, name, colour in zip(runs, names, colours, strict=True):
        _draw_curve(curves, run, name, colour)
    _finish_curves(curves)

    highest = max(run.load_IL.max() for run in runs)
    for row, (run, name) in enumerate(zip(runs, names, strict=True), start=1):
        strip = figure.add_subplot(grid[row], sharex=curves)
        mesh = _draw_strip(strip, run, name, highest)
        strip.tick_params(labelbottom=row == len(runs))
    strip.set_xlabel("iteration")
    figure.colorbar(mesh, ax=figure.axes[1:], label="max / mean", pad=0.01, aspect=14)
    with written_file(png, "--png") as partial:
        figure.savefig(partial, dpi=DPI)


def check_picture(png: Path) -> None:
    """Refuse a file that cannot be a picture, before the work for it begins.

    Raises:
        ConfigurationError: The file has no suffix of a picture, or cannot be a regular file.
    """
    refuse_special_file(png, "--png")
    refuse_non_folder(png.parent, "--png")
    with suppress(ImportError):  # a page does not need matplotlib; drawing says that it is missing
        from matplotlib.backend_bases import FigureCanvasBase

        kinds = FigureCanvasBase.get_supported_filetypes()
        if png.suffix[1:].lower() not in kinds:
            raise ConfigurationError(
                f"--png {png}: got the suffix '{png.suffix}', wanted one of {', '.join(sorted(kinds))}"
            )


def _draw_curve(axes: Any, run: RecordedRun, name: str, colour: str) -> None:
    mean, highest = run.load_IL.mean(axis=1), run.load_IL.max(axis=1)
    axes.plot(run.iterations, mean, color=colour, linewidth=2, label=f"{name} ({mean.mean():.2f} on average)")
    axes.plot(run.iterations, highest, color=colour, linewidth=0.9, linestyle=":")
    axes.fill_between(run.iterations, mean, highest, color=colour, alpha=0.13, linewidth=0)


def _finish_curves(axes: Any) -> None:
    axes.axhline(1.0, color="0.35", linewidth=0.9, linestyle="--")
    axes.annotate(
        "even load",
        xy=(0.0, 1.0),
        xycoords=("axes fraction", "data"),
        xytext=(5, -3),
        textcoords="offset points",
        ha="left",
        va="top",
        color="0.35",
        fontsize=9,
    )
    axes.plot([], [], color="0.35", linewidth=2, label="mean of layers")
    axes.plot([], [], color="0.35", linewidth=0.9, linestyle=":", label="worst layer")
    span = axes.get_ylim()[1] - 1.0
    axes.set_ylim(1.0 - 0.1 * span, 1.0 + 1.15 * span)  # space for the annotation below and the legend above
    axes.set_ylabel("device load, max / mean")
    axes.set_title("Load of the busiest device in each iteration", loc="left")
    axes.legend(frameon=False, loc="upper left", ncols=4, fontsize=9, columnspacing=1.4)
    axes.tick_params(labelbottom=False)
    axes.margins(x=0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _draw_strip(axes: Any, run: RecordedRun, name: str, highest: float) -> Any:
    columns = _edges(run.iterations)
    rows = np.arange(len(run.layers) + 1) - 0.5
    mesh = axes.pcolormesh(
        columns, rows, run.load_IL.T, vmin=1.0, vmax=max(highest, 1.01), cmap="magma_r", rasterized=True
    )
    step = -(-len(run.layers) // 8)
    axes.set_yticks(range(0, len(run.layers), step), [str(layer) for layer in run.layers[::step]])
    axes.invert_yaxis()
    axes.set_ylabel("layer")
    axes.set_title(name, loc="left", fontsize=10)
    return mesh


def _edges(iterations: np.ndarray) -> np.ndarray:
    """Return the borders of the strips' columns, halfway between iterations: float64 ``[I + 1]``."""
    if len(iterations) == 1:
        return np.array([iterations[0] - 0.5, iterations[0] + 0.5])
    middles = (iterations[:-1] + iterations[1:]) / 2
    return np.concatenate([[iterations[0] - 0.5], middles, [iterations[-1] + 0.5]])
