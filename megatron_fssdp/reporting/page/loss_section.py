"""Page section with the loss curves of all runs and their differences."""

from collections.abc import Sequence

import numpy as np

from megatron_fssdp.reporting.html.iteration_bins import IterationBins
from megatron_fssdp.reporting.html.section import Figure, Section, iteration_axis, packed, titled
from megatron_fssdp.reporting.page.part_marks import with_part_marks
from megatron_fssdp.reporting.page.reported_run import ReportedRun, most_iterations
from megatron_fssdp.reporting.records.recorded_run import loss_differences

MOST_POINTS = 2000

_SYMBOLS = {"validation": "circle-open", "test": "diamond-open"}


def loss_section(runs: Sequence[ReportedRun]) -> Section:
    """Make the section with the losses of all runs. With several runs, it also shows their differences.

    Args:
        runs: Runs of the page.
    """
    figures = [
        Figure(
            "loss",
            [*(_curve(run, i) for i, run in enumerate(runs)), *_evaluated(runs)],
            with_part_marks(_layout("loss", most_iterations(runs)), runs),
        )
    ]
    notes = []
    if len(runs) > 1:
        notes += [_agreement(runs[0], run) for run in runs[1:]]
        if traces := [trace for run in runs[1:] if (trace := _difference(runs[0], run)) is not None]:
            title = {"text": f"Relative difference from {runs[0].name}, where it is not 0"}
            axis = titled("|difference| / loss", type="log", exponentformat="power", dtick=1)
            axis["range"] = _decades(runs)
            figures.append(
                Figure(
                    "loss-difference",
                    traces,
                    _layout("", most_iterations(runs)) | {"title": title, "yaxis": axis},
                    260,
                )
            )
    lead = "Language-model loss of each iteration, as Megatron reports it."
    if any(run.records.evaluations for run in runs):
        lead += " Points: losses on data that is not trained."
    if len(runs) > 1:
        lead += (
            " Runs with the same seed and the same data should have the same curve, because placement "
            "changes only where experts are computed. Below: the difference of each run from the first."
        )
    width = max(IterationBins(run.records.iterations, MOST_POINTS).width for run in runs)
    if width > 1:
        notes.append(f"Each point is the mean of up to {width} iterations.")
    return Section("loss", "Loss", lead, tuple(figures), notes=tuple(notes))


def _decades(runs: Sequence[ReportedRun]) -> list[float]:
    """Return the powers of 10 that enclose all differences which are not 0, as the range of a log axis."""
    found = np.concatenate([loss_differences(runs[0].records, run.records)[1] for run in runs[1:]])
    shown = np.log10(found[np.isfinite(found) & (found > 0)])
    return [float(np.floor(shown.min() - 0.1)), float(np.ceil(shown.max() + 0.1))] if len(shown) else [-8, 0]


def _curve(run: ReportedRun, number: int) -> dict[str, object]:
    bins = IterationBins(run.records.iterations, MOST_POINTS)
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(bins.middles) < 3 else "lines",
        "name": run.name,
        "showlegend": True,
        "x": packed(bins.middles),
        "y": packed(bins.mean(run.records.losses)),
        # Later curves are dashed, so that the earlier ones below them stay visible.
        "line": {
            "color": run.colour,
            "width": 2.5 if number == 0 else 2,
            "dash": ("solid", "dash", "dot")[number % 3],
        },
        "hovertemplate": "iteration %{x:.0f}: %{y:.4f}<extra>" + run.name + "</extra>",
    }


def _evaluated(runs: Sequence[ReportedRun]) -> list[dict[str, object]]:
    """Points of the losses on validation and test data."""
    traces: list[dict[str, object]] = []
    for run in runs:
        for data in dict.fromkeys(one.data for one in run.records.evaluations):
            found = [one for one in run.records.evaluations if one.data == data]
            traces.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": f"{run.name}, {data}",
                    "showlegend": True,
                    "x": [one.iteration for one in found],
                    "y": [one.loss for one in found],
                    "marker": {"color": run.colour, "size": 9, "symbol": _SYMBOLS.get(data, "square-open")},
                    "hovertemplate": "after iteration %{x}: %{y:.4f}<extra>" + f"{run.name}, {data}</extra>",
                }
            )
    return traces


def _difference(first: ReportedRun, run: ReportedRun) -> dict[str, object] | None:
    iterations, difference = loss_differences(first.records, run.records)
    differs = difference > 0
    if not differs.any():
        return None
    bins = IterationBins(iterations[differs], MOST_POINTS)
    return {
        "type": "scatter",
        "mode": "markers",
        "name": run.name,
        "showlegend": True,
        "x": packed(bins.middles),
        "y": packed(bins.peak(difference[differs]), np.float64),
        "marker": {"color": run.colour, "size": 6},
        "hovertemplate": "iteration %{x:.0f}: %{y:.2e}<extra>" + run.name + "</extra>",
    }


def _agreement(first: ReportedRun, run: ReportedRun) -> str:
    iterations, difference = loss_differences(first.records, run.records)
    if not len(iterations):
        return f"{run.name} has no iteration in common with {first.name}."
    same = int((difference == 0).sum())
    return (
        f"{run.name}: the loss equals that of {first.name} exactly in {same} of {len(iterations)} iterations."
    )


def _layout(title: str, num_iterations: int) -> dict[str, object]:
    return {"xaxis": iteration_axis(num_iterations), "yaxis": titled(title), "hovermode": "x"}
