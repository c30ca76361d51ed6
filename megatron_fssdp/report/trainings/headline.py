"""The sentence at the top of a page of runs, computed from the records."""

from collections.abc import Sequence

import numpy as np

from megatron_fssdp.planning.loads import EVEN_LOAD
from megatron_fssdp.records.recorded_run import RecordedRun
from megatron_fssdp.report.simulations.simulation_report import SimulationReport
from megatron_fssdp.report.trainings.measures import largest_difference, replicas_of, speed_of
from megatron_fssdp.report.trainings.shown_run import ShownRun, not_comparable, progress_of
from megatron_fssdp.report.trainings.time_parts import GRADIENTS, WEIGHTS, mean_parts_s
from megatron_fssdp.report.units import format_memory, format_seconds

_MOST_EXPLAINED = 3
"""More runs than these have only their speed and loads in the sentence."""


def headline_of(
    runs: Sequence[ShownRun], what_if: SimulationReport | None = None, *, with_losses: bool = True
) -> str:
    """Return the result of one run, or of several runs compared with the first, in one sentence."""
    first, reason = runs[0], not_comparable(runs)
    if len(runs) == 1:
        run, speed = first.run, speed_of(first)
        clauses = [f"{first.name}: {progress_of(run)}", *_clauses(run)]
        clauses.append(f"loss {run.losses[0]:.4f} → {run.losses[-1]:.4f}")
        if not reason:
            quartiles = f"{speed.low:,.0f} to {speed.high:,.0f}"
            clauses.append(f"median {speed.median:,.0f} tokens/s (quartiles {quartiles})")
        if peaks := peak_memory(run)[0]:
            clauses.append(f"peak memory of a rank {format_memory(max(peaks))}")
    else:
        most = None if len(runs) <= _MOST_EXPLAINED else 1
        clauses = [_against(first, one, most, with_speed=not reason) for one in runs[1:]]
        differences = [largest_difference(first.run, one.run) for one in runs[1:]] if with_losses else []
        if known := [one for one in differences if one is not None and np.isfinite(one)]:
            largest = max(known)
            clauses.append(
                f"losses differ by at most {largest:.1e}" if largest else "losses are exactly equal"
            )
    clauses += [reason] if reason else []
    if what_if is not None:
        names = {one.run.strategy for one in runs}
        simulated = [
            f"{row.label} {what_if.plain_s / what_if.steady_s(row.outcome):.2f} × ep"
            for row in what_if.ranked
            if row.label in names and row.outcome is not what_if.plain
        ]
        clauses += [f"simulated: {', '.join(simulated)} ({what_if.title})"] if simulated else []
    return "; ".join(clauses) + "."


def peak_memory(run: RecordedRun) -> tuple[tuple[int, ...], str]:
    """Return the last recorded peak of each global rank, in bytes, and the kind of memory; or nothing."""
    found = ((one.rank_peak_bytes, one.rank_memory or "") for one in reversed(run.metrics))
    return next((one for one in found if one[0]), ((), ""))


def _against(first: ShownRun, one: ShownRun, most: int | None, *, with_speed: bool) -> str:
    """Compare a run with the first. ``most`` is the number of clauses on its loads, or None for all."""
    clauses = _clauses(one.run)[:most]
    if not with_speed:
        return f"{one.name}: {'; '.join(clauses) or progress_of(one.run)}"
    speed, plain = speed_of(one), speed_of(first)
    words = f"{one.name} {speed.median / plain.median:.2f} × {first.name}"
    if 1 in (len(first.run.metrics), len(one.run.metrics)):
        words += " (a single iteration, which also allocates, says little)"
    elif speed.low <= plain.high and plain.low <= speed.high:
        words += " (no clear difference: the quartiles overlap)"
    return "; ".join([words, *clauses])


def _clauses(run: RecordedRun) -> list[str]:
    """Say how even the loads became, what that costs in waiting time, and whether plain EP would do."""
    if not run.layers:
        return []
    before, after = float(run.arrays["ep_load_max_over_mean_IL"].mean()), float(run.load_IL.mean())
    changed = f"{before:.2f} → {after:.2f}" if round(before, 2) != round(after, 2) else f"{after:.2f}"
    clauses = [f"busiest device {changed} × mean load"]
    replicas, most = replicas_of(run)
    if replicas:
        parts_s = mean_parts_s(run)
        whole_s = max(sum(parts_s.values()), 1e-12)
        weights, gradients = (
            (format_seconds(parts_s[part]), f"{parts_s[part] / whole_s:.1%}") for part in (WEIGHTS, GRADIENTS)
        )
        clauses.append(
            f"an iteration waits {weights[0]} for weights (spAG, {weights[1]}) and {gradients[0]} for "
            f"gradients (spRS, {gradients[1]})"
        )
        possible = "" if most is None else f" of {most:,} possible"
        clauses.append(f"{replicas:.3g} replicas a layer{possible}")
        if most is not None and np.all(run.arrays["num_replicas_IL"] == most):
            clauses.append("every expert is on every device, as without expert parallelism")
    if before <= EVEN_LOAD:
        clauses.append(f"loads are almost even without balancing ({before:.2f}), so plain EP would do")
    return clauses
