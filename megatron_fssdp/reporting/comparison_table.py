"""Compares runs side by side in a table for the terminal."""

from collections.abc import Sequence

import numpy as np
from rich.table import Table

from megatron_fssdp.reporting.colours import TIME_PARTS
from megatron_fssdp.reporting.records.device_speed import speed_of_devices
from megatron_fssdp.reporting.records.recorded_run import RecordedRun, distinct_names, loss_differences
from megatron_fssdp.reporting.records.run_parts import not_comparable, parts_of, progress_of, speed_text
from megatron_fssdp.reporting.records.run_settings import differing_settings
from megatron_fssdp.reporting.records.time_parts import has_layer_parts, mean_parts_s
from megatron_fssdp.reporting.simulation_report import SimulationReport
from megatron_fssdp.reporting.units import format_bytes

SPEED = "tokens/s: median (quartiles)"


def comparison_table(
    *runs: RecordedRun, with_losses: bool = True, what_if: SimulationReport | None = None
) -> Table:
    """Return a table of losses, device loads, speed and moved bytes.

    Args:
        runs: Records of the runs. Losses are compared with those of the first run, which is usually plain
            expert parallelism.
        with_losses: Whether losses can be compared.
        what_if: Results of a simulation of the runs' loads, or None.
    """
    below = ["load: tokens of the busiest device over those of an average one; 1 is even"]
    below += [sentence for sentence in (not_comparable(runs),) if sentence]
    if what_if is not None:
        below.append(f"simulated, not measured: {what_if.title}")
    table = Table(caption="\n".join(below), caption_justify="left")
    table.add_column("figure", overflow="fold")
    columns, rows = compared_figures(runs, distinct_names(*runs), with_losses=with_losses, what_if=what_if)
    for name in columns:
        table.add_column(name, justify="right", overflow="fold")
    for label, cells in rows.items():
        table.add_row(label, *cells)
    return table


def settings_table(runs: Sequence[RecordedRun]) -> Table | None:
    """Return a table of the settings in which runs differ, or None if they do not differ."""
    differing = differing_settings(runs)
    if not differing:
        return None
    table = Table(title="settings that differ")
    table.add_column("setting", overflow="fold")
    for name in distinct_names(*runs):
        table.add_column(name, overflow="fold")
    for key, values in differing.items():
        table.add_row(key, *values)
    return table


def compared_figures(
    runs: Sequence[RecordedRun],
    names: Sequence[str],
    *,
    with_losses: bool = True,
    what_if: SimulationReport | None = None,
) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
    """Return summary figures of runs as text.

    Args:
        runs: Records of the runs.
        names: Name of each run.
        with_losses: Whether losses can be compared.
        what_if: Results of a simulation of the runs' loads, or None.

    Returns:
        The names of the columns, and the rows: one cell for each run, by the label of the figure.
    """
    columns = [_figures(run) for run in runs]
    if not_comparable(runs):
        for column in columns:
            column[SPEED] = "not comparable"
    if what_if is not None:
        columns = [column | _simulated(run, what_if) for run, column in zip(runs, columns, strict=True)]
    rows = {label: tuple(column.get(label, "–") for column in columns) for label in _merged(columns)}
    if not with_losses:
        rows = {label: cells for label, cells in rows.items() if not label.startswith("loss")}
    elif len(runs) > 1:
        others = tuple(_loss_difference(runs[0], run) for run in runs[1:])
        rows["loss: largest difference"] = ("", *others)
    return tuple(names), rows


def _merged(columns: Sequence[dict[str, str]]) -> list[str]:
    """Return all labels. One that the first run lacks stands where the run that has it shows it."""
    labels: list[str] = []
    for column in columns:
        position = 0
        for label in column:
            if label in labels:
                position = labels.index(label) + 1
            else:
                labels.insert(position, label)
                position += 1
    return labels


