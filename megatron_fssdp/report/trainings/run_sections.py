"""Sections of a page of runs: loss, time, device load, expert load, memory, settings and interruptions.

Shape letters: I iterations, L MoE layers, D devices, E experts.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from megatron_fssdp.records.recorded_run import RecordedRun
from megatron_fssdp.records.run_settings import differing_settings
from megatron_fssdp.report.colours import TIME_PARTS
from megatron_fssdp.report.figures import (
    DASHES,
    GREY,
    Line,
    bin_words,
    binned,
    curves,
    even_line,
    expert_loads,
    layer_strips,
    new_figure,
    relative_load_ILE,
    sorted_devices,
    ticks,
    time_bars,
)
from megatron_fssdp.report.page import Part, Section
from megatron_fssdp.report.simulations.simulation_report import SimulationReport
from megatron_fssdp.report.tables import Table
from megatron_fssdp.report.trainings.headline import peak_memory
from megatron_fssdp.report.trainings.measures import loss_differences
from megatron_fssdp.report.trainings.shown_run import ShownRun, not_comparable, parts_of
from megatron_fssdp.report.trainings.time_parts import has_layer_parts, layer_parts, mean_parts_s, time_parts
from megatron_fssdp.report.units import MEMORY, unit_of

NO_LAYERS = (
    "No loads of MoE layers were recorded, because Megatron's own layer (strategy none) does not report "
    "them. To see the loads of plain expert parallelism, run again with --moe-strategy ep."
)
_SAME = 0.01
"""Runs are shown once if the mean difference of their relative expert loads is less than this number.

