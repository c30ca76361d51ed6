"""Models that join a strategy, and leave it when their loop drops them."""

import gc
import weakref
from typing import Any

import torch

from tests.support.training_preload import run_megatron_ranks

from . import host_loops


def wrapped() -> Any:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    config = host_loops.config()
    ddp = host_loops.finished(DistributedDataParallelConfig, use_distributed_optimizer=True)
    return DistributedDataParallel(config, ddp, host_loops.build(config))


def drop_references(rank: int, world_size: int) -> list[tuple[int, int, bool]]:
    import megatron_fssdp

    found = []
    for strategy in (("none", {}), ("ep", {}), ("fssdp", {"slots": 2, "overlap_degree": 3})):
        attachment = megatron_fssdp.attach(*strategy)
        trained, reference = wrapped(), wrapped()
        num_joined, of_reference = len(attachment.models), weakref.ref(reference)
        tokens = torch.arange(host_loops.LENGTH)[None] + rank
        with torch.no_grad():
            reference.eval()(tokens, tokens - rank, torch.ones(1, 1, 1, 1, dtype=torch.bool))
        del reference
        gc.collect()
        found.append((num_joined, len(attachment.models), of_reference() is None))
        del trained
    return found


def test_a_model_that_is_dropped_gives_its_memory_back():
    """NeMo-RL wraps a reference, too, copies its weights, and drops it."""
    for of_rank in run_megatron_ranks(drop_references, 2, ep=2):
        assert of_rank == [(2, 1, True)] * 3
