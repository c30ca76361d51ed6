"""Interrupted and resumed runs say so, and runs whose ranks share cores have no speed."""

import os
from contextlib import closing
from pathlib import Path

import pytest
from megatron_fssdp.reporting.comparison_table import SPEED, compared_figures
from megatron_fssdp.reporting.page.headline import headline_of
from megatron_fssdp.reporting.page.overview_section import parts_section
from megatron_fssdp.reporting.page.report_page import report_page
from megatron_fssdp.reporting.page.reported_run import read_reported_runs
from megatron_fssdp.reporting.records.run_parts import not_comparable, parts_of, progress_of

from megatron_fssdp.records.metrics import IterationMetrics, LayerMetrics, RunSession
from megatron_fssdp.records.metrics_file import METRICS_FILE, MetricsWriter
from megatron_fssdp.records.recorded_run import RecordedRun, load


def write(folder: Path, numbers: range, session: RunSession | None, load: float = 2.0) -> Path:
    """Write iterations as one start of a training does. The speed of iteration n is n tokens per second."""
    with closing(MetricsWriter(folder)) as writer:
        for i, number in enumerate(numbers):
            layers = (LayerMetrics(1, 2.0, load, 0, 0, 0, 0),)
            start = session if i == 0 else None
            writer.append(IterationMetrics(number, 2.0, None, 1.0, float(number), layers, session=start))
    os.utime(folder / METRICS_FILE, (0, 0))
    return folder


@pytest.mark.parametrize(
    ("numbers", "asked", "words"),
    [
        ([range(1, 61)], 60, "60 iterations"),
        ([range(1, 6)], 400, "5 of 400 iterations, interrupted"),
        ([range(1, 4), range(3, 11)], 10, "10 iterations"),
        ([range(1, 4), range(6, 11)], 10, "8 iterations, 2 missing between them"),
        ([range(101, 111)], 110, "10 iterations, from iteration 101 on"),
        ([range(1, 2)], 1, "1 iteration"),
    ],
)
def test_the_iterations_of_a_run_are_counted(
    numbers: list[range], asked: int, words: str, tmp_path: Path
) -> None:
    for part in numbers:
        write(tmp_path, part, RunSession("ep", asked))
    assert progress_of(load(tmp_path)) == words


def test_a_run_that_still_trains_is_not_called_interrupted(tmp_path: Path) -> None:
    write(tmp_path, range(1, 6), RunSession("ep", 400))
    os.utime(tmp_path / METRICS_FILE)
    assert progress_of(load(tmp_path)) == "5 of 400 iterations, so far"


def test_a_resumed_run_has_parts_with_medians_of_their_own(tmp_path: Path) -> None:
    write(tmp_path, range(1, 6), RunSession("ep", 10))
    write(tmp_path, range(4, 11), RunSession("fssdp", 10), load=1.0)
    run = load(tmp_path)
    assert run.strategy == "fssdp"  # there is no config.yaml, so the last start names it
    assert [(part.strategy, part.first, part.last) for part in parts_of(run)] == [
        ("ep", 1, 3),
        ("fssdp", 4, 10),
    ]
    section = parts_section(read_reported_runs([tmp_path]))
    assert section is not None
    assert section.table is not None
    assert [row[1:] for row in section.table.rows] == [
        ("ep", "2.0000 → 2.0000", "2.00", "2 (2 to 2)"),
        ("fssdp", "2.0000 → 2.0000", "1.00", "7 (6 to 8)"),
    ]
    sections = report_page(read_reported_runs([tmp_path])).sections
    marked = [
        figure.name
        for shown in sections
        for figure in shown.figures
        if any(shape["x0"] == 3.5 for shape in figure.layout.get("shapes", ()))
    ]
    assert marked == ["loss", "time", "device-load", "replicas"]
    _, rows = compared_figures([run], ["run"])
    assert rows["parts"] == ("1–3 ep, 4–10 fssdp",)


def two_runs(folder: Path, cores: int) -> list[RecordedRun]:
    sessions = [RunSession(name, 5, ranks=4, cores=cores) for name in ("ep", "fssdp")]
    write(folder / "ep", range(1, 6), sessions[0])
    write(folder / "fssdp", range(101, 106), sessions[1], load=1.0)
    return [load(folder / name) for name in ("ep", "fssdp")]


def test_ranks_that_share_cores_have_no_speed(tmp_path: Path) -> None:
    runs = two_runs(tmp_path, cores=2)
    assert not_comparable(runs) == "speed is not comparable here: 4 ranks share 2 cores"
    _, rows = compared_figures(runs, ["ep", "fssdp"])
    assert rows[SPEED] == ("not comparable", "not comparable")
    headline = headline_of(read_reported_runs([run.path for run in runs]))
    assert "speed is not comparable here: 4 ranks share 2 cores" in headline.sentence
    assert "busiest device 2.00 → 1.00 × mean load" in headline.sentence
    labels = " ".join(tile.label for tile in headline.tiles)
    assert "tokens per second" not in labels
    assert "fastest" not in labels


@pytest.mark.parametrize("cores", [0, 4])
def test_ranks_with_cores_or_gpus_of_their_own_have_medians_with_quartiles(
    cores: int, tmp_path: Path
) -> None:
    runs = two_runs(tmp_path, cores)
    assert not_comparable(runs) == ""
    _, rows = compared_figures(runs, ["ep", "fssdp"])
    assert rows[SPEED] == ("3 (2 to 4)", "103 (102 to 104)")
    headline = headline_of(read_reported_runs([run.path for run in runs]))
    assert headline.sentence.startswith("fssdp 34.33 × ep; busiest device")
    assert [tile.hint for tile in headline.tiles][-1] == "median; quartiles 102 to 104"
    same = headline_of(read_reported_runs([runs[0].path, runs[0].path]))
    assert "no clear difference: the quartiles overlap" in same.sentence
