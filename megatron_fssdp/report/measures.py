"""Recorded runs on a page: their names, colours and progress, and their figures side by side and as JSON.

Shape letters: I iterations, L MoE layers.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_fssdp.records.metrics import METRICS_FILE
from megatron_fssdp.records.recorded_run import RecordedRun, load
from megatron_fssdp.records.run_settings import loss_obstacle
from megatron_fssdp.report.colours import TIME_PARTS, column_name, distinct_colours
from megatron_fssdp.report.page import Table
from megatron_fssdp.report.units import format_bytes, format_flops, format_memory

WEIGHTS, GRADIENTS = "waiting for spAG", "waiting for spRS"  # keys of TIME_PARTS
_STILL_RUNNING_S = 120.0  # a run with a younger record still trains: most iterations take less time


@dataclass(frozen=True, eq=False)
class ShownRun:
    """A recorded run on a page."""

    name: str
    colour: str  # of its lines and bars, #RRGGBB
    run: RecordedRun


def shown_runs(paths: Sequence[Path]) -> list[ShownRun]:
    """Read runs for one page, or raise a ConfigurationError.

    Their names are strategies, folders' names or paths: the first of these that differ.
    """
    runs = [load(path) for path in paths]
    strategies = [run.strategy for run in runs]
    choices = (strategies, [path.resolve().name for path in paths], [str(path) for path in paths])
    names = next((choice for choice in choices if len(set(choice)) == len(runs)), choices[-1])
    return [ShownRun(*fields) for fields in zip(names, distinct_colours(strategies), runs, strict=True)]


def progress_of(run: RecordedRun) -> str:
    """Return how much of a run is recorded, such as ``5 of 400 iterations, interrupted``."""
    first, last, count = int(run.iterations[0]), int(run.iterations[-1]), len(run.iterations)
    asked, words = run.asked_iterations, counted(count, "iteration")
    if asked is not None and last < asked:
        age_s = time.time() - (run.path / METRICS_FILE).stat().st_mtime
        is_stopped = any(stop.startswith(f"{last}:") for stop in run.stops)
        state = "so far" if age_s < _STILL_RUNNING_S and not is_stopped else "interrupted"
        words = f"{count:,} of {asked - first + 1:,} iterations, {state}"
    if first > 1:
        words += f", from iteration {first:,} on"
    if missing := last - first + 1 - count:
        words += f", {missing:,} missing between them"
    return words


def counted(number: int, noun: str) -> str:
    """Return a number of things as text, such as ``2 layers``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def not_comparable(runs: Sequence[ShownRun]) -> str:
    """Return a clause on why the speed of runs must not be compared. Empty if it may be."""
    records = [record for shown in runs for record in shown.run.metrics]
    sessions = [record.session for record in records if record.session is not None]
    shared = next((session.shared_cores for session in sessions if session.shared_cores), "")
    return f"speed is not comparable here: {shared}" if shared else ""


def losses_differ_because(runs: Sequence[ShownRun]) -> str:
    """Return why the losses of runs say nothing of each other. Empty if they can be compared."""
    return loss_obstacle([shown.run.settings for shown in runs])


class Measure(NamedTuple):
    """One figure of a run."""

    key: str  # its name in JSON
    label: str  # name and unit in tables
    value: Any
    text: str


def comparison_table(runs: Sequence[ShownRun]) -> Table:
    """Return all figures of runs side by side, compared with the first; without losses of unlike runs."""
    first = runs[0].run
    columns = [{measure.label: measure.text for measure in measures_of(shown.run, first)} for shown in runs]
    for column in columns if not_comparable(runs) else ():
        column.update({label: "not comparable" for label in column if label.startswith("tokens/s")})
    labels = list(dict.fromkeys(label for column in sorted(columns, key=len)[::-1] for label in column))
    if losses_differ_because(runs):
        labels = [label for label in labels if not label.startswith("loss")]
    rows = [(label, *(column.get(label, "–") for column in columns)) for label in labels]
    return Table(("", *(shown.name for shown in runs)), tuple(rows))