Placement does not change what routers do, so runs with the same seed have the same loads.
"""

_MEMORY_KINDS = {
    "allocated": "the maximum memory that torch allocated on the GPU",
    "resident": "the maximum resident memory of the process, libraries included",
}


def settings_section(runs: Sequence[ShownRun]) -> Section | None:
    """Make the section with the settings in which runs differ, or None if they do not differ."""
    differing = differing_settings([one.run.settings for one in runs])
    if not differing:
        return None
    table = Table(
        ("setting", *(one.name for one in runs)), tuple((key, *row) for key, row in differing.items())
    )
    sentence = "The runs have the same settings, except for these. –: not set."
    return Section("Settings that differ", sentence, [table])


def parts_section(runs: Sequence[ShownRun]) -> Section | None:
    """Make the section with the parts of resumed and interrupted runs, or None if there are none."""
    rows = []
    for one in runs:
        parts = parts_of(one.run)
        for part in parts if len(parts) > 1 or one.run.log.stops else ():
            first, last = part.records[0], part.records[-1]
            loads = [layer.load_max_over_mean for record in part.records for layer in record.layers]
            rows.append(
                (
                    f"{one.name}, iterations {first.iteration:,} to {last.iteration:,}",
                    part.strategy,
                    f"{first.lm_loss:.4f} → {last.lm_loss:.4f}",
                    f"{sum(loads) / len(loads):.2f}" if loads else "–",
                )
            )
    if not rows:
        return None
    sentence = (
        "A resumed run has one part for each start. It repeats the iterations after its last checkpoint, and "
        "only the repetition is shown."
    )
    stops = [f"{one.name}: stopped after iteration {stop}." for one in runs for stop in one.run.log.stops]
    header = ("part", "strategy", "loss", "load max/mean")
    return Section("Parts and interruptions", sentence, [Table(header, tuple(rows)), *stops])


def loss_section(runs: Sequence[ShownRun]) -> Section:
    """Make the section with the losses of all runs, and their differences from the first."""
    lines = [
        Line(one.name, one.colour, one.run.iterations, one.run.losses, DASHES[i % 3])
        for i, one in enumerate(runs)
    ]
    figure = curves("", "loss", lines, ".4f", 340)
    for one in runs:
        for data in dict.fromkeys(evaluation.data for evaluation in one.run.evaluations):
            found = [evaluation for evaluation in one.run.evaluations if evaluation.data == data]
            places, losses = zip(*((made.iteration, made.loss) for made in found), strict=True)
            symbol = "circle-open" if data == "validation" else "diamond-open"
            _add_points(figure, f"{one.name}, {data}", one.colour, places, losses, ".4f", symbol)
    parts: list[Part] = [figure]
    sentence = "Language-model loss of each iteration, as Megatron reports it."
    if any(one.run.evaluations for one in runs):
        sentence += " Points: losses on data that is not trained."
    if len(runs) > 1:
        sentence += (
            " Runs with the same seed and data should have the same curve, because placement changes only "
            "where experts are computed."
        )
        first, notes = runs[0], []
        title = f"Relative difference from {first.name}, where it is not 0"
        differing = new_figure(title, "iteration", "|difference| / loss", 260)
        differing.update_yaxes(type="log", exponentformat="power", dtick=1)
        ends_I = first.run.iterations[[0, -1]] + (-0.5, 0.5)
        differing.update_xaxes(range=list(ends_I), **ticks(len(first.run.iterations)))
        for one in runs[1:]:
            common, difference_I = loss_differences(first.run, one.run)
            differs = difference_I > 0
            same = f"exactly in {int((~differs).sum())} of {len(common)} common iterations"
            notes.append(f"{one.name}: the loss equals that of {first.name} {same}.")
            if differs.any():
                x, y = binned(common[differs], difference_I[differs], of_bin=lambda found: found.max(axis=0))
                _add_points(differing, one.name, one.colour, x, y, ".2e", "circle")
        parts += [*([differing] if differing.data else []), *notes]
    return Section("Loss", sentence, [*parts, *_bin_notes(runs)])


def _add_points(figure: go.Figure, name: str, colour: str, x: Any, y: Any, form: str, symbol: str) -> None:
    marker = {"color": colour, "size": 8, "symbol": symbol}
    words = f"iteration %{{x:.0f}}: %{{y:{form}}}<extra>{name}</extra>"
    figure.add_scatter(
        x=x, y=y, name=name, mode="markers", marker=marker, showlegend=True, hovertemplate=words
    )


def _bin_notes(runs: Sequence[ShownRun]) -> list[str]:
    words = bin_words(max(len(one.run.iterations) for one in runs))
    return [words] if words else []


def time_section(runs: Sequence[ShownRun], what_if: SimulationReport | None = None) -> Section:
    """Make the section: the mean parts of iterations, of layers, and of each iteration."""
    bars = {one.name: mean_parts_s(one.run) for one in runs}
    if what_if is not None and what_if.of_own_model:
        names = [one.run.strategy for one in runs]
        simulated = (row for row in what_if.rows if row.label in names)
        bars |= {f"{row.label}, simulated": what_if.steady_parts_s(row.outcome) for row in simulated}
    title = "mean time of an iteration, without the first"
    parts: list[Part] = [time_bars(title, list(bars), list(bars.values()))]
    if len(runs) == 1:
        parts += [_layer_bars(runs[0].run)] if has_layer_parts(runs[0].run) else []
        parts.append(_stacked(runs[0].run))
    else:
        lines = [
            Line(one.name, one.colour, one.run.iterations, one.run.arrays["iteration_s_I"]) for one in runs
        ]
        figure = curves("Seconds of every iteration", "seconds", lines, ".4g", 280)
        parts.append(figure.update_yaxes(rangemode="tozero"))
    if reason := not_comparable([one.run for one in runs]):
        parts.append(f"{_sentence(reason)} A rank with little work lends its core to a busy one.")
    parts.append(
        "Waits are measured on the first device of each expert-parallel group, averaged over the groups, and "
        "summed over layers. The other parts are means over the ranks, except for the experts of a whole "
        "iteration, which are those of the slowest rank. The all-to-alls of an iteration do not include the "
        "wait for this rank, but the combine of a layer does."
    )
    if not all(has_layer_parts(one.run) for one in runs):
        parts.append(
            "A run that did not measure the parts of its layers (strategy none, or Megatron's combined 1F1B "
            "schedule) shows all passes as one part."
        )
    for one in runs:
        if traces := sorted(one.run.path.glob("torch_profile/rank-*.json.gz")):
            files = ", ".join(str(trace.relative_to(one.run.path)) for trace in traces)
            parts.append(
                f"{one.name}: torch's profiler wrote {files} in {one.run.path}; open such a trace in "
                "https://ui.perfetto.dev."
            )
    sentence = "Transfers of weights and gradients count only while compute waits for them."
    return Section("Iteration time", sentence, parts)


def _layer_bars(run: RecordedRun) -> go.Figure:
    """Return stacked bars of the parts of every layer's passes, in pairs: forward and backward."""
    title = "Passes of every MoE layer and its transformer layer: f forward, b backward"
    figure = new_figure(title, "layer", "milliseconds of an iteration", 300, barmode="stack", bargap=0.3)
    found = {which: layer_parts(run, which) for which in ("forward", "backward")}
    layers = [str(layer) for layer in run.layers]
    x = [[name for name in layers for _ in found], ["f", "b"] * len(layers)]
    for part in found["forward"]:
        name, colour = TIME_PARTS[part]
        y = 1e3 * np.stack([found["forward"][part], found["backward"][part]], axis=1).ravel()
        form = f"layer %{{x}}: %{{y:.4g}} ms<extra>{name}</extra>"
        figure.add_bar(x=x, y=y, name=name, marker_color=colour, hovertemplate=form)
    return figure


