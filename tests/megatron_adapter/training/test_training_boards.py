"""Megatron's own boards get the plugin's figures: TensorBoard's files and a stand-in for Weights & Biases."""

import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_fssdp.records.loads import read_loads
from megatron_fssdp.records.metrics_file import read_metrics
from megatron_fssdp.records.recorded_run import load
from megatron_fssdp.records.run_settings import run_config_of

from ..training_run import note, train

# Rank 0 gathers the figures and the last rank has the boards; they are on different pipeline stages.
LAYOUT, FSSDP = "{EP2} {PP2} {BATCH16} --train-iters 4 --log-interval 2", "fssdp slots=1 overlap_degree=2"
WANDB = "--wandb-project p --wandb-exp-name e --wandb-save-dir"


def test_boards_have_the_scalars_and_histograms_of_logged_iterations(text_data: Path, tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    board, records = tmp_path / "board", tmp_path / "records"
    arguments = f"{LAYOUT} --tensorboard-dir {board} {WANDB} {tmp_path}"
    strategy = f"{FSSDP} record_dir={records}"
    trained = train(4, arguments, text_data, strategy=strategy, before=fake_wandb)
    events = accumulators.EventAccumulator(str(board), size_guidance={"histograms": 0, "scalars": 0})
    events.Reload()
    metrics = {entry.iteration: entry for entry in read_metrics(records)}
    assert load(records).strategy == "fssdp"  # no command line wrote the run's settings
    run = run_config_of(records)
    assert (
        run.parallelism.pipeline_model_parallel_size,
        run.parallelism.world_size,
        run.model.num_experts,
    ) == (2, 4, 8)
    assert run.strategy.settings == {"slots": 1, "overlap_degree": 2}
    logged = [2, 4]

    def scalar(name: str) -> dict[int, float]:
        return {event.step: event.value for event in events.Scalars(name)}

    assert scalar("fssdp/seconds") == pytest.approx({i: metrics[i].iteration_s for i in logged})
    for number in (1, 2):
        for key, name in (
            ("load_max_over_mean", "device load, max over mean"),
            ("ep_load_max_over_mean", "device load under plain EP, max over mean"),
            ("num_replicas", "replicas"),
            ("spag_bytes", "spAG bytes"),
            ("sprs_bytes", "spRS bytes"),
        ):
            wanted = {i: getattr(metrics[i].layers[number - 1], key) for i in logged}
            assert scalar(f"fssdp {name}/layer {number}") == pytest.approx(wanted), name
    loads = read_loads(records)
    tokens_LE = loads.counts_ILDE[3].sum(axis=1)
    for number, tokens_E in enumerate(tokens_LE, start=1):
        histograms = events.Histograms(f"fssdp tokens of an expert/layer {number}")
        assert [event.step for event in histograms] == logged
        last = histograms[-1].histogram_value
        assert (last.num, last.sum, last.max) == (8, tokens_E.sum(), tokens_E.max())
    assert "lm loss" in events.Tags()["scalars"]  # written by Megatron itself
    ours = told_by_us(trained.notes)
    assert [step for step, _ in ours] == logged
    for step, values in ours:
        scalars = {name: value for name, value in values.items() if not isinstance(value, list)}
        assert scalars == pytest.approx({name: scalar(name)[step] for name in scalars})
        assert len(scalars) == len([name for name in events.Tags()["scalars"] if name.startswith("fssdp")])
    assert values["fssdp tokens of an expert/layer 2"] == tokens_LE[1].tolist()


@pytest.mark.slow
def test_a_training_board_needs_no_record_dir(text_data: Path, tmp_path: Path) -> None:
    arguments = f"{LAYOUT} {WANDB} {tmp_path}"
    ours = told_by_us(train(4, arguments, text_data, strategy=FSSDP, before=fake_wandb).notes)
    assert [step for step, _ in ours] == [2, 4]
    for _, values in ours:
        assert values["fssdp/seconds"] > values["fssdp/seconds of passes"] > 0
        assert values["fssdp device load, max over mean/layer 2"] >= 1
        # Two groups of two devices route 16 samples of 16 tokens to 2 experts each.
        assert sum(values["fssdp tokens of an expert/layer 1"]) == 16 * 16 * 2
    assert {path.name for path in tmp_path.iterdir()} <= {"wandb"}


def told_by_us(told: Any) -> list[tuple[int, dict[str, Any]]]:
    """Steps and values of the plugin's own figures."""
    return [(step, values) for step, values in told if any(name.startswith("fssdp") for name in values)]


def fake_wandb() -> None:
    """Install on each rank a module that records its calls."""
    module: Any = types.ModuleType("wandb")

    def log(values: dict[str, Any], step: int | None = None) -> None:
        note((step, {name: np.asarray(value).tolist() for name, value in values.items()}))

    module.init = lambda **_: None
    module.log = log
    module.Histogram = lambda sequence: sequence
    module.config = types.SimpleNamespace(update=lambda *_, **__: None)
    module.finish = lambda *_: None
    module.run = types.SimpleNamespace(dir="", log_artifact=lambda *_: None)
    sys.modules["wandb"] = module
