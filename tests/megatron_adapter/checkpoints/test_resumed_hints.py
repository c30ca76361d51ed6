"""A resumed run knows the loads of before, and the selections of layers under ``auto``."""

import numpy as np
import pytest

from megatron_fssdp.records.metrics import read_metrics
from megatron_fssdp.strategies.auto.auto_strategy import AutoStrategy

from ..training_run import assert_equal, relative_difference, rows, slow, train

EXACT = "{TORCH_DIST} --train-iters 6 {SHORT_AVERAGES} --lr 5e-3"
SELECTING = "{TORCH_DIST} --train-iters 6 {NO_BIAS} {RESHARDABLE}"
AUTO = "auto FSSDP_PROFILE_ITERATIONS=1 choice_interval=6 record_dir="
WANTED = {1: "fssdp", 2: "ep"}


def price_by_layer(choosing, contexts, histories):
    """Plant prices: fssdp costs nothing in layer 1, and ep costs nothing in layer 2."""
    names = list(choosing.candidates)
    assert len(contexts) <= 1, "each of two ranks prices one layer"
    seconds_LC = np.full((len(contexts), len(names)), 10.0)
    for index, context in enumerate(contexts):
        seconds_LC[index, names.index(WANTED[context.layer])] = 1.0
    return seconds_LC


def told_what_to_choose():
    AutoStrategy.price = price_by_layer


def test_a_run_resumed_in_another_layout_keeps_the_selections_of_auto(text_data, tmp_path):
    saving = f"{{EP2}} {SELECTING} --save {tmp_path / 'checkpoints'} --save-interval 5"
    strategy = f"{AUTO}{tmp_path / 'whole'}"
    whole = train(2, saving, text_data, strategy=strategy, before=told_what_to_choose)
    metrics = read_metrics(tmp_path / "whole")
    # Four iterations are observed before the first selection.
    chosen = [[layer.strategy for layer in iteration.layers] for iteration in metrics[3:5]]
    assert chosen == [["ep", "ep"], ["fssdp", "ep"]]
    (told,) = [text for text in whole.messages if "selected: fssdp in layer 1, ep in layer 2" in text]
    assert "predicted gain" in told
    loading = f"{{EP4}} {SELECTING} --load {tmp_path / 'checkpoints'} --ckpt-step 5"
    run = train(4, loading, text_data, strategy=f"{AUTO}{tmp_path / 'resumed'}")
    resumed = read_metrics(tmp_path / "resumed")
    assert [row.iteration for row in resumed] == [6]
    assert {tuple(layer.strategy for layer in row.layers) for row in resumed} == {("fssdp", "ep")}
    assert relative_difference(run.losses, whole.losses[5:]) <= 1e-5


LIMITED = "fssdp slots=2 overlap_degree=3 reshard_interval=2"
# name | ranks | Megatron's arguments | strategy. The default format of optimizers is dp_reshardable.
RUNS = rows(
    """
    bf16_distributed | 4 | {EP2} --bf16 {RESHARDABLE} | {LIMITED}
    pipeline | 4 | {EP2} {PP2} --bf16 | {LIMITED}
    mtp | 2 | {EP2} {MTP} --bf16 | {LIMITED}
    position in buckets, no copies | 2 | {EP2} {DISTRIBUTED} | none
    position in buckets, bf16 | 2 | --bf16 {NO_BIAS} {DISTRIBUTED} | none
    padded buckets | 2 | {EP2} {RESHARDABLE} --overlap-grad-reduce --ddp-bucket-size 5000 | none
    bf16, no copies | 2 | {EP2} {RESHARDABLE} --bf16 | ep
    """,
    LIMITED=LIMITED,
)
FIRST, *SLOW = RUNS


@pytest.mark.parametrize("name", [FIRST, *slow(SLOW)])
def test_a_resumed_run_has_the_bits_of_one_without_a_break(name, text_data, tmp_path):
    num_ranks, layout, strategy = RUNS[name]
    arguments = f"{EXACT} {layout} --hidden-dropout 0.1"
    # On the CPU, nothing is saved beside the training: Megatron's writer process would end, and ranks hang.
    saving = f"{arguments} --save {tmp_path} --save-interval 3 --async-save --use-persistent-ckpt-worker"
    whole = train(int(num_ranks), saving, text_data, strategy=strategy)
    rest = train(int(num_ranks), f"{arguments} --load {tmp_path} --ckpt-step 3", text_data, strategy=strategy)
    assert_equal(rest, whole, since=3)
    if name == FIRST:
        assert sum("keep the owners of the checkpoint" in message for message in rest.messages) == 1
