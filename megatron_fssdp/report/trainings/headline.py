"""The top of a page of runs: one sentence and the most important numbers, computed from the records."""

from collections.abc import Sequence

import numpy as np

from megatron_fssdp.planning.loads import EVEN_LOAD
from megatron_fssdp.records.recorded_run import RecordedRun
from megatron_fssdp.report.page import Tile
from megatron_fssdp.report.simulations.simulation_report import SimulationReport
from megatron_fssdp.report.trainings.measures import largest_difference, replicas_of, speed_of
from megatron_fssdp.report.trainings.shown_run import ShownRun, not_comparable, progress_of
from megatron_fssdp.report.trainings.time_parts import GRADIENTS, WEIGHTS, mean_parts_s
from megatron_fssdp.report.units import format_memory, format_seconds


def headline_of(
    runs: Sequence[ShownRun], what_if: SimulationReport | None = None, *, with_losses: bool = True
) -> tuple[str, list[Tile]]:
    """Return the sentence and the numbers of one run, or of several runs compared with the first."""
    first = runs[0]
    reason = not_comparable([one.run for one in runs])
    if len(runs) == 1:
        clauses = [f"{first.name}: {progress_of(first.run)}", *_clauses(first.run)]
    else:
        clauses = [_against(first, one, with_speed=not reason) for one in runs[1:]]
    clauses += [reason] if reason else []
    tiles = [*(_loss_tiles(runs) if with_losses else ()), *_load_tiles(runs)]
    if not reason:
        tiles += [_speed_tile(one, alone=len(runs) == 1) for one in runs]
    if len(runs) == 1:
        tiles += _transfer_tiles(first.run)
    if what_if is not None and (simulated := _simulated(runs, what_if)):
        clauses.append(f"simulated: {simulated} ({what_if.title})")
        tiles.append(Tile("simulated, not measured", simulated, what_if.title))
    return "; ".join(clauses) + ".", tiles


def peak_memory(run: RecordedRun) -> tuple[tuple[int, ...], str]:
    """Return the last recorded peak of each global rank, in bytes, and the kind of memory; or nothing."""
    found = ((one.rank_peak_bytes, one.rank_memory or "") for one in reversed(run.metrics))
    return next((one for one in found if one[0]), ((), ""))


def _against(first: ShownRun, one: ShownRun, *, with_speed: bool) -> str:
    if not with_speed:
        return f"{one.name}: {'; '.join(_clauses(one.run)) or progress_of(one.run)}"
    (low, median, high), (plain_low, plain, plain_high) = speed_of(one.run), speed_of(first.run)
    speed = f"{one.name} {median / plain:.2f} × {first.name}"
    if low <= plain_high and plain_low <= high:
        speed += " (no clear difference: the quartiles overlap)"
    return "; ".join([speed, *_clauses(one.run)])


def _clauses(run: RecordedRun) -> list[str]:
    """Say how even the loads became, what that costs in waiting time, and whether plain EP would do."""
    if not run.layers:
        return []
    before, after = _mean_loads(run)
    changed = f"{before:.2f} → {after:.2f}" if round(before, 2) != round(after, 2) else f"{after:.2f}"
    clauses = [f"busiest device {changed} × mean load"]
    replicas, most = replicas_of(run)
    if replicas:
        (weights, share), (gradients, other) = (_wait(run, part) for part in (WEIGHTS, GRADIENTS))
        clauses.append(
            f"an iteration waits {weights} for weights (spAG, {share}) and {gradients} for gradients (spRS, "
            f"{other})"
        )
        clauses.append(
            f"{replicas:.3g} replicas a layer" + ("" if most is None else f" of {most:,} possible")
        )
        if most is not None and np.all(run.arrays["num_replicas_IL"] == most):
            clauses.append("every expert is on every device, as without expert parallelism")
    if before <= EVEN_LOAD:
        clauses.append(f"loads are almost even without balancing ({before:.2f}), so plain EP would do")
    return clauses


def _mean_loads(run: RecordedRun) -> tuple[float, float]:
    """Return the mean max/mean device load under plain expert parallelism, and under the placement used."""
    return float(run.arrays["ep_load_max_over_mean_IL"].mean()), float(run.load_IL.mean())


def _wait(run: RecordedRun, part: str) -> tuple[str, str]:
    """Return the seconds in which an iteration waits for transfers, and their share, as text."""
    parts_s = mean_parts_s(run)
    return format_seconds(parts_s[part]), f"{parts_s[part] / max(sum(parts_s.values()), 1e-12):.1%}"


def _loss_tiles(runs: Sequence[ShownRun]) -> list[Tile]:
    losses = runs[0].run.losses
    if len(runs) == 1:
        return [Tile("last loss", f"{losses[-1]:.4f}", f"first {losses[0]:.4f}")]
    found = [largest_difference(runs[0].run, one.run) for one in runs[1:]]
    known = [one for one in found if one is not None and np.isfinite(one)]
    if not known:
        return []
    value = f"{max(known):.1e}" if max(known) else "none"
    return [Tile("largest loss difference", value, f"relative to {runs[0].name}")]


def _load_tiles(runs: Sequence[ShownRun]) -> list[Tile]:
    measured = [one for one in runs if one.run.layers]
    if not measured:
        return []
    most_even = min(measured, key=lambda one: _mean_loads(one.run)[1])
    before, after = _mean_loads(most_even.run)
    label = "busiest device / mean load" if len(runs) == 1 else f"most even: {most_even.name}"
    return [Tile(label, f"{after:.2f} ×", f"under plain expert parallelism {before:.2f} ×; 1 is even")]


def _speed_tile(one: ShownRun, *, alone: bool) -> Tile:
    low, median, high = speed_of(one.run)
    label = "tokens per second" if alone else f"tokens per second: {one.name}"
    return Tile(label, f"{median:,.0f}", f"median; quartiles {low:,.0f} to {high:,.0f}")


def _transfer_tiles(run: RecordedRun) -> list[Tile]:
    tiles = []
    if run.layers:
        for words, part in (("weights (spAG)", WEIGHTS), ("gradients (spRS)", GRADIENTS)):
            seconds, share = _wait(run, part)
            tiles.append(Tile(f"waiting for {words}", seconds, f"{share} of an iteration"))
        replicas, most = replicas_of(run)
        hint = "mean" if most is None else f"mean; {most:,} if every expert were on every device"
        tiles.append(Tile("replicas a layer", f"{replicas:.3g}", hint))
    if peaks := peak_memory(run)[0]:
        tiles.append(
            Tile("peak memory of a rank", format_memory(max(peaks)), "the rank with the highest peak")
        )
    return tiles


def _simulated(runs: Sequence[ShownRun], what_if: SimulationReport) -> str:
    """Return the simulated speed of the runs' strategies over plain expert parallelism as text."""
    names = {one.run.strategy for one in runs}
    rows = [row for row in what_if.ranked if row.label in names and row.outcome is not what_if.plain]
    return ", ".join(
        f"{row.label} {what_if.plain_s / what_if.steady_s(row.outcome):.2f} × ep" for row in rows
    )