def _stacked(run: RecordedRun) -> go.Figure:
    """Return stacked bars of the parts of every iteration."""
    figure = new_figure("Parts of every iteration", "iteration", "seconds", 280, barmode="stack", bargap=0)
    figure.update_xaxes(ticks(len(run.iterations)))
    for part, seconds_I in time_parts(run).items():
        if seconds_I.any():
            x, y = binned(run.iterations, seconds_I)
            name, colour = TIME_PARTS[part]
            form = f"iteration %{{x:.0f}}: %{{y:.4g}} s<extra>{name}</extra>"
            marker = {"color": colour, "line_width": 0}
            figure.add_bar(x=x, y=y, name=name, marker=marker, showlegend=False, hovertemplate=form)
    return figure


def device_load_section(runs: Sequence[ShownRun]) -> Section:
    """Make the section: max/mean device load by iteration and layer, and the sorted loads of all devices."""
    title = "Device load, before and after"
    recorded = [one for one in runs if one.run.layers]
    if not recorded:
        return Section(title, NO_LAYERS)
    any_plain = any(_is_plain(one.run) for one in recorded)
    lines = []
    if not any_plain:
        before_I = recorded[0].run.arrays["ep_load_max_over_mean_IL"].mean(axis=1)
        lines.append(
            Line("before (plain EP), mean of layers", GREY, recorded[0].run.iterations, before_I, "dash")
        )
    for one in recorded:
        load_IL = one.run.load_IL
        lines += [
            Line(f"{one.name}, mean of layers", one.colour, one.run.iterations, load_IL.mean(axis=1)),
            Line(
                f"{one.name}, worst layer", one.colour, one.run.iterations, load_IL.max(axis=1), "dot", True
            ),
        ]
    figure = curves("Busiest device, max / mean", "max / mean device load", lines, ".2f", 340)
    even_line(figure)
    parts: list[Part] = [figure]
    for one in recorded:
        if len(runs) == 1 or not _is_plain(one.run):
            loads = {
                "before (plain EP)": one.run.arrays["ep_load_max_over_mean_IL"],
                "after": one.run.load_IL,
            }
            strips = layer_strips(f"{one.name}: every layer", one.run.iterations, one.run.layers, loads)
            parts.append(strips)
    tokens: dict[str, tuple[str, np.ndarray]] = {}
    for one in recorded:
        if one.run.placements is not None:
            if not tokens and not any_plain:
                tokens["before (plain EP)"] = (GREY, one.run.placements.ep_tokens_ILD)
            tokens[one.name] = (one.colour, one.run.placements.tokens_ILD)
    if tokens:
        parts.append(sorted_devices("All devices, sorted by load in each iteration", tokens))
    parts += _bin_notes(recorded)
    parts += [f"{one.name}: {NO_LAYERS}" for one in runs if one not in recorded]
    sentence = (
        "Tokens of the busiest device, divided by the mean of all devices: 1 is even, and a layer takes as "
        "long as its busiest device. Before: under plain expert parallelism. After: as it was computed."
    )
    return Section(title, sentence, parts)


