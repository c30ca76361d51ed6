import os

import numpy as np
import plotly.graph_objects as go
import pytest

from megatron_fssdp.records import load
from megatron_fssdp.records.metrics import (
    METRICS_FILE,
    IterationMetrics,
    LayerMetrics,
    MetricsWriter,
    PassMetrics,
    RunSession,
)
from megatron_fssdp.records.recorded_run import STOP_MARK
from megatron_fssdp.report import measures
from megatron_fssdp.report.run_page import headline_of, run_page

from .made_runs import write_made_run


def recorded(folder, *records):
    writer = MetricsWriter(folder)
    for record in records:
        writer.append(record)
    return load(folder)


def iteration(number, passes_s, parts=None, count=1):
    layers = tuple(
        LayerMetrics(n + 1, 2.0, 1.5, 0, 0, 0, 0, spag_exposed_s=0.5, forward=parts, backward=parts)
        for n in range(count)
    )
    return IterationMetrics(number, 5.0, None, 10.0, 1.0, layers, reshard_s=1.0, passes_s=passes_s)


def test_parts_are_those_of_the_slowest_experts_and_add_up(tmp_path):
    # Experts take 1 s on the mean rank and 1.5 s on the slowest, for which the combine waits 0.5 s.
    parts = PassMetrics(other_s=0.25, dispatch_s=0.5, experts_s=1.0, combine_s=0.75, experts_slowest_s=1.5)
    run = recorded(tmp_path, iteration(1, 8.0, parts), iteration(2, 8.0), iteration(3, 0.0))
    parts_s = measures.time_parts(run)
    np.testing.assert_allclose(sum(parts_s.values()), 10.0)
    wanted = {
        "passes": [0, 7.5, 0],
        "outside": [8 - 5.5, 0, 0],
        "other compute": [0.5, 0, 0],
        "experts": [3, 0, 0],
        "all-to-all": [1.5, 0, 0],
        "waiting for spAG": [0.5, 0.5, 0.5],
        "rest": [1, 1, 8.5],
    }
    for part, seconds in wanted.items():
        np.testing.assert_allclose(parts_s[part], seconds, err_msg=part)
    assert measures.mean_parts_s(run)["passes"] == 3.75


def test_layers_of_pipeline_stages_that_work_at_the_same_time_share_the_passes(tmp_path):
    parts = PassMetrics(1.0, 1.0, 1.0, 1.0, 1.0)
    parts_s = measures.time_parts(recorded(tmp_path, iteration(1, 8.5, parts, count=2)))
    np.testing.assert_allclose(parts_s["experts"], 4 * 8.5 / 17)
    np.testing.assert_allclose(sum(parts_s.values()), 10.0)


@pytest.mark.parametrize(("cores", "text"), [(0, "200 TFLOP/s"), (2, "200 TFLOP/s (4 ranks share 2 cores)")])
def test_operations_per_second_are_of_one_device(cores, text, tmp_path):
    session = RunSession("fssdp", 2, 4, cores, devices=8)
    run = recorded(tmp_path, IterationMetrics(1, 5.0, None, 2.0, 1.0, flops=3.2e15, session=session))
    texts = {measure.key: measure.text for measure in measures.measures_of(run)}
    assert texts["flops_per_s_per_device"] == text


def write(folder, numbers, session, load_ratio=2.0):
    """Write iterations as one start of a training does. The speed of iteration n is n tokens per second."""
    writer = MetricsWriter(folder)
    for i, number in enumerate(numbers):
        layers = (LayerMetrics(1, 2.0, load_ratio, 0, 0, 0, 0),)
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
def test_the_iterations_of_a_run_are_counted(numbers, asked, words, tmp_path):
    for part in numbers:
        write(tmp_path, part, RunSession("ep", asked))
    assert measures.progress_of(load(tmp_path)) == words
    os.utime(tmp_path / METRICS_FILE)  # a run that still trains is not called interrupted
    assert measures.progress_of(load(tmp_path)) == words.replace("interrupted", "so far")
    (tmp_path / "log.txt").write_text(f"{STOP_MARK} {numbers[-1][-1]}: interrupted by Ctrl-C\n")
    assert measures.progress_of(load(tmp_path)) == words


