"""The selections of layers under ``auto`` survive a checkpoint, also in another layout, and are logged."""

from pathlib import Path

import numpy as np
import pytest

from megatron_fssdp.planning.loads.load_history import LoadHistory
from megatron_fssdp.reporting.records.run_records import read_metrics
from megatron_fssdp.strategies.auto import AutoStrategy
from megatron_fssdp.strategies.layer_plan import LayerContext

from ..training_run import relative_difference, train, train_on_all_ranks

KEYS = (
    "--ckpt-format torch_dist --disable-bias-linear --use-distributed-optimizer "
    "--dist-ckpt-optim-fully-reshardable --moe-strategy auto FSSDP_PROFILE_ITERATIONS=1 "
    "--moe-strategy-set choice_interval=6 --moe-strategy-set record_dir="
)
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
    AutoStrategy.price = each_its_own  # type: ignore[method-assign]


def test_a_resumed_run_keeps_the_selections_of_auto(text_data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    layout = "--expert-model-parallel-size 2"
    save = f"--save {folder} --save-interval 6 --train-iters 8"
    runs = train_on_all_ranks(
        2, f"{layout} {KEYS}{tmp_path / 'whole'} {save}", text_data, before=told_what_to_choose
    )
    whole = runs[-1]
    metrics = read_metrics(tmp_path / "whole")
    assert [[layer.strategy for layer in one.layers] for one in metrics[4:6]] == [
        ["ep", "ep"],  # five iterations are observed before the first selection
        ["fssdp", "smartmoe"],
    ]
    chosen = [
        line
        for run in runs
        for line in run.messages
        if "selected: fssdp in layer 1, smartmoe in layer 2" in line
    ]
    assert len(chosen) == 1
    assert "predicted gain" in chosen[0]
    load = f"--load {folder} --ckpt-step 6 --train-iters 8"
    for name, ranks, more in (("again", 2, layout), ("wider", 4, "--expert-model-parallel-size 4")):
        run = train(ranks, f"{more} {KEYS}{tmp_path / name} {load}", text_data)
        resumed = read_metrics(tmp_path / name)
        assert [one.iteration for one in resumed] == [7, 8]
        assert {tuple(layer.strategy for layer in one.layers) for one in resumed} == {("fssdp", "smartmoe")}
        assert relative_difference(run.losses, whole.losses[6:]) <= 1e-5, name


@pytest.mark.slow
def test_stock_megatron_and_other_strategies_load_such_a_checkpoint(text_data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    layout = "--expert-model-parallel-size 2"
    save = f"--save {folder} --save-interval 6 --train-iters 8"
    whole = train(2, f"{layout} {KEYS}{tmp_path / 'whole'} {save}", text_data, before=told_what_to_choose)
    load = (
        f"--load {folder} --ckpt-step 6 --train-iters 8 --ckpt-format torch_dist --disable-bias-linear "
        "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"
    )
    for strategy in ("none", "ep"):
        run = train(2, f"{layout} {load} --moe-strategy {strategy}", text_data)
        assert relative_difference(run.losses, whole.losses[6:]) <= 1e-5, strategy
