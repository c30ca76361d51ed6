"""Ways in which uneven owners and replicas could hang, crash or silently go wrong in Megatron.

Each test trains and compares the losses with stock Megatron's. It then trains without the one protection
against the fault, and the comparison must detect that.

One rank owns all experts of the first half of a pipeline stage's layers, the other rank those of the
second half. Slots therefore hold experts of other layers and of other model chunks.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_fssdp.planning.placement.owner_map import OwnerMap
from megatron_fssdp.testing.ranks import RankError

from ..training_run import relative_difference, train, train_on_all_ranks

LAYOUT = "--expert-model-parallel-size 2 --train-iters 6 --disable-bias-linear --lr 5e-3"
FSSDP = "--moe-strategy fssdp --moe-strategy-set reshard_interval=2"
REPLICAS = f"{FSSDP} --moe-strategy-set slots=2 --moe-strategy-set overlap_degree=4"
OWNERS_ONLY = f"{FSSDP} --moe-strategy-set slots=0 --moe-strategy-set overlap_degree=0"
DISTRIBUTED = "--use-distributed-optimizer"
SILENT = 1e-6  # relative difference to stock Megatron's losses that counts as equal
HANGS_S = 15  # several times what the training takes


def gather_layers_on_one_device() -> None:
    """Re-shard to the map of this file, independent of loads."""
    from megatron_fssdp.strategies.fssdp import FssdpStrategy

    def reshard(self: Any, contexts: Sequence[Any], load_LE: np.ndarray, owners: OwnerMap) -> OwnerMap:
        del self, contexts, load_LE
        layer_L = np.arange(owners.num_layers) * owners.num_devices // owners.num_layers
        return owners.with_owners(np.repeat(layer_L[:, None], owners.num_experts, axis=1))

    FssdpStrategy.reshard = reshard  # type: ignore[method-assign]


# ---------------------------------------------------------------- 1: a hang


@pytest.mark.parametrize("replicas", ["REPLICAS", "OWNERS_ONLY"])
def test_a_rank_that_owns_no_expert_of_a_layer_trains_correctly(replicas: str, text_data: Path) -> None:
    """It computes only replicas, or nothing at all; its rows must still be a part of the autograd graph."""
    stock = train(2, LAYOUT, text_data)
    ours = train(2, f"{LAYOUT} {globals()[replicas]}", text_data, before=gather_layers_on_one_device)
    assert relative_difference(ours.losses, stock.losses) <= SILENT


@pytest.mark.slow
def test_a_rank_that_drops_its_rows_hangs(text_data: Path) -> None:
    with pytest.raises(RankError):
        train(
            2,
            f"{LAYOUT} {OWNERS_ONLY}",
            text_data,
            before=forget_rows_without_experts,
            timeout_s=HANGS_S,
        )


def forget_rows_without_experts() -> None:
    """On a rank without experts, cut the received (empty) rows out of the graph."""
    from megatron_fssdp.megatron_adapter.experts.slot_experts import SlotExperts

    gather_layers_on_one_device()
    original = SlotExperts.compute

    def compute(self: SlotExperts, rows: Any, *others: Any, **buffers: Any) -> Any:
        output, bias = original(self, rows, *others, **buffers)
        return (output if len(output) else rows.new_zeros(rows.shape)), bias

    SlotExperts.compute = compute  # type: ignore[method-assign]


# ---------------------------------------------------------------- 2: stale parameters


@pytest.mark.slow
def test_parameters_of_slots_in_other_layers_are_current(text_data: Path) -> None:
    # Parameters are gathered by bucket, and every layer's experts have their own bucket.
    arguments = f"{LAYOUT} {DISTRIBUTED} --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 8000"
    stock = train(4, arguments, text_data)
    ours = train(4, f"{arguments} {REPLICAS}", text_data, before=gather_layers_on_one_device)
    assert relative_difference(ours.losses, stock.losses) <= SILENT
    # Megatron's hooks serve the owners in any case; replicas would be copies of stale parameters.
    broken = train(4, f"{arguments} {REPLICAS}", text_data, before=await_the_layers_own_slots)
    assert relative_difference(broken.losses, stock.losses) > 10 * SILENT


def await_the_layers_own_slots() -> None:
    """Have a layer wait only for the parameters that it was built with."""
    from megatron_fssdp.megatron_adapter.experts import gradient_sync
    from megatron_fssdp.megatron_adapter.experts.expert_slots import ExpertSlots

    gather_layers_on_one_device()

    def await_parameters(self: ExpertSlots, layer: int) -> None:
        gradient_sync.await_parameters(self._experts[layer].module)

    ExpertSlots.await_parameters = await_parameters  # type: ignore[method-assign]


OVERLAPS = (
    "--expert-model-parallel-size 2 --use-distributed-optimizer --overlap-grad-reduce "
    "--overlap-param-gather --train-iters 6 --ddp-bucket-size 8000 --num-layers 3 --lr 1e-2 --min-lr 1e-3"
)
SPLIT = (
    f"{OVERLAPS} --moe-strategy fssdp --moe-strategy-set slots=4 --moe-strategy-set overlap_degree=4 "
    "--moe-strategy-set rematerialize=false --moe-strategy-set reshard_interval=0"
)


@pytest.mark.slow
def test_replicas_wait_for_overlapped_parameter_gathers(text_data: Path) -> None:
    """Without the parameters' pre-hooks, replicas would have the previous iteration's weights."""
    stock = train(4, OVERLAPS, text_data)
    whole = train(4, SPLIT, text_data)
    assert relative_difference(whole.losses, stock.losses) <= 1e-5
    broken = train(4, SPLIT, text_data, before=never_await_parameters)
    assert relative_difference(broken.losses, stock.losses) > 1e-4
    # The experts of the layer before are running when the first part of a split transfer is packed.
    assert train(4, SPLIT, text_data, before=split_transfers).losses == whole.losses
    stale = train(4, SPLIT, text_data, before=partial(split_transfers, awaits=False))
    assert relative_difference(stale.losses, whole.losses) > 1e-4


def split_transfers(*, awaits: bool = True) -> None:
    """Split every transfer in halves; without ``awaits``, pack the first half without a wait."""
    from megatron_fssdp.planning.cost.transfer_split import TransferSplit
    from megatron_fssdp.runtime.layers.layer_planner import LayerPlanner
    from megatron_fssdp.runtime.layers.slot_layer import SlotLayer
    from megatron_fssdp.runtime.slots.replica_transfers import ReplicaTransfers
    from megatron_fssdp.strategies.fssdp import FssdpStrategy

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
    prepare = FssdpStrategy.__init__

    def prepare_to_split(self, settings):
        prepare(self, settings)
        self.splits = True

    FssdpStrategy.__init__ = prepare_to_split  # type: ignore[method-assign]
    if not awaits:
        SlotLayer._gather_first_part = without_wait(SlotLayer._gather_first_part, "experts")
        gather = without_wait(ReplicaTransfers.gather_first_part, "_experts")
        ReplicaTransfers.gather_first_part = gather


def never_await_parameters() -> None:
    """Remove the wait for gathered parameters."""
    from megatron_fssdp.megatron_adapter.experts import gradient_sync

    gradient_sync.await_parameters = lambda experts: None


# ---------------------------------------------------------------- 3: optimizer state by bucket position


def test_an_unsupported_checkpoint_format_is_refused_on_all_ranks(text_data: Path, tmp_path: Path) -> None:
    """test_checkpoint_arguments.py has more options that are refused."""
    runs = train_on_all_ranks(2, f"{LAYOUT} {FSSDP} --save {tmp_path} --ckpt-format torch", text_data)
    assert [run.exit_code for run in runs] == [2, 2]
    assert "--ckpt-format torch_dist" in runs[0].errors
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_optimizer_state_by_bucket_position_would_reach_wrong_experts(
    text_data: Path, tmp_path: Path
) -> None:
    arguments = f"{LAYOUT} {DISTRIBUTED} --ckpt-format torch_dist"
    stock = train(2, arguments, text_data)
    differences = {}
    for name, before in (
        ("kept", gather_layers_and_replace_nothing),
        ("replaced", gather_layers_on_one_device),
    ):
        folder = tmp_path / name
        train(
            2,
            f"{arguments} {OWNERS_ONLY} --save {folder} --save-interval 3 --exit-interval 3",
            text_data,
            before=before,
        )
        # Stock Megatron reads the format from the checkpoint.
        rest = train(2, f"{arguments} --load {folder}", text_data)
        differences[name] = relative_difference(rest.losses, stock.losses[3:])
    assert differences["replaced"] <= SILENT
    assert differences["kept"] > 10 * SILENT


def gather_layers_and_replace_nothing() -> None:
    """Keep the default checkpoint format."""
    from megatron_fssdp.megatron_adapter.entry import registration

    gather_layers_on_one_device()
    registration.CHECKPOINT_REPLACEMENTS = ()


# ---------------------------------------------------------------- 4: late gradients


@pytest.mark.slow
def test_gradients_reach_slots_of_other_model_chunks_in_time(text_data: Path) -> None:
    arguments = (
        f"{LAYOUT} --pipeline-model-parallel-size 2 --num-layers 4 --overlap-grad-reduce "
        "--num-layers-per-virtual-pipeline-stage 1 --global-batch-size 16"
    )
    stock = train(4, arguments, text_data)
    ours = train(4, f"{arguments} {REPLICAS}", text_data, before=gather_layers_on_one_device)
    assert relative_difference(ours.losses, stock.losses) <= SILENT
    assert relative_difference(ours.grad_norms, stock.grad_norms) <= 10 * SILENT
    broken = train(4, f"{arguments} {REPLICAS}", text_data, before=reduce_when_megatron_starts)
    assert relative_difference(broken.grad_norms, stock.grad_norms) > 100 * SILENT


def reduce_when_megatron_starts() -> None:
    """Reduce a bucket's gradients when the schedule starts it; send the rest to their owners at the end."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

    from megatron_fssdp.megatron_adapter.experts import gradient_sync

    gather_layers_on_one_device()
    gradient_sync._installed = True
    finish = _ParamAndGradBucketGroup.finish_grad_sync

    def finish_grad_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        finish_gradients = gradient_sync._finisher(self)
        result = finish(self, *args, **kwargs)
        if finish_gradients is not None:
            finish_gradients()
        return result

    _ParamAndGradBucketGroup.finish_grad_sync = finish_grad_sync