def _figures(run: RecordedRun) -> dict[str, str]:
    return {
        "iterations": progress_of(run).replace(" iterations", "").replace(" iteration", ""),
        **_part_figures(run),
        "loss: first": f"{run.losses[0]:.4f}",
        "loss: last": f"{run.losses[-1]:.4f}",
        **_evaluation_figures(run),
        **_load_figures(run),
        SPEED: speed_text(run.metrics),
        **_device_figures(run),
        **_time_figures(run),
        "bytes moved: weights (spAG)": format_bytes(run.total("spag_bytes")),
        "bytes moved: gradients (spRS)": format_bytes(run.total("sprs_bytes")),
        **_node_figures(run),
        **_transfer_figures(run),
        **_reshard_figures(run),
    }


def _evaluation_figures(run: RecordedRun) -> dict[str, str]:
    found = {data: run.last_loss_on(data) for data in ("validation", "test")}
    return {
        f"loss: {data} (after iteration)": f"{one.loss:.4f} ({one.iteration:,})"
        for data, one in found.items()
        if one is not None
    }


def _device_figures(run: RecordedRun) -> dict[str, str]:
    speed = speed_of_devices(run)
    return {} if speed is None else {"TFLOP/s of a device: median": speed.text}


def _time_figures(run: RecordedRun) -> dict[str, str]:
    """Return the mean milliseconds of an iteration's parts, if the run measured those of its layers."""
    if not has_layer_parts(run):
        return {}
    return {
        f"ms of an iteration: {TIME_PARTS[part].name}": f"{1e3 * seconds:.4g}"
        for part, seconds in mean_parts_s(run).items()
        if seconds
    }


def _part_figures(run: RecordedRun) -> dict[str, str]:
    parts = parts_of(run)
    if len(parts) == 1:
        return {}
    return {"parts": ", ".join(f"{part.first}–{part.last} {part.strategy}" for part in parts)}


def _simulated(run: RecordedRun, what_if: SimulationReport) -> dict[str, str]:
    seconds = [what_if.steady_s(row.outcome) for row in what_if.rows if row.label == run.strategy]
    if not seconds:
        return {}
    return {
        "simulated: ms of an iteration": f"{1e3 * seconds[0]:.4g}",
        "simulated: speed, × ep": f"{what_if.plain_s / seconds[0]:.2f}",
    }


def _node_figures(run: RecordedRun) -> dict[str, str]:
    """Return the tokens that crossed nodes, if there was more than one node (real or declared)."""
    crossed = run.total("cross_node_tokens")
    return {"tokens sent to other nodes (also declared ones)": f"{crossed:,}"} if crossed else {}


def _transfer_figures(run: RecordedRun) -> dict[str, str]:
    shares = {
        "hidden under compute: weights (spAG)": run.hidden_share("spag"),
        "hidden under compute: gradients (spRS)": run.hidden_share("sprs"),
    }
    return {label: f"{share:.0%}" for label, share in shares.items() if share is not None}


def _reshard_figures(run: RecordedRun) -> dict[str, str]:
    if not run.reshards:
        return {}
    return {
        "re-shards": str(len(run.reshards)),
        "re-shards: experts moved": f"{sum(record.resharded_experts for record in run.reshards):,}",
        "re-shards: bytes moved": format_bytes(sum(record.reshard_bytes for record in run.reshards)),
        "re-shards: seconds": f"{sum(record.reshard_s for record in run.reshards):.2f}",
    }


def _load_figures(run: RecordedRun) -> dict[str, str]:
    figures = {
        "load: mean of all iterations and layers": "–",
        "load: last iteration": "–",
        "load: worst layer of the run": "–",
        "replicas per layer": "–",
    }
    if run.layers:
        replicas = run.total("num_replicas") / run.load_IL.size
        values = (run.load_IL.mean(), run.load_IL[-1].mean(), run.load_IL.max())
        figures |= dict(zip(figures, [f"{value:.3f}" for value in values] + [f"{replicas:.1f}"], strict=True))
    for label, field in (
        ("share of load on the same experts as one iteration before (median)", "load_similarity"),
        ("evenness: spread of device loads under plain EP / here (median)", "balance_ratio"),
    ):
        if (median := run.median(field)) is not None:
            figures[label] = f"{median:.2f}"
    return figures


def _loss_difference(first: RecordedRun, second: RecordedRun) -> str:
    common, difference = loss_differences(first, second)
    return f"{np.max(difference):.1e} relative" if len(common) else "no common iteration"
