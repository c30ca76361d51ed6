"""Marks in figures where a run was resumed."""

from collections.abc import Sequence
from typing import Any

from megatron_fssdp.reporting.page.reported_run import ReportedRun
from megatron_fssdp.reporting.records.run_parts import parts_of

MOST_LABELS = 6
"""Number of marks up to which each one has a label. More labels would overlap."""

ROW_HEIGHT = 17
"""Height of a label in pixels."""


def with_part_marks(layout: dict[str, Any], runs: Sequence[ReportedRun]) -> dict[str, Any]:
    """Return a figure's layout with a dotted line at the first iteration of each part but the first.

    On the page of one run, the line is labelled with the part's strategy.

    Args:
        layout: Layout in plotly.js' format, with iterations on the x axis. It is not changed.
        runs: Runs in the figure.
    """
    shapes, annotations = list(layout.get("shapes", ())), list(layout.get("annotations", ()))
    for run in runs:
        later = parts_of(run.records)[1:]
        for i, part in enumerate(later):
            place = part.first - 0.5
            line = {"color": run.colour, "width": 1, "dash": "dot"}
            ends = {"xref": "x", "x0": place, "x1": place, "yref": "paper", "y0": 0, "y1": 1}
            shapes.append({"type": "line", **ends, "line": line})
            if len(runs) == 1 and len(later) <= MOST_LABELS:
                # Starts can be close to each other or to the edge, so each label has a row of its own.
                is_late = 2 * place > run.records.metrics[0].iteration + run.records.metrics[-1].iteration
                annotations.append(
                    {
                        "text": part.strategy,
                        **{"x": place, "xref": "x", "xanchor": "right" if is_late else "left"},
                        **{"y": 1, "yref": "paper", "yanchor": "top", "yshift": -ROW_HEIGHT * i},
                        **{"showarrow": False, "font": {"size": 11}},
                    }
                )
    return layout | {"shapes": shapes, "annotations": annotations} if shapes else layout
