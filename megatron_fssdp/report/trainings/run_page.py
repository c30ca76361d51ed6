"""The page of one run, or of several runs that are compared with the first.

Shape letters: I iterations.
"""

from collections.abc import Sequence

from megatron_fssdp.records.run_settings import differing_settings
from megatron_fssdp.report.colours import TIME_PARTS
from megatron_fssdp.report.figures import DASHES, Line, bin_words, curves, new_figure, ticks, time_bars
from megatron_fssdp.report.page import Page, Part, Section
from megatron_fssdp.report.simulations.simulation_page import ranking_section
from megatron_fssdp.report.simulations.simulation_report import SimulationReport
from megatron_fssdp.report.tables import Table
from megatron_fssdp.report.trainings.headline import headline_of, peak_memory
from megatron_fssdp.report.trainings.load_sections import (
    device_load_section,
    expert_load_section,
    placement_section,
)
from megatron_fssdp.report.trainings.measures import comparison_table
from megatron_fssdp.report.trainings.shown_run import (
    ShownRun,
    counted,
    not_comparable,
    parts_of,
    progress_of,
)
from megatron_fssdp.report.trainings.time_parts import has_layer_parts, mean_parts_s, time_parts
from megatron_fssdp.report.units import MEMORY, unit_of

_WHAT_IF = "What if: strategies ranked on a cluster"
_NOT_ASKED = (
    "No cluster was given, so nothing was simulated. To rank all strategies on a cluster with this run's "
    "loads, give --cluster NAME (“megatron-fssdp configs” lists the names) or --cluster FILE.yaml "
    "(“megatron-fssdp profile” measures a cluster and writes the file)."
)
_MEMORY_KINDS = {
    "allocated": "the maximum memory that torch allocated on the GPU",
    "resident": "the maximum resident memory of the process, libraries included",
}


def run_page(
    runs: Sequence[ShownRun], what_if: SimulationReport | None = None, *, with_losses: bool = True
) -> Page:
    """Return the page of one run, or of several runs to compare with the first.

    A section that has nothing to show gives the reason.
    """
    ranking = Section(_WHAT_IF, _NOT_ASKED)
    if what_if is not None:
        ranking = ranking_section(what_if, _WHAT_IF, f"{what_if.title}. ")
    how = "Figures are of the whole run unless stated otherwise. Load: max/mean device load; 1 is even."
    sections = [
        *_occasional_sections(runs),
        *([_loss_section(runs)] if with_losses else []),
        _time_section(runs),
        device_load_section(runs),
        expert_load_section(runs),
        placement_section(runs),
        _memory_section(runs),
        ranking,
        Section("All figures", how, [comparison_table(runs, with_losses=with_losses)]),
    ]
    title = " · ".join(one.name for one in runs)
    if len(runs) == 1:
        folder, strategy = runs[0].run.path.resolve().name, runs[0].run.strategy
        title = folder if folder == strategy else f"{folder} ({strategy})"
    return Page(
        "comparison" if len(runs) > 1 else "report",
        title,
        headline_of(runs, what_if, with_losses=with_losses),
        [(one.name, one.colour, _sizes(one)) for one in runs],
        sections,
    )


def _sizes(one: ShownRun) -> str:
    words = [progress_of(one.run)]
    if one.run.layers:
        words.append(counted(len(one.run.layers), "MoE layer"))
    if one.run.loads is not None:
        _, _, num_devices, num_experts = one.run.loads.counts_ILDE.shape
        words += [counted(num_experts, "expert"), counted(num_devices, "device")]
    return ", ".join(words)


def settings_table(runs: Sequence[ShownRun]) -> Table:
    """Return the settings in which runs differ."""
    rows = tuple(
        (key, *values) for key, values in differing_settings([one.run.settings for one in runs]).items()
    )
    names = tuple(one.name for one in runs)
    return Table(("setting", *names), rows, frozenset(names))


def _occasional_sections(runs: Sequence[ShownRun]) -> list[Section]:
    """Make the sections that only some pages have: unreadable files, settings that differ, interruptions."""
    sections = []
    if problems := [f"{one.name}: {problem}" for one in runs for problem in one.run.problems]:
        sentence = "The sections that need these files are empty."
        sections.append(Section("Files that cannot be read", sentence, problems))
    if (differing := settings_table(runs)).rows:
        sentence = "The runs have the same settings, except for these. –: not set."
        sections.append(Section("Settings that differ", sentence, [differing]))
    rows = []
    for one in runs:
        parts = parts_of(one.run)
        for strategy, records in parts if len(parts) > 1 or one.run.log.stops else ():
            first, last = records[0], records[-1]
            loads = [layer.load_max_over_mean for record in records for layer in record.layers]
            part = f"{one.name}, iterations {first.iteration:,} to {last.iteration:,}"
            losses = f"{first.lm_loss:.4f} → {last.lm_loss:.4f}"
            rows.append((part, strategy, losses, f"{sum(loads) / len(loads):.2f}" if loads else "–"))
    if rows:
        sentence = (
            "A resumed run has one part for each start. It repeats the iterations after its last checkpoint, "
            "and only the repetition is shown."
        )
        stops = [f"{one.name}: stopped after iteration {stop}." for one in runs for stop in one.run.log.stops]
        table = Table(("part", "strategy", "loss", "load max/mean"), tuple(rows))
        sections.append(Section("Parts and interruptions", sentence, [table, *stops]))
    return sections


def _loss_section(runs: Sequence[ShownRun]) -> Section:
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
    return Section("Loss", sentence, [figure, *bin_words(lines)])


def _time_section(runs: Sequence[ShownRun]) -> Section:
    """Make the section: the mean parts of iterations, and the time of each iteration."""
    if len(runs) == 1:
        parts_s = {part: seconds_I for part, seconds_I in time_parts(runs[0].run).items() if seconds_I.any()}
        x = runs[0].run.iterations
        lines = [Line(*TIME_PARTS[part], x, seconds_I) for part, seconds_I in parts_s.items()]
    else:
        lines = [
            Line(one.name, one.colour, one.run.iterations, one.run.arrays["iteration_s_I"]) for one in runs
        ]
    figure = curves("Every iteration", "seconds", lines, ".4g", 280, stacked=len(runs) == 1)
    bars = {one.name: mean_parts_s(one.run) for one in runs}
    parts: list[Part] = [
        time_bars("mean time of an iteration, without the first", bars),
        figure.update_yaxes(rangemode="tozero"),
        *bin_words(lines),
    ]
    if reason := not_comparable(runs):
        sentence = f"{reason[0].upper()}{reason[1:]}."
        parts.append(f"{sentence} A rank with little work lends its core to a busy one.")
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
        if traces := sorted(path.name for path in one.run.path.glob("torch_profile/rank-*.json.gz")):
            files = f"{', '.join(traces)} in {one.run.path / 'torch_profile'}"
            parts.append(
                f"{one.name}: torch's profiler wrote {files}; open such a trace in https://ui.perfetto.dev."
            )
    sentence = "Transfers of weights and gradients count only while compute waits for them."
    return Section("Iteration time", sentence, parts)


def _memory_section(runs: Sequence[ShownRun]) -> Section:
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
