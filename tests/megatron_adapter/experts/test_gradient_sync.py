"""Expert gradients and parameters work with Megatron's overlapped reductions and gathers."""

from pathlib import Path

import pytest

from ..training_run import relative_difference, train

OVERLAPS = (
    "--expert-model-parallel-size 2 --use-distributed-optimizer --overlap-grad-reduce "
    "--overlap-param-gather --train-iters 6 --moe-strategy ep"
)


@pytest.mark.slow
def test_experts_wait_for_overlapped_parameter_gathers(text_data: Path) -> None:
    """Without the parameters' pre-hooks, the experts would train on the previous iteration's weights."""
    stock = train(4, OVERLAPS.replace("--moe-strategy ep", ""), text_data)
    assert relative_difference(train(4, OVERLAPS, text_data).losses, stock.losses) <= 1e-6
    broken = train(4, OVERLAPS, text_data, before=never_await_parameters)
    assert relative_difference(broken.losses, stock.losses) > 1e-5


def never_await_parameters() -> None:
    """Remove the wait for gathered parameters."""
    from megatron_fssdp.megatron_adapter.experts import gradient_sync

    gradient_sync.await_parameters = lambda experts: None
