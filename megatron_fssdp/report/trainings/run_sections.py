"""Sections of a page of runs: settings, interruptions, loss, time, device load, expert load and memory.

Shape letters: I iterations, L MoE layers, D devices, E experts.
"""

from collections.abc import Sequence

import numpy as np

from megatron_fssdp.records.run_settings import differing_settings
from megatron_fssdp.report.colours import TIME_PARTS
from megatron_fssdp.report.figures import (
    DASHES,
    GREY,
    Line,
    bin_words,
    curves,
    even_line,
    expert_loads,
    layer_loads,
    new_figure,
    relative_load_ILE,
    ticks,
    time_bars,
)
from megatron_fssdp.report.page import Part, Section
from megatron_fssdp.report.simulations.simulation_report import SimulationReport
from megatron_fssdp.report.tables import Table
from megatron_fssdp.report.trainings.headline import peak_memory
from megatron_fssdp.report.trainings.shown_run import NO_LAYERS, ShownRun, not_comparable, parts_of
from megatron_fssdp.report.trainings.time_parts import has_layer_parts, mean_parts_s, time_parts
from megatron_fssdp.report.units import MEMORY, unit_of

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
    rows = tuple((key, *values) for key, values in differing.items())
    sentence = "The runs have the same settings, except for these. –: not set."
    table = Table(("setting", *(one.name for one in runs)), rows)
    return Section("Settings that differ", sentence, [table]) if rows else None


def parts_section(runs: Sequence[ShownRun]) -> Section | None:
    """Make the section with the parts of resumed and interrupted runs, or None if there are none."""
    rows = []
    for one in runs:
        parts = parts_of(one.run)
        for strategy, records in parts if len(parts) > 1 or one.run.log.stops else ():
            first, last = records[0], records[-1]
            loads = [layer.load_max_over_mean for record in records for layer in record.layers]
            rows.append(
                (
                    f"{one.name}, iterations {first.iteration:,} to {last.iteration:,}",
                    strategy,
                    f"{first.lm_loss:.4f} → {last.lm_loss:.4f}",
                    f"{sum(loads) / len(loads):.2f}" if loads else "–",
                )
            )
    sentence = (
        "A resumed run has one part for each start. It repeats the iterations after its last checkpoint, and "
        "only the repetition is shown."
    )
    stops = [f"{one.name}: stopped after iteration {stop}." for one in runs for stop in one.run.log.stops]
    table = Table(("part", "strategy", "loss", "load max/mean"), tuple(rows))
    return Section("Parts and interruptions", sentence, [table, *stops]) if rows else None


def loss_section(runs: Sequence[ShownRun]) -> Section:
    """Make the section with the losses of all runs, and where they differ from those of the first."""
    lines = [
        Line(one.name, one.colour, one.run.iterations, one.run.losses, DASHES[i % 3])
        for i, one in enumerate(runs)
    ]
    figure = curves("", "loss", lines, ".4f", 340)
    for one in runs:
        for data in dict.fromkeys(evaluation.data for evaluation in one.run.evaluations):
            found = [evaluation for evaluation in one.run.evaluations if evaluation.data == data]
            symbol = "circle-open" if data == "validation" else "diamond-open"
            figure.add_scatter(
                x=[made.iteration for made in found],
                y=[made.loss for made in found],
                name=f"{one.name}, {data}",
                mode="markers",
                marker={"color": one.colour, "size": 8, "symbol": symbol},
                hovertemplate=f"iteration %{{x}}: %{{y:.4f}}<extra>{one.name}, {data}</extra>",
            )
    sentence = "Language-model loss of each iteration, as Megatron reports it."
    if any(one.run.evaluations for one in runs):
        sentence += " Points: losses on data that is not trained."
    if len(runs) > 1:
        sentence += (
            " Runs with the same seed and data should have the same curve, because placement changes only "
            "where experts are computed."
        )
    notes = [_loss_note(runs[0], one) for one in runs[1:]]
    return Section("Loss", sentence, [figure, *notes, *_bin_notes(runs)])


def _loss_note(first: ShownRun, one: ShownRun) -> str:
    """Say in how many iterations the losses of two runs are equal, and from where on they differ."""
    common_I, at_first, at_one = np.intersect1d(first.run.iterations, one.run.iterations, return_indices=True)
    differs_I = first.run.losses[at_first] != one.run.losses[at_one]
    same = f"in {int((~differs_I).sum()):,} of {len(common_I):,} common iterations"
    begin = f", and differs first in iteration {common_I[differs_I][0]:,}" if differs_I.any() else ""
    return f"{one.name}: the loss equals that of {first.name} exactly {same}{begin}."


def _bin_notes(runs: Sequence[ShownRun]) -> list[str]:
    return bin_words(max(len(one.run.iterations) for one in runs))


