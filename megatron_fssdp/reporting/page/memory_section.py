"""Page section on the peak memory of every rank."""

from collections.abc import Sequence

from megatron_fssdp.reporting.html.section import Figure, Section, every_tick, titled
from megatron_fssdp.reporting.page.reported_run import ReportedRun
from megatron_fssdp.reporting.records.recorded_run import RecordedRun
from megatron_fssdp.reporting.units import memory_unit

_WORDS = {
    "allocated": "the maximum memory that torch allocated on the GPU",
    "resident": "the maximum resident memory of the process, libraries included",
}


def peak_memory(run: RecordedRun) -> tuple[tuple[int, ...], str]:
    """Return the last recorded peak of each global rank, in bytes, and the kind of memory.

    Both are empty if no peaks were recorded.
    """
    for record in reversed(run.metrics):
        if record.rank_peak_bytes:
            return record.rank_peak_bytes, record.rank_memory or ""
    return (), ""


def memory_section(runs: Sequence[ReportedRun]) -> Section:
    """Make the section with the peak memory of all ranks and the log's statement on the memory of experts.

    Args:
        runs: Runs of the page.
    """
    title = "Memory of every rank"
    peaks = {run.name: peak_memory(run.records) for run in runs}
    notes = tuple(f"{run.name}, from its log: {run.accounted}." for run in runs if run.accounted)
    if not any(found for found, _ in peaks.values()):
        missing = "This run did not record memory. Runs of the current version record it."
        return Section("memory", title, "", notes=notes, missing=missing)
    unit, word = memory_unit(max(max(found) for found, _ in peaks.values() if found))
    traces = [
        {
            "type": "bar",
            "name": run.name,
            "x": list(range(len(peaks[run.name][0]))),
            "y": [num_bytes / unit for num_bytes in peaks[run.name][0]],
            "marker": {"color": run.colour},
            "hovertemplate": f"rank %{{x}}: %{{y:.3f}} {word}<extra>{run.name}</extra>",
        }
        for run in runs
        if peaks[run.name][0]
    ]
    num_ranks = max(len(found) for found, _ in peaks.values())
    layout = {
        "barmode": "group",
        "bargap": 0.35,
        "xaxis": titled("global rank", **every_tick(num_ranks, 16)),
        "yaxis": titled(f"peak, {word}", rangemode="tozero"),
    }
    kinds = {_WORDS.get(kind, kind) for found, kind in peaks.values() if found}
    lead = f"Peak up to the last recorded iteration: {'; '.join(sorted(kinds))}."
    return Section("memory", title, lead, (Figure("memory", traces, layout, 300),), notes=notes)
