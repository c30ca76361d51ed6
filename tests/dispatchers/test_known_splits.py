"""The dispatcher that is told the rows of its exchange sets what Megatron's own would find out."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_fssdp.dispatchers.known_splits import KnownSplitsDispatcher
from megatron_fssdp.planning.dispatch.token_dispatch import plan_dispatch
from megatron_fssdp.planning.dispatch.whole_tokens import KnownSplits, whole_tokens
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.slot_tables import SlotTable
from megatron_fssdp.runtime.slots.remap.shares import Shares
from tests.support.training_preload import on_ranks

from ..megatron_adapter.layer.small_config import moe_config

EXPERT_DU = np.array([[0, 1, 3], [2, 3, -1], [4, 5, 0]])
SETTINGS = ("input_splits", "output_splits", "output_splits_tp", "num_out_tokens")
SETTINGS += ("num_global_tokens_per_local_expert", "tokens_per_expert", "cuda_dtoh_point")


@on_ranks(3, ep=3)
@pytest.mark.parametrize("fused", [False, True])
def test_the_rows_are_those_that_megatron_gathers(fused):
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    rank, topology, slots = dist.get_rank(), Topology((0, 0, 1)), SlotTable(EXPERT_DU)
    generator = torch.Generator().manual_seed(rank)
    routing_map = torch.rand(40, 6, generator=generator).argsort(dim=1) < 2
    counts_DE = torch.empty(3, 6, dtype=torch.int64)
    dist.all_gather(list(counts_DE), routing_map.sum(0))
    placement = ExpertPlacement(np.array([0, 0, 1, 1, 2, 2]), slots.slot_ED >= 0)
    quotas_ED = plan_dispatch("even", counts_DE.numpy(), placement, topology).whole_tokens_ED
    tokens = whole_tokens(counts_DE.numpy(), quotas_ED, topology, rank)
    known = Shares.by_intervals(tokens.sent_ED, slots, torch.device("cpu"))
    slot_map, _ = known.remap(routing_map, routing_map.float())

    config = moe_config(3, 8, 9)
    local = list(range(3 * rank, 3 * rank + 3))
    settings = []
    for kind in (MoEAlltoAllTokenDispatcher, KnownSplitsDispatcher):
        dispatcher = kind(3, local, config, get_default_pg_collection())
        config.moe_permute_fusion = fused and kind is KnownSplitsDispatcher
        dispatcher.splits = KnownSplits.of(tokens, slots.expert_DU[rank])
        before = set(vars(dispatcher))
        dispatcher.tokens_per_expert = dispatcher.preprocess(slot_map)
        made = set(vars(dispatcher)) - before
        settings.append((made, {name: np.asarray(getattr(dispatcher, name)).tolist() for name in SETTINGS}))
    (stock_made, stock), (made, ours) = settings
    assert made == stock_made  # Another Megatron may set more, which ours would lack.
    # A number that Megatron knows without counting is the same, too.
    stock["num_out_tokens"] = int(stock["num_out_tokens"])
    assert ours == stock, (ours, stock)
    assert dispatcher.cuda_sync_point == "no_sync"
