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

from ..training_run import assert_close, relative_difference, train, train_on_all_ranks, wrap

COMMON = "{EP2} --train-iters 6 {NO_BIAS} --lr 5e-3"
REPLICAS = "fssdp reshard_interval=2 slots=2 overlap_degree=4"
OWNERS_ONLY = "fssdp reshard_interval=2 slots=0 overlap_degree=0"
SILENT = 1e-6  # relative difference to stock Megatron's losses that counts as equal
HANGS_S = 15  # several times what the training takes


def gather_layers_on_one_device() -> None:
    """Re-shard to the map of this file, independent of loads."""
    from megatron_fssdp.strategies.fssdp import FssdpStrategy

    def reshard(self: Any, contexts: Sequence[Any], load_LE: np.ndarray, owners: OwnerMap) -> OwnerMap:
        layer_L = np.arange(owners.num_layers) * owners.num_devices // owners.num_layers
        return owners.with_owners(np.repeat(layer_L[:, None], owners.num_experts, axis=1))

    FssdpStrategy.reshard = reshard


# ---------------------------------------------------------------- 1: a hang


@pytest.mark.parametrize("strategy", [REPLICAS, OWNERS_ONLY])
def test_a_rank_that_owns_no_expert_of_a_layer_trains_correctly(strategy: str, text_data: Path) -> None:
    """It computes only replicas, or nothing at all; its rows must still be a part of the autograd graph."""
    stock = train(2, COMMON, text_data)
    ours = train(2, COMMON, text_data, strategy=strategy, before=gather_layers_on_one_device)
    assert relative_difference(ours.losses, stock.losses) <= SILENT


@pytest.mark.slow
def test_a_rank_that_drops_its_rows_hangs(text_data: Path) -> None:
    options: Any = {"before": forget_rows_without_experts, "timeout_s": HANGS_S}
    with pytest.raises(RankError):
        train(2, COMMON, text_data, strategy=OWNERS_ONLY, **options)


def forget_rows_without_experts() -> None:
    """On a rank without experts, cut the received (empty) rows out of the graph."""
    from megatron_fssdp.megatron_adapter.experts.slot_experts import SlotExperts

    def compute(original: Any, self: SlotExperts, rows: Any, *others: Any, **buffers: Any) -> Any:
        output, bias = original(self, rows, *others, **buffers)
        return (output if len(output) else rows.new_zeros(rows.shape)), bias

    gather_layers_on_one_device()
    wrap(SlotExperts, "compute", compute)


# ---------------------------------------------------------------- 2: stale parameters


@pytest.mark.slow
def test_parameters_of_slots_in_other_layers_are_current(text_data: Path) -> None:
    # Parameters are gathered by bucket, and every layer's experts have their own bucket.
    arguments = f"{COMMON} {{OVERLAPS}} --ddp-bucket-size 8000"
    stock = train(4, arguments, text_data)
    ours = train(4, arguments, text_data, strategy=REPLICAS, before=gather_layers_on_one_device)
    assert relative_difference(ours.losses, stock.losses) <= SILENT
    # Megatron's hooks serve the owners in any case; replicas would be copies of stale parameters.
    broken = train(4, arguments, text_data, strategy=REPLICAS, before=await_the_layers_own_slots)
    assert relative_difference(broken.losses, stock.losses) > 10 * SILENT


def await_the_layers_own_slots() -> None:
    """Have a layer wait only for the parameters that it was built with."""
    from megatron_fssdp.megatron_adapter.experts import gradient_sync
    from megatron_fssdp.megatron_adapter.experts.expert_slots import ExpertSlots

    gather_layers_on_one_device()
    ExpertSlots.await_parameters = lambda self, layer: gradient_sync.await_parameters(
        self._experts[layer].module
    )


@pytest.mark.slow
def test_replicas_wait_for_overlapped_parameter_gathers(text_data: Path) -> None:
    """Without the parameters' pre-hooks, replicas would have the previous iteration's weights."""
    arguments = (
        "{EP2} {OVERLAPS} --train-iters 6 --ddp-bucket-size 8000 --num-layers 3 --lr 1e-2 --min-lr 1e-3"
    )
    strategy = "fssdp slots=4 overlap_degree=4 rematerialize=false reshard_interval=0"
    stock = train(4, arguments, text_data)
    whole, broken, in_parts, stale = (
        train(4, arguments, text_data, strategy=strategy, before=before)
        for before in (
            None,
            never_await_parameters,
            split_transfers,
            partial(split_transfers, awaits=False),
        )
    )
    assert relative_difference(whole.losses, stock.losses) <= 1e-5
    assert relative_difference(broken.losses, stock.losses) > 1e-4
    # The experts of the layer before are running when the first part of a split transfer is packed.
    assert in_parts.losses == whole.losses
    assert relative_difference(stale.losses, whole.losses) > 1e-4


