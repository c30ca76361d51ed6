"""The figures of recorded runs, side by side in a table and as JSON, and the differences of losses."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from megatron_fssdp.records.recorded_run import RecordedRun
from megatron_fssdp.report.colours import TIME_PARTS
from megatron_fssdp.report.simulations.simulation_report import SimulationReport
from megatron_fssdp.report.tables import Table
from megatron_fssdp.report.trainings.shown_run import ShownRun, not_comparable, progress_of
from megatron_fssdp.report.trainings.time_parts import has_layer_parts, mean_parts_s
from megatron_fssdp.report.units import format_bytes, format_flops


class Measure(NamedTuple):
    """One figure of a run: name in JSON, name and unit in tables, value, and the value as text."""

    key: str
    label: str
    value: Any
    text: str


class Spread(NamedTuple):
    """Lower quartile, median and upper quartile of a figure, interpolated linearly."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Any) -> "Spread":
        """Return the spread of at least one number."""
        return cls(*map(float, np.quantile(values, (0.25, 0.5, 0.75))))

    def overlaps(self, other: "Spread") -> bool:
        """Whether the ranges between the quartiles of two figures have a common value."""
        return self.low <= other.high and other.low <= self.high

    def text(self, form: str) -> str:
        """Return the spread as text, with each number in a format such as ``.2f``."""
        low, median, high = (f"{value:{form}}" for value in self)
        return f"{median} ({low} to {high})"


def comparison_table(
    runs: Sequence[ShownRun], *, with_losses: bool = True, what_if: SimulationReport | None = None
) -> Table:
    """Return all figures of runs side by side. Losses are compared with those of the first run."""
    obstacle = not_comparable([one.run for one in runs])
    columns = []
    for one in runs:
        found = {measure.label: measure.text for measure in measures_of(one.run, what_if)}
        if obstacle:
            found |= {label: "not comparable" for label in found if label.startswith("tokens/s")}
        columns.append(found)
    labels = list(dict.fromkeys(label for column in sorted(columns, key=len)[::-1] for label in column))
    rows = [(label, *(found.get(label, "–") for found in columns)) for label in labels]
    if not with_losses:
        rows = [row for row in rows if not row[0].startswith("loss")]
    elif len(runs) > 1:
        differences = [largest_difference(runs[0].run, one.run) for one in runs[1:]]
        texts = ["no common iteration" if one is None else f"{one:.1e} relative" for one in differences]
        rows.append(("loss: largest difference", "", *texts))
    return Table(("", *(one.name for one in runs)), tuple(rows))


def measures_of(run: RecordedRun, what_if: SimulationReport | None = None) -> list[Measure]:
    """Return the figures of one run. What it did not record is left out."""
    iterations = progress_of(run).replace(" iterations", "")
    found = [Measure("iterations", "iterations", len(run.metrics), iterations)]
    found += [*_losses(run), *(_loads(run) if run.layers else ()), *_speeds(run), *_transfers(run)]
    for row in what_if.rows if what_if is not None else ():
        if what_if is not None and row.label == run.strategy:
            seconds = what_if.steady_s(row.outcome)
            found += [
                _number("simulated_iteration_s", "simulated: ms of an iteration", seconds, ".4g", 1e3),
                _number("simulated_speedup", "simulated: speed, × ep", what_if.plain_s / seconds, ".2f"),
            ]
    return found


def _number(key: str, label: str, value: float, form: str, factor: float = 1.0) -> Measure:
    return Measure(key, label, value, f"{factor * value:{form}}")


def _losses(run: RecordedRun) -> list[Measure]:
    found = [
        _number("first_loss", "loss: first", float(run.losses[0]), ".4f"),
        _number("last_loss", "loss: last", float(run.losses[-1]), ".4f"),
    ]
    for data in ("validation", "test"):
        last = next((one for one in reversed(run.evaluations) if one.data.startswith(data)), None)
        if last is not None:
            text = f"{last.loss:.4f} ({last.iteration:,})"
            found.append(Measure(f"{data}_loss", f"loss: {data} (after iteration)", last.loss, text))
    return found


