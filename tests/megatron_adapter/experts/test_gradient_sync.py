"""Expert gradients and parameters work with Megatron's overlapped reductions and gathers."""

from dataclasses import replace
from functools import partial
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


SPLIT = (
    f"{OVERLAPS.replace('--moe-strategy ep', '')} --ddp-bucket-size 8000 --num-layers 3 --lr 1e-2 "
    "--min-lr 1e-3 --moe-strategy fssdp --moe-strategy-set slots=4 --moe-strategy-set overlap_degree=4 "
    "--moe-strategy-set rematerialize=false --moe-strategy-set reshard_interval=0"
)


@pytest.mark.slow
def test_the_first_part_of_a_split_transfer_waits_for_overlapped_gathers(text_data: Path) -> None:
    """The experts of the layer before are running when the first part is packed."""
    whole = train(4, SPLIT, text_data)
    assert train(4, SPLIT, text_data, before=split_transfers).losses == whole.losses
    stale = train(4, SPLIT, text_data, before=partial(split_transfers, awaits=False))
    assert relative_difference(stale.losses, whole.losses) > 1e-4


def split_transfers(*, awaits: bool = True) -> None:
    """Split every transfer in halves; without ``awaits``, pack the first half without a wait."""
    from megatron_fssdp.planning.cost.transfer_split import TransferSplit
    from megatron_fssdp.runtime.execution.layer_executor import LayerExecutor
    from megatron_fssdp.runtime.execution.layer_iteration import LayerIteration

    plan_iteration, start_first_part = LayerExecutor.plan_iteration, LayerIteration.start_first_part

    def plan_with_split(self):
        is_new, plan = self._iteration is None, plan_iteration(self)
        if is_new:
            self._iteration.plan = plan = replace(plan, split=TransferSplit(0.5, 0.0))
        return plan

    def start_without_wait(self, device):
        experts, self.experts = self.experts, replace(self.experts, await_parameters=lambda: None)
        start_first_part(self, device)
        self.experts = experts

    LayerExecutor.plan_iteration = plan_with_split
    if not awaits:
        LayerIteration.start_first_part = start_without_wait


def never_await_parameters() -> None:
    """Remove the wait for gathered parameters."""
    from megatron_fssdp.megatron_adapter.experts import gradient_sync

    gradient_sync.await_parameters = lambda experts: None
