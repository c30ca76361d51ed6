"""Expert gradients and parameters work with Megatron's overlapped reductions and gathers."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from ..training_run import relative_difference, train

OVERLAPS = (
    "--expert-model-parallel-size 2 --use-distributed-optimizer --overlap-grad-reduce "
    "--overlap-param-gather --train-iters 6 --ddp-bucket-size 8000 --num-layers 3 --lr 1e-2 --min-lr 1e-3"
)
FSSDP = (
    f"{OVERLAPS} --moe-strategy fssdp --moe-strategy-set slots=4 --moe-strategy-set overlap_degree=4 "
    "--moe-strategy-set rematerialize=false --moe-strategy-set reshard_interval=0"
)


@pytest.mark.slow
def test_replicas_wait_for_overlapped_parameter_gathers(text_data: Path) -> None:
    """Without the parameters' pre-hooks, replicas would have the previous iteration's weights."""
    stock = train(4, OVERLAPS, text_data)
    whole = train(4, FSSDP, text_data)
    assert relative_difference(whole.losses, stock.losses) <= 1e-5
    broken = train(4, FSSDP, text_data, before=never_await_parameters)
    assert relative_difference(broken.losses, stock.losses) > 1e-4
    # The experts of the layer before are running when the first part of a split transfer is packed.
    assert train(4, FSSDP, text_data, before=split_transfers).losses == whole.losses
    stale = train(4, FSSDP, text_data, before=partial(split_transfers, awaits=False))
    assert relative_difference(stale.losses, whole.losses) > 1e-4


def split_transfers(*, awaits: bool = True) -> None:
    """Split every transfer in halves; without ``awaits``, pack the first half without a wait."""
    from megatron_fssdp.planning.cost.transfer_split import TransferSplit
    from megatron_fssdp.runtime.layers.layer_planner import LayerPlanner
    from megatron_fssdp.runtime.layers.slot_layer import SlotLayer
    from megatron_fssdp.runtime.slots.replica_transfers import ReplicaTransfers
    from megatron_fssdp.strategies.fssdp.fssdp_strategy import FssdpStrategy

    next_plan = LayerPlanner.next_plan

    def plan_with_split(self, context):
        return replace(next_plan(self, context), split=TransferSplit(0.5, 0.0))

    def without_wait(gather, name):
        def call(self):
            experts = getattr(self, name)
            setattr(self, name, replace(experts, await_parameters=lambda: None))
            gather(self)
            setattr(self, name, experts)

        return call

    LayerPlanner.next_plan = plan_with_split
    FssdpStrategy.splits = True
    if not awaits:
        SlotLayer._gather_first_part = without_wait(SlotLayer._gather_first_part, "experts")
        gather = without_wait(ReplicaTransfers.gather_first_part, "_experts")
        ReplicaTransfers.gather_first_part = gather


def never_await_parameters() -> None:
    """Remove the wait for gathered parameters."""
    from megatron_fssdp.megatron_adapter.experts import gradient_sync

    gradient_sync.await_parameters = lambda experts: None
