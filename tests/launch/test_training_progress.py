import io
import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from megatron_fssdp.launch.training_progress import MetricsTail, TrainingProgress, progress_text
from megatron_fssdp.records.metrics import IterationMetrics, LayerMetrics


def record(iteration: int) -> IterationMetrics:
    layers = tuple(LayerMetrics(layer, 2.0, 1.0 + layer / 10, 0, 0, 0, 0) for layer in (1, 3))
    return IterationMetrics(iteration, 3.25, None, 0.5, 12345.6, layers)


def line(iteration: int) -> str:
    return json.dumps(asdict(record(iteration))) + "\n"


def test_the_progress_line_shows_the_iterations_figures():
    assert progress_text(record(40), 60, 4.0) == (
        "iteration 40/60  loss 3.2500  12,346 tokens/s  load max/mean 1.20 (plain EP 2.00)  ETA 1:20"
    )
    dense = IterationMetrics(60, 3.0, None, 0.5, 10.0)
    assert progress_text(dense, 60, 4.0) == "iteration 60/60  loss 3.0000  10 tokens/s  ETA 0:00"


def test_the_tail_reads_only_complete_new_lines(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    assert tail.read() == []
    path.write_text(line(1) + line(2)[:20])
    assert tail.read() == [record(1)]
    assert tail.read() == []
    path.write_text(line(1) + line(2) + "damaged\n" + line(3))
    assert tail.read() == [record(2), record(3)]


def test_the_tail_of_a_resumed_run_starts_at_the_end_and_survives_truncation(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1) + line(2)[:20])
    tail = MetricsTail(path)
    path.write_text(line(1) + line(2))
    assert [found.iteration for found in tail.read()] in ([], [2])
    with path.open("a") as file:
        file.write(line(3))
    assert [found.iteration for found in tail.read()] == [3]


def test_progress_is_plain_lines_without_a_terminal(tmp_path: Path):
    path, output = tmp_path / "metrics.jsonl", io.StringIO()
    with TrainingProgress(path, 3, 4, Console(file=output, width=40)) as progress:
        progress.update()
        for iteration in (1, 2, 3):
            with path.open("a") as file:
                file.write(line(iteration))
            progress.update()
    lines = output.getvalue().splitlines()
    assert lines[0] == "starting 4 ranks"
    assert [text.split("  ")[0] for text in lines[1:]] == ["iteration 1/3", "iteration 3/3"]
    assert progress.last == record(3)


def test_progress_is_one_live_line_on_a_terminal(tmp_path: Path):
    path, output = tmp_path / "metrics.jsonl", io.StringIO()
    path.touch()
    console = Console(file=output, force_terminal=True, width=120)
    with TrainingProgress(path, 2, 4, console) as progress:
        path.write_text(line(1))
        progress.update()
    assert "iteration 1/2" in output.getvalue()


def test_the_time_after_the_last_iteration_is_explained(tmp_path: Path):
    path, output = tmp_path / "metrics.jsonl", io.StringIO()
    with TrainingProgress(path, 1, 4, Console(file=output, width=40), saves=True) as progress:
        path.write_text(line(1))
        for _ in range(3):
            progress.update()
    lines = [text.split("  ")[0] for text in output.getvalue().splitlines()]
    assert lines == ["starting 4 ranks", "iteration 1/1", "saving a checkpoint …"]
