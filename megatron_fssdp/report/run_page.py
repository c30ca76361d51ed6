"""The page of one run, or of several runs that are compared with the first.

Shape letters: I iterations.
"""

import itertools
from collections.abc import Sequence

import numpy as np

from megatron_fssdp.planning.loads import EVEN_LOAD
from megatron_fssdp.records.recorded_run import RecordedRun
from megatron_fssdp.records.run_settings import differing_settings
from megatron_fssdp.report import measures
from megatron_fssdp.report.colours import TIME_PARTS
from megatron_fssdp.report.figures import DASHES, Line, curves, time_bars
from megatron_fssdp.report.load_sections import (
    NO_LAYERS,
    DeviceLoads,
    device_load_section,
    expert_load_section,
)
from megatron_fssdp.report.measures import (
    ShownRun,
    counted,
    largest_difference,
    losses_differ_because,
    mean_parts_s,
    not_comparable,
    progress_of,
)
from megatron_fssdp.report.page import Page, Part, Section, Table
from megatron_fssdp.report.placement_sections import micro_batch_sections, placement_section
from megatron_fssdp.report.units import format_memory, format_seconds

_MOST_EXPLAINED = 2  # more runs have only their speed and loads in the sentence at the top


def run_page(runs: Sequence[ShownRun]) -> Page:
    """Return the page of one run, or of several runs to compare with the first."""
    how = "Figures are of the whole run unless stated otherwise. Load: max/mean device load; 1 is even."
    memory = [
        f"{shown.name}, from its log: {shown.run.expert_memory}." for shown in runs if shown.run.expert_memory
    ]
    table = measures.comparison_table(runs)
    sections = [
        *_occasional_sections(runs),
        *([] if losses_differ_because(runs) else [_loss_section(runs)]),
        _time_section(runs),
        *_load_sections(runs),
        Section("All figures", how, [table, *memory]),
    ]
    title = " · ".join(shown.name for shown in runs)
    if len(runs) == 1:
        folder, strategy = runs[0].run.path.resolve().name, runs[0].run.strategy
        title = folder if folder == strategy else f"{folder} ({strategy})"
    return Page(
        "comparison" if len(runs) > 1 else "report",
        title,
        headline_of(runs),
        [(shown.name, shown.colour, _sizes(shown)) for shown in runs],
        sections,
    )


def _sizes(shown: ShownRun) -> str:
    words = [progress_of(shown.run)]
    if shown.run.layers:
        words.append(counted(len(shown.run.layers), "MoE layer"))
    if shown.run.loads is not None:
        _, _, num_devices, num_experts = shown.run.loads.counts_ILDE.shape
        words += [counted(num_experts, "expert"), counted(num_devices, "device")]
    return ", ".join(words)


def settings_table(runs: Sequence[ShownRun]) -> Table:
    """Return the settings in which runs differ, without one that is their names: the strategy's."""
    differing = differing_settings([shown.run.settings for shown in runs])
    names = tuple(shown.name for shown in runs)
    rows = tuple((key, *values) for key, values in differing.items() if values != names)
    return Table(("setting", *names), rows, frozenset(names))


def _occasional_sections(runs: Sequence[ShownRun]) -> list[Section]:
    """Return the sections that only some pages have."""
    sections = []
    if problems := [f"{shown.name}: {problem}" for shown in runs for problem in shown.run.problems]:
        sentence = "The sections that need these files are empty."
        sections.append(Section("Files that cannot be read", sentence, problems))
    if (differing := settings_table(runs)).rows:
        sentence = "The runs have the same settings, except for these. –: not set."
        sections.append(Section("Settings that differ", sentence, [differing]))
    if stops := [
        f"{shown.name}: stopped after iteration {stop}." for shown in runs for stop in shown.run.stops
    ]:
        stops.append(
            "A resumed run repeats what came after its last checkpoint; only the repetition is shown."
        )
        sections.append(Section("Interruptions", " ".join(stops)))
    return sections


def _loss_section(runs: Sequence[ShownRun]) -> Section:
    dashes = itertools.cycle(DASHES[:3])
    lines = [
        Line(shown.name, shown.colour, shown.run.iterations, shown.run.losses, next(dashes)) for shown in runs
    ]
    figure = curves("", "loss", lines, ".4f", 340)
    for shown in runs:
        for start in shown.run.metrics[1:]:
            if start.session is not None:
                words = f"{shown.name}: resumed with {start.session.strategy}"
                line = {"color": shown.colour, "dash": "dot", "width": 1}
                figure.add_vline(start.iteration - 0.5, line=line, annotation_text=words)
    sentence = "Language-model loss of each iteration, as Megatron reports it."
    if len(runs) > 1:
        sentence += (
            " Runs with the same seed and data should have the same curve, because placement changes only "
            "where experts are computed."
        )
    return Section("Loss", sentence, [figure])


