"""Page section on the strategies that ``auto`` selected for each layer."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES
from megatron_fssdp.reporting.colours import distinct_colours
from megatron_fssdp.reporting.html.iteration_bins import IterationBins
from megatron_fssdp.reporting.html.section import Figure, Section, Table, iteration_axis, packed, titled
from megatron_fssdp.reporting.page.reported_run import ReportedRun

MOST_POINTS = 600


def selection_section(runs: Sequence[ReportedRun]) -> Section | None:
    """Make the section with the selected strategies by layer and iteration.

    Args:
        runs: Runs of the page.

    Returns:
        The section, or None if no run used ``auto``.
    """
    selecting = [run for run in runs if _could_choose(run)]
    figures = [_selected(run, i) for i, run in enumerate(selecting)]
    if not figures:
        return None
    rows = [row for run in selecting for row in _gains(run)]
    header = ("change before", "layers", "predicted gain", "seen gain")
    table = Table(header, tuple(rows)) if rows else None
    notes = (
        "Predicted: modelled milliseconds of an iteration that the change saves. Seen: by how much the "
        "median iteration became shorter until auto reconsidered the strategies. The loads can have changed.",
    )
    lead = (
        "The strategy of every layer under auto. At intervals, auto reconsiders which strategy takes the "
        "fewest seconds by its model."
    )
    return Section(
        "selections",
        "Strategies that auto selected",
        lead,
        tuple(figures),
        table,
        notes=notes if rows else (),
    )


def _gains(run: ReportedRun) -> Iterator[tuple[str, ...]]:
    """The changes of strategies in a run: when, which layers, and the predicted and the seen gain."""
    selections = [(record.iteration, one) for record in run.records.metrics for one in record.selections]
    for number, (iteration, change) in enumerate(selections):
        if not change.changed:
            continue
        later = [one.seen for _, one in selections[number + 1 :] if one.stage == change.stage]
        seen = later[0] if later else None
        yield (
            f"{run.name}, iteration {iteration:,}",
            ", ".join(map(str, change.changed)),
            _of_iteration(change.predicted_s, change.iteration_s),
            "not known"
            if seen is None
            else _of_iteration(seen.seen_s, seen.before_s) + ("; taken back" if seen.is_slower else ""),
        )


def _of_iteration(seconds: float, iteration_s: float | None) -> str:
    share = f" ({seconds / iteration_s:.1%})" if iteration_s else ""
    return f"{1e3 * seconds:.3g} ms{share}"


def _could_choose(run: ReportedRun) -> bool:
    return any(layer.strategy is not None for record in run.records.metrics for layer in record.layers)


def _selected(run: ReportedRun, number: int) -> Figure:
    selected_IL = [[layer.strategy or "–" for layer in record.layers] for record in run.records.metrics]
    known = {name for row in selected_IL for name in row}
    # The same order as in all plots, then strategies that this version does not know.
    names = [name for name in STRATEGIES if name in known]
    names += sorted(known - set(names))
    colours = distinct_colours(names)
    bins = IterationBins(run.records.iterations, MOST_POINTS)
    index_IL = np.array([[names.index(name) for name in row] for row in selected_IL])
    shown_BL = bins.first(index_IL)
    labels = [str(layer) for layer in run.records.layers]
    steps = [(i + edge) / len(names) for i in range(len(names)) for edge in (0, 1)]
    heat_map = {
        "type": "heatmap",
        "x": packed(bins.middles),
        "y": labels,
        "z": packed(shown_BL.T),
        "text": [[names[i] for i in row] for row in shown_BL.T.tolist()],
        "zmin": -0.5,
        "zmax": len(names) - 0.5,
        "colorscale": [[step, colours[i // 2]] for i, step in enumerate(steps)],
        "showscale": False,
        "ygap": 2,
        "hovertemplate": "iteration %{x:.0f}, layer %{y}: %{text}<extra></extra>",
    }
    legend: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "markers",
            "x": [None],
            "y": [None],
            "name": name,
            "showlegend": True,
            "marker": {"symbol": "square", "size": 11, "color": colour},
        }
        for name, colour in zip(names, colours, strict=True)
    ]
    layout = {
        "title": {"text": f"{run.name}: strategy of every layer"},
        "xaxis": iteration_axis(run.num_iterations, showgrid=False),
        "yaxis": titled("layer", type="category", autorange="reversed", showgrid=False),
    }
    return Figure(f"selections-{number}", [heat_map, *legend], layout, 160 + min(420, 26 * len(labels)))
