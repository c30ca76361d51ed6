"""Selects the strategies of all layers of a pipeline stage under ``auto``, the same on all ranks."""

import sys
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from megatron_fssdp.runtime.layers.slot_layer import SlotLayer
from megatron_fssdp.strategies.auto.auto_strategy import AutoStrategy, SelectionReport


def select_strategies(
    strategy: AutoStrategy, groups: Sequence[dist.ProcessGroup], layers: Sequence[SlotLayer], iteration: int
) -> SelectionReport | None:
    """Reconsider the layers' strategies if ``auto`` does so after ``iteration`` complete iterations.

    All ranks of all groups must call it, with at least one layer of the pipeline stage, and select the same
    strategies: first the expert-parallel group, then those of ranks that share experts or owners.
    """
    device = layers[0].local.experts.device
    num_known = torch.tensor(layers[0].history.num_seen, device=device)
    if layers[0].local.context.profile is None or not strategy.selects_at(iteration, sys.maxsize):
        return None
    for group in groups:  # A group that ran no micro-batches in an iteration knows fewer of them.
        dist.all_reduce(num_known, op=dist.ReduceOp.MIN, group=group)
    if not strategy.selects_at(iteration, int(num_known)):
        return None
    # The ranks of a group have the same loads, so each rank prices only a part of the layers.
    group = groups[0]
    own = slice(group.rank(), None, group.size())
    prices = strategy.price(
        [layer.local.context for layer in layers[own]], [layer.history for layer in layers[own]]
    )
    seconds_LC = np.zeros((len(layers), prices.shape[1]))
    seconds_LC[own] = prices
    agreed_LC = torch.from_numpy(seconds_LC).to(device)
    for group in groups:
        # Ranks with copies of the experts have other loads. The largest seconds count, because the other
        # ranks wait for the slowest.
        dist.all_reduce(agreed_LC, op=dist.ReduceOp.MAX, group=group)
    return strategy.select([layer.local.context.layer for layer in layers], agreed_LC.cpu().numpy())