def _time_section(runs: Sequence[ShownRun]) -> Section:
    lines = [
        Line(shown.name, shown.colour, shown.run.iterations, shown.run.arrays["iteration_s_I"])
        for shown in runs
    ]
    if len(runs) == 1:
        parts_s, x = measures.time_parts(runs[0].run), runs[0].run.iterations
        lines = [Line(*TIME_PARTS[part], x, part_s_I) for part, part_s_I in parts_s.items() if part_s_I.any()]
    figure = curves("Every iteration", "seconds", lines, ".4g", 280, stacked=len(runs) == 1)
    bars = {shown.name: mean_parts_s(shown.run) for shown in runs}
    parts: list[Part] = [
        time_bars("mean time of an iteration, without the first", bars),
        figure.update_yaxes(rangemode="tozero"),
    ]
    if reason := not_comparable(runs):
        sentence = f"{reason[0].upper()}{reason[1:]}."
        simulate = (
            f"`megatron-fssdp simulate --loads {runs[0].run.path}` says what these loads cost on a cluster"
        )
        parts.append(f"{sentence} A rank with little work lends its core to a busy one. {simulate}.")
    parts.append(
        "Waits are measured on the first device of each expert-parallel group, averaged over the groups, and "
        "summed over layers. The other parts are means over the ranks, except for the experts, which are "
        "those of the slowest rank. The all-to-alls do not include the wait for this rank."
    )
    if not all(measures.has_layer_parts(shown.run) for shown in runs):
        parts.append(
            "A run that did not measure the parts of its layers (strategy none, or Megatron's combined 1F1B "
            "schedule) shows all passes as one part."
        )
    sentence = "Transfers of weights and gradients count only while compute waits for them."
    return Section("Iteration time", sentence, parts)


def _load_sections(runs: Sequence[ShownRun]) -> list[Section]:
    devices = [
        DeviceLoads(
            shown.name,
            shown.colour,
            shown.run.iterations,
            shown.run.layers,
            shown.run.arrays["ep_load_max_over_mean_IL"],
            shown.run.load_IL,
        )
        for shown in runs
        if shown.run.layers
    ]
    without = [f"{shown.name}: {NO_LAYERS}" for shown in runs if not shown.run.layers]
    loads = {shown.name: shown.run.loads for shown in runs if shown.run.loads is not None}
    unread = [
        f"{shown.name}: loads.npy is not there, or cannot be read."
        for shown in runs
        if shown.run.layers and shown.run.loads is None
    ]
    return [
        device_load_section(devices, without),
        *micro_batch_sections(runs),
        expert_load_section(loads, unread),
        placement_section(runs),
    ]


def headline_of(runs: Sequence[ShownRun]) -> str:
    """Return the result in one sentence."""
    first, reason = runs[0], not_comparable(runs)
    if len(runs) == 1:
        run, (low, median, high) = first.run, measures.speed_of(first.run)
        clauses = [f"{first.name}: {progress_of(run)}", *_clauses(run)]
        clauses.append(f"loss {run.losses[0]:.4f} → {run.losses[-1]:.4f}")
        if not reason:
            clauses.append(f"median {median:,.0f} tokens/s (quartiles {low:,.0f} to {high:,.0f})")
        if peaks := measures.peak_memory(run):
            clauses.append(f"peak memory of a rank {format_memory(max(peaks))}")
    else:
        most = None if len(runs) <= _MOST_EXPLAINED else 1
        clauses = [_against(first, shown, most, with_speed=not reason) for shown in runs[1:]]
        differences = [largest_difference(first.run, shown.run) for shown in runs[1:]]
        known = [largest for largest in differences if largest is not None and np.isfinite(largest)]
        if obstacle := losses_differ_because(runs):
            clauses.append(f"losses are not compared, because the runs have {obstacle}")
        elif known:
            differ = f"losses differ by at most {max(known):.1e}"
            clauses.append(differ if max(known) else "losses are exactly equal")
    clauses += [reason] if reason else []
    return "; ".join(clauses) + "."


def _against(first: ShownRun, shown: ShownRun, most: int | None, *, with_speed: bool) -> str:
    """Compare a run with the first, with at most so many clauses on its loads."""
    clauses = _clauses(shown.run)[:most]
    if not with_speed:
        return f"{shown.name}: {'; '.join(clauses) or progress_of(shown.run)}"
    low, median, high = measures.speed_of(shown.run)
    plain_low, plain_median, plain_high = measures.speed_of(first.run)
    words = f"{shown.name} {median / plain_median:.2f} × {first.name}"
    if 1 in (len(first.run.metrics), len(shown.run.metrics)):
        words += " (a single iteration, which also allocates, says little)"
    elif max(low, plain_low) <= min(high, plain_high):
        words += " (no clear difference: the quartiles overlap)"
    return "; ".join([words, *clauses])


def _clauses(run: RecordedRun) -> list[str]:
    """Say how even the loads became, what that costs in waiting time, and whether plain EP would do."""
    if not run.layers:
        return []
    before, after = float(run.arrays["ep_load_max_over_mean_IL"].mean()), float(run.load_IL.mean())
    changed = f"{before:.2f} → {after:.2f}" if round(before, 2) != round(after, 2) else f"{after:.2f}"
    clauses = [f"busiest device {changed} × mean load"]
    replicas, most = measures.replicas_of(run)
    if replicas:
        parts_s = mean_parts_s(run)
        whole_s = max(sum(parts_s.values()), 1e-12)
        waits = [
            f"{format_seconds(parts_s[part])} for {kind}, {parts_s[part] / whole_s:.1%})"
            for part, kind in ((measures.WEIGHTS, "weights (spAG"), (measures.GRADIENTS, "gradients (spRS"))
        ]
        clauses.append(f"an iteration waits {' and '.join(waits)}")
        possible = "" if most is None else f" of {most:,} possible"
        clauses.append(f"{replicas:.3g} replicas a layer{possible}")
        if most is not None and np.all(run.arrays["num_replicas_IL"] == most):
            clauses.append("every expert is on every device, as without expert parallelism")
    if before <= EVEN_LOAD:
        clauses.append(f"loads are almost even without balancing ({before:.2f}), so plain EP would do")
    return clauses