def time_section(runs: Sequence[ShownRun], what_if: SimulationReport | None = None) -> Section:
    """Make the section: the mean parts of iterations, and the time of each iteration."""
    bars = {one.name: mean_parts_s(one.run) for one in runs}
    if what_if is not None and what_if.of_own_model:
        names = [one.run.strategy for one in runs]
        simulated = (row for row in what_if.rows if row.label in names)
        bars |= {f"{row.label}, simulated": what_if.steady_parts_s(row.outcome) for row in simulated}
    if len(runs) == 1:
        run = runs[0].run
        lines = [
            Line(*TIME_PARTS[part], run.iterations, seconds_I)
            for part, seconds_I in time_parts(run).items()
            if seconds_I.any()
        ]
    else:
        lines = [
            Line(one.name, one.colour, one.run.iterations, one.run.arrays["iteration_s_I"]) for one in runs
        ]
    figure = curves("Every iteration", "seconds", lines, ".4g", 280, stacked=len(runs) == 1)
    parts: list[Part] = [
        time_bars("mean time of an iteration, without the first", bars),
        figure.update_yaxes(rangemode="tozero"),
        *_bin_notes(runs),
    ]
    if reason := not_comparable([one.run for one in runs]):
        parts.append(
            f"{reason[0].upper()}{reason[1:]}. A rank with little work lends its core to a busy one."
        )
    parts.append(
        "Waits are measured on the first device of each expert-parallel group, averaged over the groups, and "
        "summed over layers. The other parts are means over the ranks, except for the experts, which are "
        "those of the slowest rank. The all-to-alls do not include the wait for this rank."
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


def device_load_section(runs: Sequence[ShownRun]) -> Section:
    """Make the section: max/mean device load by iteration and layer, before and after."""
    title = "Device load, before and after"
    recorded = [one for one in runs if one.run.layers]
    if not recorded:
        return Section(title, NO_LAYERS)
    lines: list[Line] = []
    strips: list[Part] = []
    for one in recorded:
        before_IL, load_IL, x = (
            one.run.arrays["ep_load_max_over_mean_IL"],
            one.run.load_IL,
            one.run.iterations,
        )
        is_plain = np.array_equal(before_IL, load_IL)
        if not is_plain and not lines:
            lines.append(Line("before (plain EP), mean of layers", GREY, x, before_IL.mean(axis=1), "dash"))
        lines.append(Line(f"{one.name}, mean of layers", one.colour, x, load_IL.mean(axis=1)))
        lines.append(Line(f"{one.name}, worst layer", one.colour, x, load_IL.max(axis=1), "dot"))
        if len(runs) == 1 or not is_plain:
            loads = {"before (plain EP)": before_IL, "after": load_IL}
            strips.append(layer_loads(f"{one.name}: every layer", x, one.run.layers, loads))
    figure = curves("Busiest device, max / mean", "max / mean device load", lines, ".2f", 340)
    even_line(figure)
    notes = [f"{one.name}: {NO_LAYERS}" for one in runs if one not in recorded]
    sentence = (
        "Tokens of the busiest device, divided by the mean of all devices: 1 is even, and a layer takes as "
        "long as its busiest device. Before: under plain expert parallelism. After: as it was computed."
    )
    return Section(title, sentence, [figure, *strips, *_bin_notes(recorded), *notes])


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
        load_ILE = relative_load_ILE(loads.counts_ILDE)
        twin = next((name for name, other in shown.items() if _are_alike(other, load_ILE)), None)
        if twin is not None:
            notes.append(
                f"{one.name} is not shown: its loads differ from those of {twin} by less than {_SAME:.0%}."
            )
            continue
        shown[one.name] = load_ILE
        heading = one.name if len(runs) > 1 else ""
        figures.append(expert_loads(heading, loads.iterations, loads.layers.tolist(), load_ILE, len(runs)))
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
    notes = [f"{one.name}, from its log: {one.run.log.accounted}." for one in runs if one.run.log.accounted]
    peaks = {one: peak for one in runs if (peak := peak_memory(one.run))[0]}
    if not peaks:
        return Section(title, "No memory was recorded yet.", notes)
    size, word = unit_of(max(max(found) for found, _ in peaks.values()), MEMORY)
    figure = new_figure("", "global rank", f"peak, {word}", 300, barmode="group", bargap=0.35)
    for one, (found_bytes, _) in peaks.items():
        form = f"rank %{{x}}: %{{y:.4g}} {word}<extra>{one.name}</extra>"
        y = [number / size for number in found_bytes]
        figure.add_bar(y=y, name=one.name, marker_color=one.colour, hovertemplate=form)
        figure.update_xaxes(ticks(len(y), 16))
    kinds = sorted({_MEMORY_KINDS.get(kind, kind) for _, kind in peaks.values()})
    sentence = f"Peak up to the last recorded iteration: {'; '.join(kinds)}."
    return Section(title, sentence, [figure, *notes])
