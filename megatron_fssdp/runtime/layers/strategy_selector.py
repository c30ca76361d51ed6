"""Selects the strategies of all layers of a pipeline stage under ``auto``, the same on all ranks."""

import sys
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from megatron_fssdp.runtime.layers.slot_layer import SlotLayer
from megatron_fssdp.strategies.auto_strategy import AutoStrategy, SelectionReport


class StrategySelector:
    """Asks ``auto`` at its interval to select strategies.

    Ranks of the groups must select the same strategies: first the expert-parallel group, then those of ranks
    that share experts or owners. ``device`` has the tensors for collectives.
    """

    def __init__(
        self, strategy: AutoStrategy, groups: Sequence[dist.ProcessGroup], device: torch.device
    ) -> None:
        self._strategy, self._groups, self._device = strategy, groups, device

    def select(self, layers: Sequence[SlotLayer], iteration: int) -> SelectionReport | None:
        """Reconsider strategies if the strategy does so after ``iteration`` complete iterations.

        All ranks of all groups must call it, with at least one layer of the pipeline stage.
        """
        is_measured = layers[0].context.profile is not None
        num_known = torch.tensor(layers[0].history.num_seen, device=self._device)
        if not is_measured or not self._strategy.selects_at(iteration, sys.maxsize):
            return None
        for group in self._groups:  # A group that ran no micro-batches in an iteration knows fewer of them.
            dist.all_reduce(num_known, op=dist.ReduceOp.MIN, group=group)
        if not self._strategy.selects_at(iteration, int(num_known)):
            return None
        # The ranks of a group have the same loads, so each rank prices only a part of the layers.
        group = self._groups[0]
        own = slice(group.rank(), None, group.size())
        prices = self._strategy.price(
            [layer.context for layer in layers[own]], [layer.history for layer in layers[own]]
        )
        seconds_LC = np.zeros((len(layers), prices.shape[1]))
        seconds_LC[own] = prices
        agreed_LC = torch.from_numpy(seconds_LC).to(self._device)
        for group in self._groups:
            # Ranks with copies of the experts have other loads. The largest seconds count, because the other
            # ranks wait for the slowest.
            dist.all_reduce(agreed_LC, op=dist.ReduceOp.MAX, group=group)
        return self._strategy.select([layer.context.layer for layer in layers], agreed_LC.cpu().numpy())