def _is_plain(run: RecordedRun) -> bool:
    """Whether the loads before and after are the same, so that the run itself is the line to compare with."""
    return bool(np.array_equal(run.arrays["ep_load_max_over_mean_IL"], run.load_IL))


def expert_load_section(runs: Sequence[ShownRun]) -> Section:
    """Make the section with the load of every expert over an even share. Equal loads are shown once."""
    title = "Expert load over iterations"
    figures: list[Part] = []
    notes: list[str] = []
    shown: dict[str, np.ndarray] = {}
    for one in runs:
        loads = one.run.loads
        if loads is None:
            why = NO_LAYERS if not one.run.layers else "loads.npy is not there, or cannot be read."
            notes.append(f"{one.name}: {why}")
            continue
        tokens_ILE = loads.counts_ILDE.sum(axis=2, dtype=np.int64)
        load_ILE = relative_load_ILE(tokens_ILE)
        twin = next((name for name, other in shown.items() if _are_alike(other, load_ILE)), None)
        if twin is not None:
            notes.append(
                f"{one.name} is not shown: its loads differ from those of {twin} by less than {_SAME:.0%}."
            )
            continue
        shown[one.name] = load_ILE
        words = "Load of every expert, × even share"
        heading = f"{one.name}: {words.lower()}" if len(runs) > 1 else words
        figures.append(expert_loads(heading, loads.iterations, loads.layers.tolist(), tokens_ILE, len(runs)))
    if not figures:
        return Section(title, notes[0].partition(": ")[2])
    sentence = (
        "Tokens that the router sent to each expert, divided by an even share: pale is even, orange is more, "
        "blue is less. Planning from past iterations helps experts that stay orange, and misses stripes that "
        "jump between experts."
    )
    return Section(title, sentence, [*figures, *notes])


def _are_alike(one: np.ndarray, other: np.ndarray) -> bool:
    return one.shape == other.shape and float(np.abs(one - other).mean()) < _SAME


def memory_section(runs: Sequence[ShownRun]) -> Section:
    """Make the section with the peak memory of all ranks and the log's statement on the memory of experts."""
    title = "Memory of every rank"
    peaks = {one.name: (one.colour, *peak_memory(one.run)) for one in runs}
    accounted = [
        f"{one.name}, from its log: {one.run.log.accounted}." for one in runs if one.run.log.accounted
    ]
    known = {name: found for name, found in peaks.items() if found[1]}
    if not known:
        return Section(title, "No memory was recorded yet.", accounted)
    size, word = unit_of(max(max(found) for _, found, _ in known.values()), MEMORY)
    figure = new_figure("", "global rank", f"peak, {word}", 300, barmode="group", bargap=0.35)
    for name, (colour, found, _) in known.items():
        form = f"rank %{{x}}: %{{y:.4g}} {word}<extra>{name}</extra>"
        y = [one / size for one in found]
        figure.add_bar(x=list(range(len(y))), y=y, name=name, marker_color=colour, hovertemplate=form)
        figure.update_xaxes(ticks(len(y), 16))
    kinds = sorted({_MEMORY_KINDS.get(kind, kind) for _, _, kind in known.values()})
    sentence = f"Peak up to the last recorded iteration: {'; '.join(kinds)}."
    return Section(title, sentence, [figure, *accounted])


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."
