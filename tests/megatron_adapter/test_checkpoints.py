"""Checkpoints are stock: written under one strategy, they go on under another."""

from pathlib import Path

import pytest

from .training_run import relative_difference, train, train_on_all_ranks

LAYOUT = "--expert-model-parallel-size 2 --ckpt-format torch_dist --no-load-rng --no-save-rng"


@pytest.mark.parametrize(("writer", "reader"), [("fssdp", "none"), ("none", "fssdp")])
def test_training_goes_on_under_another_strategy(
    writer: str, reader: str, text_data: Path, tmp_path: Path
) -> None:
    whole = train(2, f"{LAYOUT} --train-iters 8", text_data)
    train(
        2,
        f"{LAYOUT} --train-iters 8 --exit-interval 4 --moe-strategy {writer} "
        f"--save {tmp_path} --save-interval 4",
        text_data,
    )
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "4"
    rest = train(2, f"{LAYOUT} --train-iters 8 --moe-strategy {reader} --load {tmp_path}", text_data)
    assert len(rest.losses) == 4
    assert relative_difference(rest.losses, whole.losses[4:]) <= 1e-5


def test_optimizer_state_that_would_be_restored_wrongly_is_refused(text_data: Path, tmp_path: Path) -> None:
    layout = f"{LAYOUT} --use-distributed-optimizer --train-iters 2"
    train(2, f"{layout} --save {tmp_path} --save-interval 2 --load {tmp_path}", text_data)
    refused = train_on_all_ranks(2, f"{layout} --load {tmp_path}", text_data)
    assert [run.exit_code for run in refused] == [2, 2]
    assert "--no-load-optim" in refused[0].errors
