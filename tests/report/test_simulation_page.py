import io

import pytest
from rich.console import Console

from megatron_fssdp.report.measures import comparison_table, shown_runs
from megatron_fssdp.report.page import terminal_table
from megatron_fssdp.report.simulation_page import simulation_headline

from ..simulation.small_jobs import ranking
from .made_runs import write_made_run
from .made_simulation import made_simulation


def test_balanced_loads_and_too_little_memory_are_named():
    sentence = simulation_headline(ranking("ep", "prophet", popular=4))
    assert sentence.startswith("Simulated: no simulated strategy is faster than ep, which takes ")
    sentence = simulation_headline(ranking("ep", memory_bytes=100))
    assert "no strategy fits into the memory of a device. ep needs " in sentence


def test_parm_equals_ep_and_says_so():
    report = ranking("ep", "parm")
    assert report.steady_s(report.rows[1].outcome) == pytest.approx(report.plain_s)
    assert any(note.startswith("parm equals ep here") for note in report.notes)


def shown(table):
    """Return a table in 80 columns as text, after a check that no line is longer and nothing is cut."""
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table)
    text = console.export_text()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    return text


def test_the_ranking_shows_every_cell():
    report = made_simulation()[0]
    table = report.table
    first, second = (shown(table) for table in report.terminal_tables())
    for cells in table.rows:
        texts = dict(zip(table.header, cells, strict=True))
        for name in ("strategy", "ms of an iteration", "warm-up", "× ep", "% of force-balanced"):
            assert texts[name] in first
        for name in ("strategy", "peak memory", "host ms"):
            assert texts[name] in second
    assert {word for name in table.header for word in name.split()} <= {*first.split(), *second.split()}


def test_comparisons_show_every_name(tmp_path):
    names = ("ep", "fssdp", "quota", "prophet", "fastermoe")
    folders = [write_made_run(tmp_path / name, name) for name in names]
    text = shown(terminal_table(comparison_table(shown_runs(folders))))
    assert all(name in text for name in names)