def measures_of(run: RecordedRun, first: RecordedRun | None = None) -> Iterator[Measure]:
    """Yield the figures of one run. Its losses are compared with those of the ``first``, if it is another.

    What the run did not record is left out.
    """
    iterations = progress_of(run).replace(" iterations", "")
    yield Measure("iterations", "iterations", len(run.metrics), iterations)
    for which, loss in (("first", float(run.losses[0])), ("last", float(run.losses[-1]))):
        yield Measure(f"{which}_loss", f"loss: {which}", loss, f"{loss:.4f}")
    if first not in (None, run):
        difference = largest_difference(first, run)
        text = "no common iteration" if difference is None else f"{difference:.1e} relative"
        yield Measure("largest_loss_difference", "loss: largest difference", difference, text)
    if run.layers:
        yield from _loads(run)
    low, median, high = speed_of(run)
    text = f"{median:,.0f} ({low:,.0f} to {high:,.0f})"
    yield Measure("tokens_per_s", "tokens/s: median (quartiles)", median, text)
    session, flops_I, seconds_I = run.session, run.arrays["flops_I"], run.arrays["iteration_s_I"]
    known_I = (flops_I > 0) & (seconds_I > 0)
    if session is not None and session.devices and known_I.any():
        rate = float(np.median(flops_I[known_I] / seconds_I[known_I])) / session.devices
        text = format_flops(rate) + (f" ({session.shared_cores})" if session.shared_cores else "")
        yield Measure("flops_per_s_per_device", "compute of a device: median", rate, text)
    if peaks := peak_memory(run):
        sizes = f"{format_memory(min(peaks))} to {format_memory(max(peaks))}"
        yield Measure("peak_memory_bytes", "peak memory: of all ranks", max(peaks), sizes)
    for part, seconds in mean_parts_s(run).items() if has_layer_parts(run) else ():
        if seconds:
            label = f"ms of an iteration: {TIME_PARTS[part].name}"
            yield Measure(column_name(part), label, seconds, f"{1e3 * seconds:.4g}")

    def total(name: str) -> float:
        return float(run.arrays[name].sum())

    for key, words in (("spag", "weights (spAG)"), ("sprs", "gradients (spRS)")):
        moved = total(f"{key}_bytes_IL")
        yield Measure(f"{key}_bytes", f"bytes moved: {words}", moved, format_bytes(moved))
        if busy_s := total(f"{key}_s_IL"):
            hidden = 1 - total(f"{key}_exposed_s_IL") / busy_s
            yield Measure(f"{key}_hidden_share", f"hidden under compute: {words}", hidden, f"{hidden:.0%}")
    if crossed := int(total("cross_node_tokens_IL")):
        label = "tokens sent to other nodes (also declared ones)"
        yield Measure("cross_node_tokens", label, crossed, f"{crossed:,}")
    if times := int((run.arrays["resharded_experts_I"] > 0).sum()):
        experts, moved = total("resharded_experts_I"), total("reshard_bytes_I")
        text = f"{times}: {experts:,.0f}, {format_bytes(moved)}, {total('reshard_s_I'):.2f} s"
        yield Measure("reshards", "re-shards: moved experts, bytes, seconds", times, text)


def _loads(run: RecordedRun) -> Iterator[Measure]:
    load_IL, plain_IL = run.load_IL, run.arrays["ep_load_max_over_mean_IL"]
    replicas, most = replicas_of(run)
    figures = [
        ("ep_load_max_over_mean", "load: under plain EP, mean", plain_IL.mean(), ".3f"),
        ("load_max_over_mean", "load: mean of iterations and layers", load_IL.mean(), ".3f"),
        ("last_load", "load: last iteration", load_IL[-1].mean(), ".3f"),
        ("worst_load", "load: worst layer of the run", load_IL.max(), ".3f"),
    ]
    for key, label in (
        ("load_similarity", "share of load on the same experts as one iteration before (median)"),
        ("balance_ratio", "spread of device loads: under plain EP over here (median)"),
    ):
        if np.isfinite(values_IL := run.arrays[f"{key}_IL"]).any():
            figures.append((key, label, np.nanmedian(values_IL), ".2f"))
    for key, label, value, form in figures:
        yield Measure(key, label, float(value), f"{value:{form}}")
    text = f"{replicas:.1f}" if most is None else f"{replicas:.1f} of {most:,} possible"
    yield Measure("replicas_per_layer", "replicas per layer", replicas, text)


