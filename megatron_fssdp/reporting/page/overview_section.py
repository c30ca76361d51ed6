"""Page sections with tables: settings that differ, parts of resumed runs, and all figures."""

from collections.abc import Sequence

from megatron_fssdp.reporting.comparison_table import compared_figures
from megatron_fssdp.reporting.html.section import Section, Table
from megatron_fssdp.reporting.page.reported_run import ReportedRun
from megatron_fssdp.reporting.records.run_parts import not_comparable, parts_of, progress_of, speed_text
from megatron_fssdp.reporting.records.run_settings import differing_settings
from megatron_fssdp.reporting.simulation_report import SimulationReport


def overview_section(
    runs: Sequence[ReportedRun], what_if: SimulationReport | None = None, *, with_losses: bool = True
) -> Section:
    """Make the section with the same table that the terminal shows.

    Args:
        runs: Runs of the page.
        what_if: Results of a simulation of the runs' loads, or None.
        with_losses: Whether losses can be compared.
    """
    columns, rows = compared_figures(
        [run.records for run in runs],
        [run.name for run in runs],
        with_losses=with_losses,
        what_if=what_if,
    )
    table = Table(("", *columns), tuple((label, *cells) for label, cells in rows.items()))
    lead = "Figures are of the whole run unless stated otherwise. Load: max/mean device load; 1 is even."
    reason = not_comparable([run.records for run in runs])
    return Section("figures", "All figures", lead, table=table, notes=(_sentence(reason),) if reason else ())


def settings_section(runs: Sequence[ReportedRun]) -> Section | None:
    """Make the section with the settings in which runs differ, or None if they do not differ.

    Args:
        runs: Runs of the page.
    """
    differing = differing_settings([run.records for run in runs])
    if not differing:
        return None
    table = Table(
        ("setting", *(run.name for run in runs)), tuple((key, *values) for key, values in differing.items())
    )
    lead = "The runs have the same settings, except for these. –: not set."
    return Section("settings", "Settings that differ", lead, table=table)


def parts_section(runs: Sequence[ReportedRun]) -> Section | None:
    """Make the section with the parts of resumed and interrupted runs, or None if there are none.

    Args:
        runs: Runs of the page.
    """
    rows = []
    reason = not_comparable([run.records for run in runs])
    for run in runs:
        parts = parts_of(run.records)
        for part in parts if len(parts) > 1 or run.stops else ():
            loads = [layer.load_max_over_mean for record in part.records for layer in record.layers]
            rows.append(
                (
                    f"{run.name}, iterations {part.first:,} to {part.last:,}",
                    part.strategy,
                    f"{part.records[0].lm_loss:.4f} → {part.records[-1].lm_loss:.4f}",
                    f"{sum(loads) / len(loads):.2f}" if loads else "–",
                    "not comparable" if reason else speed_text(part.records),
                )
            )
    if not rows:
        return None
    header = ("part", "strategy", "loss", "load max/mean", "tokens/s: median (quartiles)")
    lead = (
        "A run that was resumed has one part for each start. Dotted lines in the figures mark the starts. "
        "A resumed run repeats the iterations after its last checkpoint, and only the repetition is shown."
    )
    stops = tuple(f"{run.name}: stopped after iteration {stop}" for run in runs for stop in run.stops)
    return Section("parts", "Parts and interruptions", lead, table=Table(header, tuple(rows)), notes=stops)


def model_line(run: ReportedRun) -> str:
    """Return one line with the numbers of iterations, layers, experts and devices of a run."""
    words = [progress_of(run.records)]
    if run.records.layers:
        words.append(_counted(len(run.records.layers), "MoE layer"))
    if run.loads is not None:
        words.append(_counted(run.loads.counts_ILDE.shape[3], "expert"))
        words.append(_counted(run.loads.counts_ILDE.shape[2], "device"))
    return ", ".join(words)


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."
