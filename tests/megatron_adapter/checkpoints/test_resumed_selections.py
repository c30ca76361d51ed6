"""The selections of layers under ``auto`` survive a checkpoint, also in another layout, and are logged."""

from pathlib import Path

import numpy as np
import pytest

from megatron_fssdp.planning.loads import LoadHistory
from megatron_fssdp.records.metrics_file import read_metrics
from megatron_fssdp.strategies.auto import AutoStrategy
from megatron_fssdp.strategies.layer_plan import LayerContext

from ..training_run import TrainingRun, relative_difference, train

COMMON = "{TORCH_DIST} {NO_BIAS} {RESHARDABLE} --train-iters 8"
AUTO = "auto FSSDP_PROFILE_ITERATIONS=1 choice_interval=6 record_dir="
WANTED = {1: "fssdp", 2: "smartmoe"}


def each_its_own(
    choosing: AutoStrategy, contexts: list[LayerContext], histories: list[LoadHistory]
) -> np.ndarray:
    """Plant prices: fssdp costs nothing in layer 1, and smartmoe costs nothing in layer 2."""
    names = list(choosing.candidates)
    assert len(contexts) <= 1, "each of two ranks prices one layer"
    seconds_LC = np.full((len(contexts), len(names)), 10.0)
    for index, context in enumerate(contexts):
        seconds_LC[index, names.index(WANTED[context.layer])] = 1.0
    return seconds_LC


def told_what_to_choose() -> None:
    """Run on every rank before the launch."""
    AutoStrategy.price = each_its_own


@pytest.fixture
def whole(text_data: Path, tmp_path: Path) -> TrainingRun:
    saving = f"{{EP2}} {COMMON} --save {tmp_path / 'checkpoints'} --save-interval 6"
    return train(2, saving, text_data, strategy=f"{AUTO}{tmp_path / 'whole'}", before=told_what_to_choose)


def test_a_resumed_run_keeps_the_selections_of_auto(
    whole: TrainingRun, text_data: Path, tmp_path: Path
) -> None:
    metrics = read_metrics(tmp_path / "whole")
    assert [[layer.strategy for layer in one.layers] for one in metrics[4:6]] == [
        ["ep", "ep"],  # five iterations are observed before the first selection
        ["fssdp", "smartmoe"],
    ]
    told = [text for text in whole.messages if "selected: fssdp in layer 1, smartmoe in layer 2" in text]
    assert len(told) == 1
    assert "predicted gain" in told[0]
    for size in (2, 4):
        records = tmp_path / f"ep{size}"
        loading = f"--expert-model-parallel-size {size} --load {tmp_path / 'checkpoints'} --ckpt-step 6"
        run = train(size, f"{COMMON} {loading}", text_data, strategy=f"{AUTO}{records}")
        resumed = read_metrics(records)
        assert [one.iteration for one in resumed] == [7, 8]
        assert {tuple(layer.strategy for layer in one.layers) for one in resumed} == {("fssdp", "smartmoe")}
        assert relative_difference(run.losses, whole.losses[6:]) <= 1e-5, size


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["none", "ep"])
def test_stock_megatron_and_other_strategies_load_such_a_checkpoint(
    strategy: str, whole: TrainingRun, text_data: Path, tmp_path: Path
) -> None:
    loading = f"{{EP2}} {COMMON} --load {tmp_path / 'checkpoints'} --ckpt-step 6"
    run = train(2, loading, text_data, strategy=strategy)
    assert relative_difference(run.losses, whole.losses[6:]) <= 1e-5