def test_starts_of_a_resumed_run_are_shown(tmp_path):
    write(tmp_path, range(1, 6), RunSession("ep", 10))
    write(tmp_path, range(4, 11), RunSession("fssdp", 10), load_ratio=1.0)
    runs = measures.shown_runs([tmp_path])
    assert runs[0].run.strategy == "fssdp"  # there is no config.yaml, so the last start names it
    (figure,) = next(section.parts for section in run_page(runs).sections if section.anchor == "loss")
    assert isinstance(figure, go.Figure)
    assert [line.x0 for line in figure.layout.shapes] == [3.5]
    assert [note.text for note in figure.layout.annotations] == ["fssdp: resumed with fssdp"]


@pytest.mark.parametrize("cores", [0, 2, 4])
def test_only_ranks_with_cores_of_their_own_have_a_speed(cores, tmp_path):
    for name, numbers, ratio in (("ep", range(1, 6), 2.0), ("fssdp", range(101, 106), 1.0)):
        write(tmp_path / name, numbers, RunSession(name, 5, ranks=4, cores=cores), ratio)
    runs = measures.shown_runs([tmp_path / "ep", tmp_path / "fssdp"])
    speeds = {row[0]: row[1:] for row in measures.comparison_table(runs).rows}["tokens/s: median (quartiles)"]
    sentence = headline_of(runs)
    assert "busiest device 2.00 → 1.00 × mean load" in sentence
    if cores == 2:
        assert speeds == ("not comparable", "not comparable")
        assert "speed is not comparable here: 4 ranks share 2 cores" in sentence
        assert "tokens/s" not in headline_of(runs[:1])
    else:
        assert speeds == ("3 (2 to 4)", "103 (102 to 104)")
        assert "median 3 tokens/s (quartiles 2 to 4)" in headline_of(runs[:1])
        assert sentence.startswith("fssdp 34.33 × ep; busiest device")
        same = headline_of([runs[0], runs[0]])
        assert "no clear difference: the quartiles overlap" in same
        write(tmp_path / "short", range(1, 2), RunSession("ep", 1, ranks=4, cores=cores), 2.0)
        short = headline_of([runs[1], *measures.shown_runs([tmp_path / "short"])])
        assert "a single iteration, which also allocates, says little" in short


def test_the_headline_states_waits_for_weights_and_gradients_and_replicas(tmp_path):
    (made,) = measures.shown_runs([write_made_run(tmp_path / "a")])
    sentence = headline_of([made])
    parts_s = measures.mean_parts_s(made.run)
    whole_s = sum(parts_s.values())
    for word, part in (("weights (spAG", "waiting for spAG"), ("gradients (spRS", "waiting for spRS")):
        wanted = f"{1e3 * parts_s[part]:.3g} ms for {word}, {parts_s[part] / whole_s:.1%})"
        assert wanted in sentence
    assert "3 replicas a layer of 24 possible" in sentence
    assert "plain EP would do" not in sentence
    assert "peak memory of a rank 1.19 GiB" in sentence


def test_the_headline_says_where_plain_expert_parallelism_would_do(tmp_path):
    layer = LayerMetrics(1, 1.05, 1.0, 24, 0, 0, 0)
    write_made_run(tmp_path, num_iterations=1, num_layers=1)
    recorded(tmp_path, IterationMetrics(1, 5.0, None, 1.0, 1.0, (layer,)))
    sentence = headline_of(measures.shown_runs([tmp_path]))
    assert "24 replicas a layer of 24 possible; every expert is on every device" in sentence
    assert "loads are almost even without balancing (1.05), so plain EP would do" in sentence


def test_the_table_has_rows_where_a_run_has_something(tmp_path):
    ep = write_made_run(tmp_path / "ep", "ep", num_iterations=3)
    fssdp = write_made_run(tmp_path / "fssdp")
    rows = {row[0]: row[1:] for row in measures.comparison_table(measures.shown_runs([ep, fssdp])).rows}
    assert rows["re-shards: moved experts, bytes, seconds"] == ("–", "1: 3, 300 B, 0.20 s")
    assert rows["hidden under compute: weights (spAG)"] == ("–", "90%")
    assert rows["bytes moved: gradients (spRS)"] == ("0 B", "30 kB")
    assert rows["loss: largest difference"] == ("–", "0.0e+00 relative")
    assert rows["replicas per layer"] == ("0.0 of 24 possible", "3.0 of 24 possible")
