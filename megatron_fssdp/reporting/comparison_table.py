"""Two runs side by side, as a table for the terminal."""

import numpy as np
from rich.table import Table

from megatron_fssdp.reporting.recorded_run import RecordedRun, distinct_names


def comparison_table(first: RecordedRun, second: RecordedRun) -> Table:
    """Tabulate losses, device loads, speed and bytes moved.

    Args:
        first: A run, usually plain expert parallelism.
        second: The run to compare with it.

    Returns:
        The table.
    """
    table = Table(title="load: max over mean device load, 1 is even")
    table.add_column("")
    for name in distinct_names(first, second):
        table.add_column(name, justify="right")
    columns = [_figures(run) for run in (first, second)]
    for label in dict.fromkeys(label for column in columns for label in column):
        table.add_row(label, *(column.get(label, "–") for column in columns))
    table.add_row("loss: largest difference", "", _loss_difference(first, second))
    return table


def _figures(run: RecordedRun) -> dict[str, str]:
    return {
        "iterations": str(len(run.metrics)),
        "loss: first": f"{run.losses[0]:.4f}",
        "loss: last": f"{run.losses[-1]:.4f}",
        **_load_figures(run),
        "tokens/s (median)": f"{run.median_tokens_per_s:,.0f}",
        "bytes moved: weights (spAG)": format_bytes(run.total("spag_bytes")),
        "bytes moved: gradients (spRS)": format_bytes(run.total("sprs_bytes")),
        "tokens sent to another node": f"{run.total('cross_node_tokens'):,}" if run.layers else "–",
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
        "replicas in a layer": "–",
    }
    if run.layers:
        replicas = run.total("num_replicas") / run.load_IL.size
        values = (run.load_IL.mean(), run.load_IL[-1].mean(), run.load_IL.max())
        figures |= dict(zip(figures, [f"{value:.3f}" for value in values] + [f"{replicas:.1f}"], strict=True))
    for label, field in (
        ("loads like those of the iteration before (median)", "load_similarity"),
        ("RB: deviation of loads, EP's over its own (median)", "balance_ratio"),
    ):
        if (median := run.median(field)) is not None:
            figures[label] = f"{median:.2f}"
    return figures


def format_bytes(num_bytes: float) -> str:
    """Bytes in the largest decimal unit that leaves a number of 1 or more."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(num_bytes) < 1000:
            return f"{num_bytes:,.0f} {unit}" if unit == "B" else f"{num_bytes:,.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.1f} TB"


def _loss_difference(first: RecordedRun, second: RecordedRun) -> str:
    _, at_first, at_second = np.intersect1d(first.iterations, second.iterations, return_indices=True)
    if len(at_first) == 0:
        return "no common iteration"
    one, other = first.losses[at_first], second.losses[at_second]
    return f"{np.max(np.abs(one - other) / np.abs(one)):.1e} relative"
