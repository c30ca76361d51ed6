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
from megatron_fssdp.report.trainings.run_sections import NO_LAYERS
from megatron_fssdp.report.trainings.shown_run import ShownRun

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
    if not any(one.run.placements for one in runs):
        return Section(title, "placements.npy is not there, or cannot be read.")
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
    rows = tuple(row for one in runs for row in _selections(one))
    if rows:
        parts.append(
            Table(("auto's change before", "layers", "strategy", "predicted gain", "seen gain"), rows)
        )
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
    layers = [str(layer) for layer in placements.layers]
    figure = new_figure(title, "expert", "layer", 270 + min(460, 26 * num_layers))
    for i, iteration in enumerate(placements.iterations[chosen]):
        figure.add_heatmap(
            z=counts_ILE[i],
            y=layers,
            text=_devices(placements.owned_ILED[chosen[i]], replicas_ILED[i]),
            coloraxis="coloraxis",
            xgap=1,
            ygap=1,
            visible=i == len(chosen) - 1,
            hovertemplate=f"layer %{{y}}, expert %{{x}}: %{{z}} replicas<br>%{{text}}<extra>iteration "
            f"{iteration}</extra>",
        )
    steps = [
        {
            "label": f"{iteration:,}",
            "method": "restyle",
            "args": [{"visible": [j == i for j in range(len(chosen))]}],
        }
        for i, iteration in enumerate(placements.iterations[chosen].tolist())
    ]
    slider = {"steps": steps, "active": len(steps) - 1, "currentvalue_prefix": "iteration ", "pad_t": 60}
    highest = max(1, int(counts_ILE.max()))
    figure.update_layout(
        sliders=[slider],
        coloraxis={
            "colorscale": _SCALE,
            "cmin": 0,
            "cmax": highest,
            "colorbar": {"title_text": "replicas", **ticks(highest)},
        },
    )
    figure.update_xaxes(showgrid=False, zeroline=False, **ticks(num_experts, 16))
    figure.update_yaxes(type="category", autorange="reversed", showgrid=False)
    return figure


def _devices(owned_LED: NDArray[np.bool_], replicas_LED: NDArray[np.bool_]) -> list[list[str]]:
    """Return the devices of every expert as words, by layer."""
    return [
        [
            f"owner {_numbers(owned_D)}" + (f", replicas {_numbers(replicas_D)}" if replicas_D.any() else "")
            for owned_D, replicas_D in zip(owned_ED, replicas_ED, strict=True)
        ]
        for owned_ED, replicas_ED in zip(owned_LED, replicas_LED, strict=True)
    ]


def _numbers(devices_D: NDArray[np.bool_]) -> str:
    found = np.flatnonzero(devices_D).tolist()
    return ", ".join(map(str, found[:_MOST_DEVICES])) + (" …" if len(found) > _MOST_DEVICES else "")


def _selections(one: ShownRun) -> Iterator[tuple[str, ...]]:
    """The changes of strategies in a run of ``auto``: when, which layers, predicted and seen gain."""
    selections = [(record, made) for record in one.run.metrics for made in record.selections]
    for number, (record, change) in enumerate(selections):
        if not change.changed:
            continue
        chosen = dict.fromkeys(
            layer.strategy or "–" for layer in record.layers if layer.layer in change.changed
        )
        seen = next(
            (later.seen for _, later in selections[number + 1 :] if later.stage == change.stage), None
        )
        yield (
            f"{one.name}, iteration {record.iteration:,}",
            ", ".join(map(str, change.changed)),
            ", ".join(chosen),
            _gain(change.predicted_s, change.iteration_s),
            "not known"
            if seen is None
            else _gain(seen.seen_s, seen.before_s) + ("; taken back" if seen.is_slower else ""),
        )


def _gain(seconds: float, iteration_s: float | None) -> str:
    share = f" ({seconds / iteration_s:.1%})" if iteration_s else ""
    return f"{1e3 * seconds:.3g} ms{share}"
