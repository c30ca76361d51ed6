"""The top of a page: one sentence and the most important numbers, computed from the records."""

from collections.abc import Sequence

import numpy as np

from megatron_fssdp.reporting.html.html_page import Headline, Tile
from megatron_fssdp.reporting.page.device_load_section import load_before_IL
from megatron_fssdp.reporting.page.memory_section import peak_memory
from megatron_fssdp.reporting.page.reported_run import ReportedRun
from megatron_fssdp.reporting.records.recorded_run import RecordedRun, loss_differences
from megatron_fssdp.reporting.records.run_parts import not_comparable, progress_of, speed_of
from megatron_fssdp.reporting.simulation_report import SimulationReport
from megatron_fssdp.reporting.units import format_bytes, format_memory


def headline_of(
    runs: Sequence[ReportedRun], what_if: SimulationReport | None = None, *, with_losses: bool = True
) -> Headline:
    """Return the top of the page of one run, or of a page that compares several runs with the first.

    Args:
        runs: Runs of the page.
        what_if: Results of a simulation of the runs' loads, or None.
        with_losses: Whether losses can be compared.
    """
    records = [run.records for run in runs]
    clauses = [_of_run(runs[0])] if len(runs) == 1 else [_against(runs[0], run) for run in runs[1:]]
    reason = not_comparable(records)
    if reason:
        clauses.append(reason)
    tiles = list(_loss_tiles(runs) if with_losses else ())
    tiles += _load_tiles(runs)
    if not reason:
        tiles += _speed_tiles(runs)
    if what_if is not None and (simulated := _simulated(runs, what_if)):
        clauses.append(f"simulated: {simulated} ({what_if.title})")
        tiles.append(Tile("simulated, not measured", simulated, what_if.title))
    if len(runs) == 1:
        tiles += _transfer_tiles(records[0])
    return Headline("; ".join(clauses) + ".", tuple(tiles))


def _of_run(run: ReportedRun) -> str:
    return "; ".join([f"{run.name}: {progress_of(run.records)}", *_load_clauses(run)])


def _against(first: ReportedRun, run: ReportedRun) -> str:
    records = [first.records, run.records]
    if not_comparable(records):
        return f"{run.name}: {'; '.join(_load_clauses(run)) or progress_of(run.records)}"
    (low, median, _), (_, plain, high) = speed_of(run.records.metrics), speed_of(first.records.metrics)
    speed = f"{run.name} {median / plain:.2f} × {first.name}"
    if low <= high and speed_of(first.records.metrics)[0] <= speed_of(run.records.metrics)[2]:
        speed += " (no clear difference: the quartiles overlap)"
    waits = [_waits_ms(one) for one in records]
    clauses = [speed, *_load_clauses(run)]
    if any(waits):
        clauses.insert(2, f"waits for transfers {waits[0]:.3g} → {waits[1]:.3g} ms")
    return "; ".join(clauses)


def _load_clauses(run: ReportedRun) -> list[str]:
    records = run.records
    if not records.layers:
        return []
    before, after = float(load_before_IL(run).mean()), float(records.load_IL.mean())
    change = f"{before:.2f} → {after:.2f}" if before != after else f"{after:.2f}"
    clauses = [f"busiest device {change} × mean load"]
    hidden = records.hidden_share("spag")
    if hidden is not None:
        clauses.append(f"{hidden:.0%} of the weights' travel time hidden under compute")
    return clauses


def _waits_ms(run: RecordedRun) -> float:
    """Return the median of the milliseconds in which an iteration's compute waits for transfers."""
    waits = [
        sum(layer.spag_exposed_s + layer.sprs_exposed_s for layer in record.layers) for record in run.metrics
    ]
    return 1e3 * float(np.median(waits))


def _loss_tiles(runs: Sequence[ReportedRun]) -> list[Tile]:
    first = runs[0]
    if len(runs) == 1:
        losses = first.records.losses
        return [Tile("last loss", f"{losses[-1]:.4f}", f"first {losses[0]:.4f}")]
    differences = [loss_differences(first.records, run.records)[1] for run in runs[1:]]
    known = [float(found.max()) for found in differences if len(found) and np.isfinite(found).any()]
    if not known:
        return []
    value = f"{max(known):.1e}" if max(known) else "none"
    return [Tile("largest loss difference", value, f"relative to {first.name}")]


def _load_tiles(runs: Sequence[ReportedRun]) -> list[Tile]:
    measured = [run for run in runs if run.records.layers]
    if not measured:
        return []
    most_even = min(measured, key=lambda run: float(run.records.load_IL.mean()))
    load, plain = float(most_even.records.load_IL.mean()), float(load_before_IL(most_even).mean())
    label = "busiest device / mean load" if len(runs) == 1 else f"most even: {most_even.name}"
    return [Tile(label, f"{load:.2f} ×", f"plain expert parallelism {plain:.2f} ×; 1 is even")]


def _speed_tiles(runs: Sequence[ReportedRun]) -> list[Tile]:
    tiles = []
    for run in runs:
        low, median, high = speed_of(run.records.metrics)
        label = "tokens per second" if len(runs) == 1 else f"tokens per second: {run.name}"
        tiles.append(Tile(label, f"{median:,.0f}", f"median; quartiles {low:,.0f} to {high:,.0f}"))
    return tiles


def _simulated(runs: Sequence[ReportedRun], what_if: SimulationReport) -> str:
    """Return the simulated speed of the runs' strategies over plain expert parallelism as text."""
    names = {run.records.strategy for run in runs}
    rows = [row for row in what_if.ranked if row.label in names and row.outcome is not what_if.plain]
    ratios = [f"{row.label} {what_if.plain_s / what_if.steady_s(row.outcome):.2f} × ep" for row in rows]
    return ", ".join(ratios)


def _transfer_tiles(run: RecordedRun) -> list[Tile]:
    tiles = []
    if run.layers:
        replicas = run.total("num_replicas") / run.load_IL.size
        tiles.append(Tile("replicas per layer", f"{replicas:.1f}", "mean"))
        hidden = run.hidden_share("spag")
        words = "in the whole run" if hidden is None else f"{hidden:.0%} hidden under compute"
        tiles.append(Tile("weights moved (spAG)", format_bytes(run.total("spag_bytes")), words))
    peaks, _ = peak_memory(run)
    if peaks:
        tiles.append(
            Tile("peak memory of a rank", format_memory(max(peaks)), "the rank with the highest peak")
        )
    return tiles