def _loads(run: RecordedRun) -> list[Measure]:
    load_IL, plain = run.load_IL, float(run.arrays["ep_load_max_over_mean_IL"].mean())
    replicas, most = replicas_of(run)
    text = f"{replicas:.1f}" if most is None else f"{replicas:.1f} of {most:,} possible"
    found = [
        _number("ep_load_max_over_mean", "load: under plain EP, mean", plain, ".3f"),
        _number("load_max_over_mean", "load: mean of iterations and layers", float(load_IL.mean()), ".3f"),
        _number("last_load", "load: last iteration", float(load_IL[-1].mean()), ".3f"),
        _number("worst_load", "load: worst layer of the run", float(load_IL.max()), ".3f"),
        Measure("replicas_per_layer", "replicas per layer", replicas, text),
    ]
    for key, label in (
        ("load_similarity", "share of load on the same experts as one iteration before (median)"),
        ("balance_ratio", "evenness: spread of device loads under plain EP / here (median)"),
    ):
        if np.isfinite(values_IL := run.arrays[f"{key}_IL"]).any():
            found.append(_number(key, label, float(np.nanmedian(values_IL)), ".2f"))
    return found


def replicas_of(run: RecordedRun) -> tuple[float, int | None]:
    """Return the mean number of replicas of a layer, and the largest possible number if it is known."""
    mean = float(run.arrays["num_replicas_IL"].mean())
    return mean, None if run.placements is None else run.placements.most_replicas


def _speeds(run: RecordedRun) -> list[Measure]:
    speed = speed_of(run)
    found = [Measure("tokens_per_s", "tokens/s: median (quartiles)", speed.median, speed.text(",.0f"))]
    session, flops_I, seconds_I = run.session, run.arrays["flops_I"], run.arrays["iteration_s_I"]
    known_I = (flops_I > 0) & (seconds_I > 0)
    if session is not None and session.devices and known_I.any():
        rate = float(np.median(flops_I[known_I] / seconds_I[known_I])) / session.devices
        shared = f" ({session.shared_cores})" if session.shared_cores else ""
        text = f"{format_flops(rate)}{shared}"
        found.append(Measure("flops_per_s_per_device", "compute of a device: median", rate, text))
    if has_layer_parts(run):
        for part, seconds in mean_parts_s(run).items():
            if seconds:
                key = f"{part.replace(' ', '_').replace('-', '_')}_s"
                label = f"ms of an iteration: {TIME_PARTS[part].name}"
                found.append(_number(key, label, seconds, ".4g", 1e3))
    return found


def speed_of(run: RecordedRun) -> Spread:
    """Return the median and the quartiles of tokens per second."""
    return Spread.of(run.arrays["tokens_per_s_I"])


def _transfers(run: RecordedRun) -> list[Measure]:
    found = []
    for key, words in (("spag", "weights (spAG)"), ("sprs", "gradients (spRS)")):
        moved, busy_s = run.total(f"{key}_bytes"), run.total(f"{key}_s")
        found.append(Measure(f"{key}_bytes", f"bytes moved: {words}", moved, format_bytes(moved)))
        if busy_s:
            hidden = 1 - run.total(f"{key}_exposed_s") / busy_s
            found.append(_number(f"{key}_hidden_share", f"hidden under compute: {words}", hidden, ".0%"))
    if crossed := int(run.total("cross_node_tokens")):
        label = "tokens sent to other nodes (also declared ones)"
        found.append(Measure("cross_node_tokens", label, crossed, f"{crossed:,}"))
    if times := int((run.arrays["resharded_experts_I"] > 0).sum()):
        experts, moved, seconds = (
            float(run.arrays[f"{name}_I"].sum())
            for name in ("resharded_experts", "reshard_bytes", "reshard_s")
        )
        text = f"{times}: {experts:,.0f} experts, {format_bytes(moved)}, {seconds:.2f} s"
        found.append(Measure("reshards", "re-shards: moved experts, bytes, seconds", times, text))
    return found


def largest_difference(first: RecordedRun, second: RecordedRun) -> float | None:
    """Return the largest relative difference |a - b| / |a| of two runs' losses in common iterations.

    It is None without a common iteration.
    """
    _, at_first, at_second = np.intersect1d(first.iterations, second.iterations, return_indices=True)
    if not len(at_first):
        return None
    one, other = first.losses[at_first], second.losses[at_second]
    return float(np.max(np.abs(one - other) / np.maximum(np.abs(one), np.finfo(np.float64).tiny)))
