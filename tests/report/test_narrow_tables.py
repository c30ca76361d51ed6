"""Tables for the terminal show every word in a window of 80 columns."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from megatron_fssdp.reporting.comparison_table import comparison_table
from megatron_fssdp.reporting.ranking_table import ranking_cells
from megatron_fssdp.reporting.sweep.run_groups import group_terminal_table
from rich.console import Console
from rich.table import Table

from megatron_fssdp.cli.analysis.simulation_inputs import described_cluster
from megatron_fssdp.config.cluster_description import FittedLink
from megatron_fssdp.records.recorded_run import load
from megatron_fssdp.report.cluster_table import cluster_table
from megatron_fssdp.report.runs.run_groups import RunGroup
from megatron_fssdp.report.simulations.ranking import ranking_tables
from megatron_fssdp.simulation.break_even import BreakEven

from .page.made_runs import write_made_run
from .simulation_page.made_simulation import made_simulation


def shown(table: Table) -> str:
    """Return a table in 80 columns as text, after a check that no line is longer and nothing is cut."""
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table)
    text = console.export_text()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    return text


def test_the_ranking_shows_every_cell() -> None:
    made = made_simulation()[0]
    found = BreakEven(True, 0.5, 1_234_567.0)
    report = replace(made, rows=tuple(replace(row, tokens=found, bandwidth=found) for row in made.rows))
    header, rows = ranking_cells(report)
    ranking, others = (shown(table) for table in ranking_tables(report))
    for cells in rows:
        texts = dict(zip(header, cells, strict=True))
        for name in ("strategy", "ms of an iteration", "warm-up", "× ep", "peak memory"):
            assert texts[name] in ranking
        for name in ("strategy", "host ms", "pays from", "pays up to"):
            assert texts[name] in others
    assert "1,234,567 tokens" in others


def test_a_measured_cluster_shows_every_figure() -> None:
    link = FittedLink(
        alpha_s=0.0123456, bandwidth_bytes_per_s=123.456e9, r_squared=0.9, worst_relative_error=1.5
    )
    collectives = {
        name: {"intra_node": link, "inter_node": link} for name in ("point_to_point", "reduce_scatter")
    }
    cluster = described_cluster("hecate-a").model_copy(update={"collectives": collectives})
    text = shown(cluster_table(cluster))
    for words in ("reduce_scatter", "inter_node", "12,345.6", "123.456", "0.9000", "150%"):
        assert words in text


@pytest.mark.parametrize("names", [("ep", "fssdp"), ("ep", "fssdp", "quota", "prophet", "fastermoe")])
def test_a_comparison_shows_every_name(names: tuple[str, ...], tmp_path: Path) -> None:
    runs = [load(write_made_run(tmp_path / name, name)) for name in names]
    text = shown(comparison_table(*runs))
    assert all(name in text for name in names)


def test_a_sweep_shows_long_names_of_groups(tmp_path: Path) -> None:
    names = ("fssdp-planner=hecate-rematerialize=true-slots=4", "ep")
    groups = [
        RunGroup(name, {(1, 1): load(write_made_run(tmp_path / name, "fssdp", seed=1))}) for name in names
    ]
    lines = shown(group_terminal_table(groups)).splitlines()
    (heading,) = (line for line in lines if " runs " in line and "repeated" not in line)
    first_column = "".join(line[: heading.index("runs")].strip() for line in lines)
    assert names[0] in first_column
