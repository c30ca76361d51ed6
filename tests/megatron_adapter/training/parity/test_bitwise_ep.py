"""``ep`` has the bits of stock Megatron (``none``): the layer in slots adds nothing to what is computed."""

from pathlib import Path

import pytest

from ...training_run import TrainingRun, train_on_all_ranks

LAYOUTS = {
    "two copies, distributed optimizer": (
        "--expert-model-parallel-size 2 --global-batch-size 8 --swiglu --disable-bias-linear "
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
    ),
    "tensor parallel": (
        "--expert-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel "
        "--expert-tensor-parallel-size 2 --disable-bias-linear --global-batch-size 4"
    ),
    "pipeline, bf16, recomputed": (
        "--expert-model-parallel-size 2 --pipeline-model-parallel-size 2 --bf16 --global-batch-size 8 "
        "--recompute-granularity selective --recompute-modules moe"
    ),
    "allgather": (
        "--expert-model-parallel-size 4 --moe-token-dispatcher-type allgather --global-batch-size 8 "
        "--moe-router-load-balancing-type none"
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_ep_equals_stock_megatron_bit_by_bit(name: str, text_data: Path) -> None:
    stock, slots = (_train(LAYOUTS[name], strategy, text_data) for strategy in ("none", "ep"))
    assert len(stock.losses) == 3
    assert (slots.losses, slots.other_losses) == (stock.losses, stock.other_losses)
    assert slots.grad_norms == stock.grad_norms


def _train(layout: str, strategy: str, data: Path) -> TrainingRun:
    runs = train_on_all_ranks(4, f"{layout} --train-iters 3 --moe-strategy {strategy}", data)
    failed = next((run for run in runs if run.exit_code), None)
    assert failed is None, f"{strategy}: {failed.errors[-3000:]}"
    return runs[-1]