def replicas_of(run: RecordedRun) -> tuple[float, int | None]:
    """Return the mean number of replicas of a layer, and the largest possible number if it is known."""
    mean = float(run.arrays["num_replicas_IL"].mean())
    return mean, None if run.placements is None else run.placements.most_replicas


def peak_memory(run: RecordedRun) -> tuple[int, ...]:
    """Return the last recorded peak of each global rank, in bytes; nothing if there is none."""
    peaks = (metrics.rank_peak_bytes for metrics in reversed(run.metrics))
    return next(filter(None, peaks), ())


def speed_of(run: RecordedRun) -> tuple[float, float, float]:
    """Return lower quartile, median and upper quartile of a run's tokens/s."""
    low, median, high = np.quantile(run.arrays["tokens_per_s_I"], (0.25, 0.5, 0.75)).tolist()
    return low, median, high


def largest_difference(first: RecordedRun, second: RecordedRun) -> float | None:
    """Return the largest |a - b| / |a| of two runs' losses in common iterations, or None without any."""
    _, at_first, at_second = np.intersect1d(first.iterations, second.iterations, return_indices=True)
    if not len(at_first):
        return None
    a_I, b_I = first.losses[at_first], second.losses[at_second]
    return float(np.max(np.abs(a_I - b_I) / np.maximum(np.abs(a_I), np.finfo(np.float64).tiny)))


def time_parts(run: RecordedRun) -> dict[str, NDArray[np.float64]]:
    """Divide the seconds of each iteration into parts, float64 ``[I]`` by the keys of ``TIME_PARTS``.

    As in the simulator, the experts' seconds are those of the slowest rank, and the all-to-alls do not
    include the wait for it. Unrecorded parts of layers are in ``passes``, unrecorded passes in ``rest``.
    """
    whole_I, recorded_I = run.arrays["iteration_s_I"], run.arrays["passes_s_I"]
    reshard_I = np.minimum(whole_I, run.arrays["reshard_s_I"])
    passes_I = np.where(recorded_I > 0, recorded_I, whole_I - reshard_I)
    slowest_I, mean_I = _passes_I(run, "experts_slowest"), _passes_I(run, "experts")
    moved_I = _passes_I(run, "dispatch") + _passes_I(run, "combine")
    inside = {
        "other compute": _passes_I(run, "other"),
        "experts": slowest_I,
        "all-to-all": np.maximum(0.0, moved_I - (slowest_I - mean_I)),
        WEIGHTS: run.arrays["spag_exposed_s_IL"].sum(axis=1),
        GRADIENTS: run.arrays["sprs_exposed_s_IL"].sum(axis=1),
    }
    # Several pipeline stages work at the same time, so the sum over their layers can exceed the passes.
    total_I = np.sum(list(inside.values()), axis=0)
    share_I = np.minimum(1.0, passes_I / np.maximum(total_I, 1e-12))
    inside = {part: share_I * seconds_I for part, seconds_I in inside.items()}
    left_I = np.where(recorded_I > 0, np.maximum(passes_I - share_I * total_I, 0.0), 0.0)
    has_parts_I = np.isfinite(run.arrays["forward_other_s_IL"]).any(axis=1)
    parts = {
        "passes": np.where(has_parts_I, 0.0, left_I),
        "outside": np.where(has_parts_I, left_I, 0.0),
        **inside,
        "re-sharding": reshard_I,
    }
    return {**parts, "rest": np.maximum(whole_I - np.sum(list(parts.values()), axis=0), 0.0)}


def mean_parts_s(run: RecordedRun) -> dict[str, float]:
    """Return the mean seconds of an iteration's parts, without the first, which also allocates."""
    first = min(1, len(run.metrics) - 1)
    return {part: float(seconds_I[first:].mean()) for part, seconds_I in time_parts(run).items()}


def has_layer_parts(run: RecordedRun) -> bool:
    """Whether a run has measured the parts of its layers' passes."""
    return bool(np.isfinite(run.arrays["forward_other_s_IL"]).any())


def _passes_I(run: RecordedRun, part: str) -> NDArray[np.float64]:
    """Sum a part of all layers' forward and backward passes."""
    both = [run.arrays[f"{which}_{part}_s_IL"] for which in ("forward", "backward")]
    return np.nansum(both, axis=(0, 2))