def split_transfers(*, awaits: bool = True) -> None:
    """Split every transfer in halves; without ``awaits``, pack the first half without a wait."""
    from megatron_fssdp.planning.cost.transfer_split import TransferSplit
    from megatron_fssdp.runtime.layers.planned_layer import PlannedLayer
    from megatron_fssdp.runtime.layers.slot_layer import SlotLayer
    from megatron_fssdp.runtime.slots.replica_transfers import ReplicaTransfers
    from megatron_fssdp.strategies.fssdp import FssdpStrategy

    def plan_with_split(next_plan: Any, self: Any) -> Any:
        return replace(next_plan(self), split=TransferSplit(0.5, 0.0))

    def without_wait(name: str, gather: Any, self: Any) -> None:
        experts = getattr(self, name)
        setattr(self, name, replace(experts, await_parameters=lambda: None))
        gather(self)
        setattr(self, name, experts)

    def prepare_to_split(prepare: Any, self: Any, settings: Any) -> None:
        prepare(self, settings)
        self.splits = True

    wrap(PlannedLayer, "_next_plan", plan_with_split)
    wrap(FssdpStrategy, "__init__", prepare_to_split)
    if not awaits:
        wrap(SlotLayer, "_gather_first_part", partial(without_wait, "experts"))
        wrap(ReplicaTransfers, "gather_first_part", partial(without_wait, "_experts"))


def never_await_parameters() -> None:
    """Remove the wait for gathered parameters."""
    from megatron_fssdp.megatron_adapter.experts import gradient_sync

    gradient_sync.await_parameters = lambda experts: None


# ---------------------------------------------------------------- 3: optimizer state by bucket position


def test_an_unsupported_checkpoint_format_is_refused_on_all_ranks(text_data: Path, tmp_path: Path) -> None:
    """test_limits.py has more options that are refused."""
    arguments = f"{COMMON} --save {tmp_path} --ckpt-format torch"
    runs = train_on_all_ranks(2, arguments, text_data, strategy=REPLICAS)
    assert [run.exit_code for run in runs] == [2, 2]
    assert "--ckpt-format torch_dist" in runs[0].errors
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_optimizer_state_by_bucket_position_would_reach_wrong_experts(
    text_data: Path, tmp_path: Path
) -> None:
    arguments, differences = f"{COMMON} {{DISTRIBUTED}} {{TORCH_DIST}}", []
    stock = train(2, arguments, text_data)
    for before in (gather_layers_and_replace_nothing, gather_layers_on_one_device):
        folder = tmp_path / before.__name__
        saving = f"{arguments} --save {folder} --save-interval 3 --exit-interval 3"
        train(2, saving, text_data, strategy=OWNERS_ONLY, before=before)
        # Stock Megatron reads the format from the checkpoint.
        rest = train(2, f"{arguments} --load {folder}", text_data)
        differences.append(relative_difference(rest.losses, stock.losses[3:]))
    kept, replaced = differences
    assert replaced <= SILENT
    assert kept > 10 * SILENT


def gather_layers_and_replace_nothing() -> None:
    """Keep the default checkpoint format."""
    from megatron_fssdp.megatron_adapter.support import limits

    gather_layers_on_one_device()
    limits.REPLACED = ()


# ---------------------------------------------------------------- 4: late gradients


@pytest.mark.slow
def test_gradients_reach_slots_of_other_model_chunks_in_time(text_data: Path) -> None:
    arguments = f"{COMMON} {{INTERLEAVED}} --overlap-grad-reduce {{BATCH16}}"
    stock = train(4, arguments, text_data)
    ours = train(4, arguments, text_data, strategy=REPLICAS, before=gather_layers_on_one_device)
    assert_close(ours, stock, SILENT, 10 * SILENT)
    broken = train(4, arguments, text_data, strategy=REPLICAS, before=reduce_when_megatron_starts)
    assert relative_difference(broken.grad_norms, stock.grad_norms) > 100 * SILENT


def reduce_when_megatron_starts() -> None:
    """Reduce a bucket's gradients when the schedule starts it; send the rest to their owners at the end."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

    from megatron_fssdp.megatron_adapter.experts import gradient_sync

    def finish_grad_sync(finish: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        finish_gradients = gradient_sync._finisher(self)
        result = finish(self, *args, **kwargs)
        if finish_gradients is not None:
            finish_gradients()
        return result

    gather_layers_on_one_device()
    gradient_sync._installed = True
    wrap(_ParamAndGradBucketGroup, "finish_grad_sync", finish_grad_sync)
