"""The most important numbers of a page, and the section with all figures."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_fssdp.reporting.comparison_table import compared_figures
from megatron_fssdp.reporting.page.device_load_section import load_before_IL
from megatron_fssdp.reporting.page.memory_section import peak_memory
from megatron_fssdp.reporting.page.reported_run import ReportedRun
from megatron_fssdp.reporting.page.section import Section, Table
from megatron_fssdp.reporting.recorded_run import loss_differences
from megatron_fssdp.reporting.units import format_bytes, format_memory


@dataclass(frozen=True)
class Tile:
    """One large number at the top of the page.

    Attributes:
        label: Name of the number.
        value: The number with its unit.
        hint: Another number to compare it with, or an explanation.
    """

    label: str
    value: str
    hint: str = ""


def tiles_of(runs: Sequence[ReportedRun]) -> tuple[Tile, ...]:
    """Return the large numbers of one run, or those that compare several runs.

    Args:
        runs: Runs of the page.
    """
    return _tiles_of_one(runs[0]) if len(runs) == 1 else _tiles_of_several(runs)


def overview_section(runs: Sequence[ReportedRun]) -> Section:
    """Make the section with the same table that the terminal shows.

    Args:
        runs: Runs of the page.
    """
    columns, rows = compared_figures([run.records for run in runs], [run.name for run in runs])
    table = Table(("", *columns), tuple((label, *cells) for label, cells in rows.items()))
    lead = "Figures are of the whole run unless stated otherwise. Load: max/mean device load; 1 is even."
    return Section("figures", "All figures", lead, table=table)


def model_line(run: ReportedRun) -> str:
    """Return one line with the numbers of iterations, layers, experts and devices of a run."""
    words = [_counted(len(run.records.metrics), "iteration")]
    if run.records.layers:
        words.append(_counted(len(run.records.layers), "MoE layer"))
    if run.loads is not None:
        words.append(_counted(run.loads.counts_ILDE.shape[3], "expert"))
        words.append(_counted(run.loads.counts_ILDE.shape[2], "device"))
    return ", ".join(words)


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _tiles_of_one(run: ReportedRun) -> tuple[Tile, ...]:
    records = run.records
    tiles = [
        Tile("last loss", f"{records.losses[-1]:.4f}", f"first {records.losses[0]:.4f}"),
        Tile("tokens per second", f"{records.median_tokens_per_s:,.0f}", "median of all iterations"),
    ]
    if records.layers:
        before = float(load_before_IL(run).mean())
        tiles += [
            Tile("device load, max / mean", f"{records.load_IL.mean():.2f} ×", f"plain EP {before:.2f} ×"),
            Tile(
                "replicas per layer",
                f"{records.total('num_replicas') / records.load_IL.size:.1f}",
                "mean",
            ),
            Tile(
                "weights moved (spAG)",
                format_bytes(records.total("spag_bytes")),
                _hidden(records.hidden_share("spag")),
            ),
        ]
    peaks, _ = peak_memory(records)
    if peaks:
        tiles.append(
            Tile("peak memory of a rank", format_memory(max(peaks)), "the rank with the highest peak")
        )
    return tuple(tiles)


def _hidden(share: float | None) -> str:
    return "in the whole run" if share is None else f"{share:.0%} hidden under compute"


def _tiles_of_several(runs: Sequence[ReportedRun]) -> tuple[Tile, ...]:
    first = runs[0]
    speeds = [run.records.median_tokens_per_s for run in runs]
    fastest = int(np.argmax(speeds))
    tiles = [
        Tile(
            "fastest",
            runs[fastest].name,
            f"{speeds[fastest]:,.0f} tokens/s; "
            + ", ".join(
                f"{run.name} {speed:,.0f}"
                for run, speed in zip(runs, speeds, strict=True)
                if run is not runs[fastest]
            ),
        )
    ]
    measured = [run for run in runs if run.records.layers]
    if measured:
        most_even = min(measured, key=lambda run: float(run.records.load_IL.mean()))
        tiles.append(
            Tile(
                "most even",
                most_even.name,
                f"device load, max / mean: {most_even.records.load_IL.mean():.2f} ×; plain EP "
                f"{load_before_IL(most_even).mean():.2f} ×",
            )
        )
    differences = [loss_differences(first.records, run.records)[1] for run in runs[1:]]
    known = [float(found.max()) for found in differences if len(found) and np.isfinite(found).any()]
    if known:
        tiles.append(Tile("largest loss difference", f"{max(known):.1e}", f"relative to {first.name}"))
    return tuple(tiles)
