"""Compares runs side by side in a table for the terminal."""

from collections.abc import Sequence

import numpy as np
from rich.table import Table

from megatron_fssdp.reporting.recorded_run import RecordedRun, distinct_names, loss_differences
from megatron_fssdp.reporting.units import format_bytes


def comparison_table(*runs: RecordedRun) -> Table:
    """Return a table of losses, device loads, speed and moved bytes.

    Args:
        runs: Records of the runs. Losses are compared with those of the first run, which is usually plain
            expert parallelism.
    """
    table = Table(title="load: max/mean device load; 1 is even")
    table.add_column("")
    columns, rows = compared_figures(runs, distinct_names(*runs))
    for name in columns:
        table.add_column(name, justify="right")
    for label, cells in rows.items():
        table.add_row(label, *cells)
    return table


def compared_figures(
    runs: Sequence[RecordedRun], names: Sequence[str]
) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
    """Return summary figures of runs as text.

    Args:
        runs: Records of the runs.
        names: Name of each run.

    Returns:
        The names of the columns, and the rows: one cell for each run, by the label of the figure.
    """
    columns = [_figures(run) for run in runs]
    labels = dict.fromkeys(label for column in columns for label in column)
    rows = {label: tuple(column.get(label, "–") for column in columns) for label in labels}
    if len(runs) > 1:
        others = tuple(_loss_difference(runs[0], run) for run in runs[1:])
        rows["loss: largest difference"] = ("", *others)
    return tuple(names), rows


def _figures(run: RecordedRun) -> dict[str, str]:
    return {
        "iterations": str(len(run.metrics)),
        "loss: first": f"{run.losses[0]:.4f}",
        "loss: last": f"{run.losses[-1]:.4f}",
        **_load_figures(run),
        "tokens/s (median)": f"{run.median_tokens_per_s:,.0f}",
        "bytes moved: weights (spAG)": format_bytes(run.total("spag_bytes")),
        "bytes moved: gradients (spRS)": format_bytes(run.total("sprs_bytes")),
        "tokens sent to other nodes": f"{run.total('cross_node_tokens'):,}" if run.layers else "–",
        **_transfer_figures(run),
        **_reshard_figures(run),
    }


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
        ("similarity of loads to the previous iteration (median)", "load_similarity"),
        ("RB: deviation of device loads, plain EP / own (median)", "balance_ratio"),
    ):
        if (median := run.median(field)) is not None:
            figures[label] = f"{median:.2f}"
    return figures


def _loss_difference(first: RecordedRun, second: RecordedRun) -> str:
    common, difference = loss_differences(first, second)
    return f"{np.max(difference):.1e} relative" if len(common) else "no common iteration"
