"""Complete checkpoints of experts in other slots than Megatron assigned.

Stock training runs; right before a save, the contents of all slots are moved to random places. What the save
writes must be, bit for bit, what stock Megatron writes. test_resumed_owners.py loads such checkpoints.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_fssdp.megatron_adapter.experts.expert_slots import StageOwners

from ..training_run import rows, train, wrap
from ..uneven_owners import expert_modules, follow_all, permute_contents, random_stage

COMMON = "{TORCH_DIST} --no-load-rng --no-save-rng --train-iters 4"
UNEVEN = "uneven"  # folder beside the stock checkpoint

# name | ranks | arguments. Ranks / EP / PP copies of each expert.
WRITERS = rows(
    """
    ep4 | 4 | {EP4}
    ep2_bf16_swiglu_dense_layers | 2 | {EP2} --bf16 {GATED} --num-layers 4 --moe-layer-freq [0,1,1,0]
    ep2_of_4_pp2_swiglu | 4 | {EP2} {PP2} --num-layers 4 {GATED}
    ep2_of_4 | 4 | {EP2}
    ep2_distributed_optimizer | 2 | {EP2} --bf16 {RESHARDABLE}
    """
)


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITERS)
def test_an_uneven_map_writes_the_stock_checkpoint(name: str, text_data: Path, tmp_path: Path) -> None:
    world_size, arguments = WRITERS[name]
    saving = f"--save {tmp_path} --save-interval 2 --exit-interval 2"
    train(int(world_size), f"{COMMON} {arguments} {saving}", text_data, before=save_twice)
    stock, uneven = (stored_tensors(folder, 2) for folder in (tmp_path, tmp_path / UNEVEN))
    assert any("exp_avg_sq" in key and "experts" in key for key in stock)
    assert differing_keys(stock, uneven) == []


def save_twice() -> None:
    """Have every save also write the model with its experts in random slots."""
    from megatron.training import get_args, training

    def save_both(save: Any, iteration: int, model: Any, optimizer: Any, *rest: Any, **kwargs: Any) -> None:
        save(iteration, model, optimizer, *rest, **kwargs)
        permute_contents(model, optimizer, scatter_experts(model))
        get_args().save += f"/{UNEVEN}"
        save(iteration, model, optimizer, *rest, **kwargs)

    wrap(training, "save_checkpoint", save_both)


def scatter_experts(model: Any) -> StageOwners:
    """Put the model's experts into random slots for all further checkpoints."""
    modules = expert_modules(model)
    numbers = sorted(modules)
    first = modules[numbers[0]]
    num_devices = first.ep_group.size()
    num_experts = first.num_local_experts * num_devices
    stage = random_stage(np.random.default_rng(7), numbers, num_experts, num_devices)
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
