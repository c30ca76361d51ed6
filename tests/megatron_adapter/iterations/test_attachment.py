"""Models that join a strategy, and leave it when their loop drops them."""

import gc
import weakref

import torch
import torch.distributed as dist

import megatron_fssdp
from tests.support.training_preload import on_ranks

from . import host_loops


def wrapped():
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    config = host_loops.config()
    ddp = host_loops.finished(DistributedDataParallelConfig, use_distributed_optimizer=True)
    return DistributedDataParallel(config, ddp, host_loops.build(config))


@on_ranks(2, ep=2)
def test_a_model_that_is_dropped_gives_its_memory_back():
    """NeMo-RL wraps a reference, too, copies its weights, and drops it."""
    for strategy in (("none", {}), ("ep", {}), ("fssdp", {"slots": 2, "overlap_degree": 3})):
        attachment = megatron_fssdp.attach(*strategy)
        trained, reference = wrapped(), wrapped()
        of_reference, rank = weakref.ref(reference), dist.get_rank()
        assert len(attachment.models) == 2
        tokens = torch.arange(host_loops.LENGTH)[None] + rank
        with torch.no_grad():
            reference.eval()(tokens, tokens - rank, torch.ones(1, 1, 1, 1, dtype=torch.bool))
        del reference
        gc.collect()
        assert len(attachment.models) == 1
        assert of_reference() is None
        del trained
