"""Sections of runs' pages: loads of devices, micro-batches and experts, and replicas with ``auto``'s choices.

Shape letters: I iterations, Z micro-batches, L MoE layers, D devices, E experts.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from megatron_fssdp.planning.load_changes import LOAD_CHANGES, evenly, load_changes, plain_load
from megatron_fssdp.records.placements import RecordedPlacements
from megatron_fssdp.report import figures
from megatron_fssdp.report.page import Part, Section
from megatron_fssdp.report.tables import Table
from megatron_fssdp.report.trainings.shown_run import ShownRun, counted

_NO_LAYERS = (
    "No loads of MoE layers were recorded: the model has none, or Megatron's CUDA graphs dispatch its tokens "
    "under strategy none."
)
# Runs are shown once if the mean difference of their relative expert loads is smaller: placement does not
# change what routers do, so runs with the same seed have the same loads.
_SAME = 0.01
_MOST_STEPS, _MOST_CELLS = 60, 150_000  # of a slider, and of all its heat maps together
_MOST_DEVICES = 12  # that the words at a cell name
_MOST_SEARCHED = 400  # micro-batches for which replicas are planned
_SCALE = [[0.0, "rgba(138,143,152,0.16)"], [0.001, "#FBD5A8"], [0.5, "#F28E2B"], [1.0, "#7F2704"]]


def device_load_section(runs: Sequence[ShownRun]) -> Section:
    """Show max/mean device load by iteration and layer, before and after."""
    title = "Device load, before and after"
    recorded = [shown for shown in runs if shown.run.layers]
    if not recorded:
        return Section(title, _NO_LAYERS)
    lines: list[figures.Line] = []
    strips: list[Part] = []
    for shown in recorded:
        before_IL, load_IL = shown.run.arrays["ep_load_max_over_mean_IL"], shown.run.load_IL
        x, is_plain = shown.run.iterations, np.array_equal(before_IL, load_IL)
        if not is_plain and not lines:
            name, before_I = "before (plain EP), mean of layers", before_IL.mean(axis=1)
            lines.append(figures.Line(name, figures.GREY, x, before_I, "dash"))
        lines.append(figures.Line(f"{shown.name}, mean of layers", shown.colour, x, load_IL.mean(axis=1)))
        lines.append(figures.Line(f"{shown.name}, worst layer", shown.colour, x, load_IL.max(axis=1), "dot"))
        if len(runs) == 1 or not is_plain:
            loads = {"before (plain EP)": before_IL, "after": load_IL}
            strips.append(figures.layer_loads(f"{shown.name}: every layer", x, shown.run.layers, loads))
    figure = figures.device_loads("Busiest device, max / mean", lines)
    notes = [f"{shown.name}: {_NO_LAYERS}" for shown in runs if shown not in recorded]
    sentence = (
        "Tokens of the busiest device, divided by the mean of all devices: 1 is even, and a layer takes as "
        "long as its busiest device. Before: under plain expert parallelism. After: as it was computed."
    )
    return Section(title, sentence, [figure, *strips, *figures.bin_words(lines), *notes])


def micro_batch_sections(runs: Sequence[ShownRun]) -> list[Section]:
    """Show how loads differ between micro-batches, if runs have recorded them."""
    lines: list[figures.Line] = []
    rows: list[tuple[str, ...]] = []
    for shown in runs:
        loads, placed = shown.run.micro_batch_loads, shown.run.placements
        if loads is None or placed is None:
            continue
        owned, x = placed.owned_ILED, loads.iterations
        counts_IZLDE = loads.counts_IZLDE[..., : owned[0, 0].size // owned[0, 0].sum(), :]
        worst_I = plain_load(counts_IZLDE).max(axis=1).mean(axis=1)
        load_I = plain_load(counts_IZLDE.sum(axis=1)).mean(axis=1)
        lines.append(figures.Line(f"{shown.name}, worst micro-batch", shown.colour, x, worst_I, "dot"))
        lines.append(figures.Line(f"{shown.name}, iteration", shown.colour, x, load_I))
        slots = int((placed.present_ILED & ~owned).sum(axis=2).max()) or 2
        most = min(50, -(-_MOST_SEARCHED // len(loads.layers)))
        for i, layer in enumerate(loads.layers):
            found = load_changes(counts_IZLDE[:, :, i], x, slots, most)
            cells = zip(found, LOAD_CHANGES.values(), strict=True)
            words = ("–" if np.isnan(number) else f"{number:{form}}" for number, form in cells)
            rows.append((f"{shown.name}, layer {layer}", *words))
    if not rows:
        return []
    sentence = (
        "Max/mean device load under plain expert parallelism; the picture has means of layers. Alike: share "
        "of load on the same experts as one before. Jumps: more has moved than drift explains. Removed: part "
        "of a micro-batch's max/mean - 1 without which it would be with replicas that these counts plan, in "
        "as many slots as the run had, or 2."
    )
    parts = [figures.device_loads("", lines), Table(("", *LOAD_CHANGES), tuple(rows))]
    return [Section("Between micro-batches", sentence, parts)]


def expert_load_section(runs: Sequence[ShownRun]) -> Section:
    """Show the load of every expert over an even share, equal loads once."""
    title = "Expert load over iterations"
    maps: list[Part] = []
    notes: list[str] = []
    shown: dict[str, NDArray[np.float64]] = {}
    for one in runs:
        loads = one.run.loads
        if loads is None:
            why = "loads.npy is not there, or cannot be read." if one.run.layers else _NO_LAYERS
            notes.append(f"{one.name}: {why}")
            continue
        load_ILE = figures.relative_load_ILE(loads.counts_ILDE)
        if twin := next((name for name, other in shown.items() if _is_same(other, load_ILE)), ""):
            words = f"its loads differ from those of {twin} by less than {_SAME:.0%}"
            notes.append(f"{one.name} is not shown: {words}.")
        else:
            shown[one.name] = load_ILE
            maps.append(figures.expert_loads(one.name if len(runs) > 1 else "", loads, len(runs)))
    if not maps:
        return Section(title, notes[0].partition(": ")[2])
    sentence = (
        "Tokens that the router sent to each expert, divided by an even share: pale is even, orange is more, "
        "blue is less. Planning from past iterations helps experts that stay orange, and misses stripes that "
        "jump between experts."
    )
    return Section(title, sentence, [*maps, *notes])


def _is_same(one_ILE: NDArray[np.float64], other_ILE: NDArray[np.float64]) -> bool:
    return one_ILE.shape == other_ILE.shape and float(np.abs(one_ILE - other_ILE).mean()) < _SAME


def placement_section(runs: Sequence[ShownRun]) -> Section:
    """Show the replicas of every expert by iteration, and the strategies that ``auto`` changed."""
    title = "Replicas of every expert"
    if not any(shown.run.layers for shown in runs):
        return Section(title, _NO_LAYERS)
    parts: list[Part] = []
    for shown in runs:
        if not shown.run.arrays["num_replicas_IL"].any():
            parts.append(f"No replicas in {shown.name}.")
        elif shown.run.placements is None:
            parts.append(f"{shown.name}: placements.npy is not there, or cannot be read.")
        else:
            heading = f"{shown.name}: replicas of every expert" if len(runs) > 1 else ""
            parts.append(_replica_map(heading, shown.run.placements, len(runs)))
        if times := int((shown.run.arrays["resharded_experts_I"] > 0).sum()):
            parts.append(f"{shown.name}: experts moved to new owners {counted(times, 'time')}.")
    sentence = (
        "A replica is a copy of an expert on another device than its owner's, which computes a part of the "
        "expert's tokens. Move the slider to see another iteration, and point at a cell to see the devices."
    )
    if rows := tuple(row for shown in runs for row in _selections(shown)):
        header = ("auto's change before", "layers", "strategy", "predicted gain", "seen gain")
        parts.append(Table(header, rows))
        parts.append(
            "Predicted: modelled milliseconds of an iteration that the change saves. Seen: by how much the "
            "median iteration became shorter until auto reconsidered. The loads can have changed."
        )
    return Section(title, sentence, parts)


def _replica_map(title: str, placements: RecordedPlacements, num_maps: int) -> go.Figure:
    """Return a heat map of layers × experts, and a slider over iterations."""
    num_iterations, num_layers, num_experts, _ = placements.present_ILED.shape
    most = max(2, min(_MOST_STEPS, _MOST_CELLS // (num_layers * num_experts * num_maps)))
    chosen = evenly(np.arange(num_iterations), most)
    owned_ILED = placements.owned_ILED[chosen]
    replicas_ILED = placements.present_ILED[chosen] & ~owned_ILED
    counts_ILE = replicas_ILED.sum(axis=3).astype(np.uint16)
    figure = figures.new_figure(title, "expert", "layer", 270 + min(460, 26 * num_layers))
    steps, last = [], len(chosen) - 1
    for i, iteration in enumerate(placements.iterations[chosen].tolist()):
        words = [
            list(map(_owner_and_replicas, *layer))
            for layer in zip(owned_ILED[i], replicas_ILED[i], strict=True)
        ]
        form = (
            f"layer %{{y}}, expert %{{x}}: %{{z}} replicas<br>%{{text}}<extra>iteration {iteration}</extra>"
        )
        style = {"coloraxis": "coloraxis", "xgap": 1, "ygap": 1, "hovertemplate": form}
        names = [str(layer) for layer in placements.layers]
        figure.add_heatmap(z=counts_ILE[i], y=names, text=words, visible=i == last, **style)
        visible = {"visible": [j == i for j in range(len(chosen))]}
        steps.append({"label": f"{iteration:,}", "method": "restyle", "args": [visible]})
    slider = {"steps": steps, "active": last, "currentvalue_prefix": "iteration ", "pad_t": 60}
    highest = max(1, int(counts_ILE.max()))
    bar = {"title_text": "replicas", **figures.ticks(highest)}
    scale = {"colorscale": _SCALE, "cmin": 0, "cmax": highest, "colorbar": bar}
    figure.update_layout(sliders=[slider], coloraxis=scale)
    figure.update_xaxes(showgrid=False, zeroline=False, **figures.ticks(num_experts, 16))
    return figure.update_yaxes(type="category", autorange="reversed", showgrid=False)


def _owner_and_replicas(owned_D: NDArray[np.bool_], replicas_D: NDArray[np.bool_]) -> str:
    return f"owner {_numbers(owned_D)}, replicas {_numbers(replicas_D)}"


def _numbers(devices_D: NDArray[np.bool_]) -> str:
    found = np.flatnonzero(devices_D).tolist()
    return ", ".join(map(str, found[:_MOST_DEVICES])) + (" …" if len(found) > _MOST_DEVICES else "") or "none"


def _selections(one: ShownRun) -> Iterator[tuple[str, ...]]:
    """Yield ``auto``'s changes: when, which layers, the new strategy, predicted and seen gain."""
    selections = [(record, made) for record in one.run.metrics for made in record.selections]
    for number, (record, change) in enumerate(selections):
        if not change.changed:
            continue
        chosen = {layer.strategy or "–": 0 for layer in record.layers if layer.layer in change.changed}
        later = (one.seen for _, one in selections[number + 1 :] if one.stage == change.stage)
        gain, seen = "not known", next(later, None)
        if seen is not None:
            gain = _gain(seen.before_s - seen.after_s, seen.before_s) + "; taken back" * seen.is_slower
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
