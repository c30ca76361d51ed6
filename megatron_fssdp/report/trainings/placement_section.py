"""Page section on placement: a heat map of replicas with a slider, and what ``auto`` selected.

Shape letters: I iterations, L MoE layers, E experts, D devices.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from megatron_fssdp.records.placements import RecordedPlacements
from megatron_fssdp.report.figures import new_figure, ticks
from megatron_fssdp.report.page import Part, Section
from megatron_fssdp.report.tables import Table
from megatron_fssdp.report.trainings.shown_run import NO_LAYERS, ShownRun

_MOST_STEPS, _MOST_CELLS = 60, 150_000
"""Most steps of a slider, and cells of all its heat maps together."""

_MOST_DEVICES = 12
"""Most devices that the words at a cell name."""

_SCALE = [[0.0, "rgba(138,143,152,0.16)"], [0.001, "#FBD5A8"], [0.5, "#F28E2B"], [1.0, "#7F2704"]]


def placement_section(runs: Sequence[ShownRun]) -> Section:
    """Make the section with the replicas of every expert at an iteration, for each run that had some."""
    title = "Replicas of every expert"
    if not any(one.run.layers for one in runs):
        return Section(title, NO_LAYERS)
    parts: list[Part] = []
    for one in runs:
        if not one.run.layers or not one.run.total("num_replicas"):
            parts.append(f"No replicas in {one.name}.")
        elif one.run.placements is None:
            parts.append(f"{one.name}: placements.npy is not there, or cannot be read.")
        else:
            heading = f"{one.name}: replicas of every expert" if len(runs) > 1 else ""
            parts.append(replica_map(heading, one.run.placements, len(runs)))
        if times := int((one.run.arrays["resharded_experts_I"] > 0).sum()):
            parts.append(f"{one.name}: experts moved to new owners {times:,} time{'s' if times > 1 else ''}.")
    sentence = (
        "A replica is a copy of an expert on another device than its owner's, which computes a part of the "
        "expert's tokens. Move the slider to see another iteration, and point at a cell to see the devices."
    )
    if rows := tuple(row for one in runs for row in _selections(one)):
        header = ("auto's change before", "layers", "strategy", "predicted gain", "seen gain")
        parts.append(Table(header, rows))
        parts.append(
            "Predicted: modelled milliseconds of an iteration that the change saves. Seen: by how much the "
            "median iteration became shorter until auto reconsidered. The loads can have changed."
        )
    return Section(title, sentence, parts)


def replica_map(title: str, placements: RecordedPlacements, num_maps: int) -> go.Figure:
    """Return a heat map of layers × experts with the number of replicas, and a slider over iterations."""
    num_iterations, num_layers, num_experts, _ = placements.present_ILED.shape
    most = max(2, min(_MOST_STEPS, _MOST_CELLS // (num_layers * num_experts * num_maps)))
    chosen = np.unique(np.linspace(0, num_iterations - 1, min(most, num_iterations)).round().astype(int))
    replicas_ILED = (placements.present_ILED & ~placements.owned_ILED)[chosen]
    counts_ILE = replicas_ILED.sum(axis=3).astype(np.uint16)
    figure = new_figure(title, "expert", "layer", 270 + min(460, 26 * num_layers))
    steps, last = [], len(chosen) - 1
    for i, iteration in enumerate(placements.iterations[chosen].tolist()):
        words = [
            [
                f"owner {_numbers(owned_D)}, replicas {_numbers(replicas_D)}"
                for owned_D, replicas_D in zip(*layer, strict=True)
            ]
            for layer in zip(placements.owned_ILED[chosen[i]], replicas_ILED[i], strict=True)
        ]
        figure.add_heatmap(
            z=counts_ILE[i],
            y=[str(layer) for layer in placements.layers],
            text=words,
            coloraxis="coloraxis",
            xgap=1,
            ygap=1,
            visible=i == last,
            hovertemplate=f"layer %{{y}}, expert %{{x}}: %{{z}} replicas<br>%{{text}}<extra>iteration "
            f"{iteration}</extra>",
        )
        visible = {"visible": [j == i for j in range(len(chosen))]}
        steps.append({"label": f"{iteration:,}", "method": "restyle", "args": [visible]})
    slider = {"steps": steps, "active": last, "currentvalue_prefix": "iteration ", "pad_t": 60}
    highest = max(1, int(counts_ILE.max()))
    bar = {"title_text": "replicas", **ticks(highest)}
    scale = {"colorscale": _SCALE, "cmin": 0, "cmax": highest, "colorbar": bar}
    figure.update_layout(sliders=[slider], coloraxis=scale)
    figure.update_xaxes(showgrid=False, zeroline=False, **ticks(num_experts, 16))
    figure.update_yaxes(type="category", autorange="reversed", showgrid=False)
    return figure


def _numbers(devices_D: NDArray[np.bool_]) -> str:
    found = np.flatnonzero(devices_D).tolist()
    return ", ".join(map(str, found[:_MOST_DEVICES])) + (" …" if len(found) > _MOST_DEVICES else "") or "none"


def _selections(one: ShownRun) -> Iterator[tuple[str, ...]]:
    """The changes of strategies in a run of ``auto``: when, which layers, predicted and seen gain."""
    selections = [(record, made) for record in one.run.metrics for made in record.selections]
    for number, (record, change) in enumerate(selections):
        if not change.changed:
            continue
        chosen = {layer.strategy or "–": 0 for layer in record.layers if layer.layer in change.changed}
        later = (one for _, one in selections[number + 1 :] if one.stage == change.stage)
        seen = next((one.seen for one in later), None)
        gain = "not known"
        if seen is not None:
            gain = _gain(seen.seen_s, seen.before_s) + ("; taken back" if seen.is_slower else "")
        yield (
            f"{one.name}, iteration {record.iteration:,}",
            ", ".join(map(str, change.changed)),
            ", ".join(chosen),
            _gain(change.predicted_s, change.iteration_s),
            gain,
        )


def _gain(seconds: float, iteration_s: float | None) -> str:
    share = f" ({seconds / iteration_s:.1%})" if iteration_s else ""
    return f"{1e3 * seconds:.3g} ms{share}"
