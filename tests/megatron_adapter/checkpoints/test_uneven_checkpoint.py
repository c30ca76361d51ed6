"""Complete checkpoints of experts in other slots than Megatron assigned.

Stock training runs; right before a save, the contents of all slots are moved to random
places. What the save writes must be, bit for bit, what stock Megatron writes.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_fssdp.megatron_adapter.experts.expert_slots import StageOwners

from ..training_run import train
from ..uneven_owners import all_slot_tensors, expert_modules, follow_all, permute_contents, random_stage

LAYOUT = "--ckpt-format torch_dist --no-load-rng --no-save-rng --train-iters 4"
UNEVEN = "uneven"  # folder beside the stock checkpoint

# name: (ranks, arguments). Ranks / EP / PP copies of each expert.
WRITERS = {
    "ep4": (4, "--expert-model-parallel-size 4"),
    "ep2_bf16_swiglu_dense_layers": (
        2,
        "--expert-model-parallel-size 2 --bf16 --swiglu --disable-bias-linear --num-layers 4 "
        "--moe-layer-freq [0,1,1,0]",
    ),
    "ep2_of_4_pp2_swiglu": (
        4,
        "--expert-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers 4 --swiglu "
        "--disable-bias-linear",
    ),
    "ep2_of_4": (4, "--expert-model-parallel-size 2"),
    "ep2_distributed_optimizer": (
        2,
        "--expert-model-parallel-size 2 --bf16 --use-distributed-optimizer "
        "--dist-ckpt-optim-fully-reshardable",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITERS)
def test_an_uneven_map_writes_the_stock_checkpoint(name: str, text_data: Path, tmp_path: Path) -> None:
    world_size, layout = WRITERS[name]
    _write(world_size, layout, text_data, tmp_path)
    stock, uneven = (stored_tensors(folder, 2) for folder in (tmp_path, tmp_path / UNEVEN))
    assert any("exp_avg_sq" in key and "experts" in key for key in stock)
    assert differing_keys(stock, uneven) == []


@pytest.mark.slow
def test_stock_megatron_loads_the_checkpoint_at_any_expert_parallel_size(
    text_data: Path, tmp_path: Path
) -> None:
    _write(4, "--expert-model-parallel-size 4 --disable-bias-linear", text_data, tmp_path)
    # Without expert parallelism, Megatron has other parameter groups and finds no optimizer state.
    for expert_parallel, options in ((1, "--no-load-optim"), (2, ""), (4, "")):
        runs = [
            train(
                expert_parallel,
                f"{LAYOUT} --disable-bias-linear --expert-model-parallel-size {expert_parallel} {options} "
                f"--load {folder}",
                text_data,
                launcher=False,
            )
            for folder in (tmp_path, tmp_path / UNEVEN)
        ]
        assert len(runs[0].losses) == 2
        assert runs[1].losses == runs[0].losses
        assert runs[1].grad_norms == runs[0].grad_norms


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer", ["", "--bf16 --use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"]
)
def test_a_stock_checkpoint_loads_under_an_uneven_map(
    optimizer: str, text_data: Path, tmp_path: Path
) -> None:
    layout = f"{LAYOUT} {optimizer}"
    train(
        4,
        f"{layout} --expert-model-parallel-size 4 --save {tmp_path} --save-interval 2 --exit-interval 2",
        text_data,
    )
    train(
        2,
        f"{layout} --expert-model-parallel-size 2 --load {tmp_path} --save {tmp_path / 'again'} "
        "--save-interval 100",
        text_data,
        before=load_unevenly_and_save,
    )
    stock, again = (stored_tensors(folder, 2) for folder in (tmp_path, tmp_path / "again"))
    # One object for each rank, and the other run had more ranks.
    assert [key for key in differing_keys(stock, again) if not key.startswith("rerun_state")] == []


def _write(world_size: int, layout: str, data: Path, folder: Path) -> None:
    train(
        world_size,
        f"{LAYOUT} {layout} --save {folder} --save-interval 2 --exit-interval 2",
        data,
        before=save_twice,
    )


def save_twice() -> None:
    """Have every save also write the model with its experts in random slots."""
    from megatron.training import get_args, training

    save = training.save_checkpoint

    def save_checkpoint(iteration: int, model: Any, optimizer: Any, *rest: Any, **kwargs: Any) -> None:
        save(iteration, model, optimizer, *rest, **kwargs)
        args = get_args()
        stage = scatter_experts(model)
        permute_contents(model, optimizer, stage)
        args.save = f"{args.save}/{UNEVEN}"
        save(iteration, model, optimizer, *rest, **kwargs)

    training.save_checkpoint = save_checkpoint


def load_unevenly_and_save() -> None:
    """Load with experts in random slots, save what was loaded, and end the run."""
    from megatron.training import training

    load = training.load_checkpoint

    def load_checkpoint(model: Any, optimizer: Any, scheduler: Any, *rest: Any, **kwargs: Any) -> None:
        stage = scatter_experts(model)
        iteration, flops = load(model, optimizer, scheduler, *rest, **kwargs)
        training.save_checkpoint(iteration, model, optimizer, scheduler, flops)
        # The slots hold in another order what was just saved in stock order.
        contents = [tensor.clone() for tensor in all_slot_tensors(model, optimizer, stage)]
        permute_contents(model, optimizer, stage)
        moved = zip(contents, all_slot_tensors(model, optimizer, stage), strict=True)
        assert not all(torch.equal(old, new) for old, new in moved)
        raise SystemExit(0)

    training.load_checkpoint = load_checkpoint


def scatter_experts(model: Any) -> StageOwners:
    """Put the model's experts into random slots for all further checkpoints."""

    modules = expert_modules(model)
    numbers = sorted(modules)
    first = modules[numbers[0]]
    num_devices = first.ep_group.size()
    stage = random_stage(
        np.random.default_rng(7), numbers, first.num_local_experts * num_devices, num_devices
    )
    follow_all([modules[number] for number in numbers], lambda: stage)
    return stage


def stored_tensors(folder: Path, iteration: int) -> dict[str, torch.Tensor | None]:
    """Whole tensors of a checkpoint by key; other entries are ``None``."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = dcp.FileSystemReader(folder / f"iter_{iteration:07d}")
    entries = reader.read_metadata().state_dict_metadata
    tensors = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return {key: tensors.get(key) for key in entries}


def differing_keys(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Keys that only one has, or whose tensors are not equal bit for bit."""
    shared = one.keys() & other.keys()
    unequal = {key for key in shared if one[key] is not None and not torch.equal(one[key], other[key])}
    return sorted(unequal | (one.keys() ^ other.keys()))
