import io
import json
from dataclasses import asdict

from rich.console import Console

from megatron_fssdp.launch.training import TrainingProgress
from megatron_fssdp.records.metrics import IterationMetrics, LayerMetrics


def record(iteration):
    layers = tuple(LayerMetrics(layer, 2.0, 1.0 + layer / 10, 0, 0, 0, 0) for layer in (1, 3))
    return IterationMetrics(iteration, 3.25, None, 4.0, 12345.6, layers)


def line(iteration):
    return json.dumps(asdict(record(iteration))) + "\n"


def shown(path, iterations, steps, *, force_terminal=False, **options):
    """The display after the file had these contents one after the other, and its lines."""
    output = io.StringIO()
    console = Console(file=output, width=200, force_terminal=force_terminal)
    with TrainingProgress(path, iterations, 4, console, **options) as progress:
        for text in steps:
            path.write_text(text)
            progress.update()
    return progress, output.getvalue().splitlines()


def test_complete_new_lines_are_shown_as_plain_lines_without_a_terminal(tmp_path):
    path = tmp_path / "metrics.jsonl"
    damaged = line(1) + line(2) + "damaged\n"
    progress, lines = shown(path, 3, [line(1) + line(2)[:20], damaged, damaged + line(3)])
    first = "iteration 1/3  loss 3.2500  12,346 tokens/s  load max/mean 1.20 (plain EP 2.00)  ETA 0:08"
    assert lines[:2] == ["starting 4 ranks", first]
    assert [text.split("  ")[0] for text in lines[2:]] == ["iteration 3/3"]
    assert progress.last == record(3)


def test_a_resumed_run_is_shown_from_its_new_lines_on_although_a_half_line_is_cut_off(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1) + line(2)[:20])
    _, lines = shown(path, 3, [line(1), line(1) + line(2)])
    assert [text.split("  ")[0] for text in lines[1:]] == ["iteration 2/3"]


def test_progress_is_one_live_line_on_a_terminal(tmp_path):
    _, lines = shown(tmp_path / "metrics.jsonl", 2, [line(1)], force_terminal=True)
    assert "iteration 1/2" in "".join(lines)


def test_the_time_after_the_last_iteration_is_explained(tmp_path):
    _, lines = shown(tmp_path / "metrics.jsonl", 1, [line(1)] * 3, saves=True)
    assert [text.split("  ")[0] for text in lines] == ["starting 4 ranks", "iteration 1/1"]
    assert lines[1].endswith("saving a checkpoint …")
