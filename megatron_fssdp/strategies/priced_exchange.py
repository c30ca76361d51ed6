"""Decides with each plan whether a layer's tokens travel by the deduplicated exchange (ours).

With ``exchange=by_price``, both exchanges are priced for the plan's replicas under the forecast of the loads.
The second hop adds start-ups and bytes inside nodes, so the deduplicated exchange does not pay with top-1
routing, small rows, or links between nodes that are as fast as those inside.

Shape letters: D devices, E experts.
"""

from dataclasses import dataclass, replace

import numpy as np

from megatron_fssdp.planning.loads import LoadHistory
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.plan_seconds import plan_seconds
from megatron_fssdp.strategies.strategy import Strategy

LEAST_GAIN = 0.08
"""Share of a layer's modelled seconds that the deduplicated exchange must save.

The price knows neither the host's work for the second hop nor the copies of rows. On the testbed, with
balanced routing and top-2, 4 and 8, it promises 4, 14 and 29 % of a layer's seconds, and -6, 9 and 23 % were
measured (docs/log.md). Between the first two, the exchange breaks even at a promise of 8 %.
"""


@dataclass(frozen=True)
class ExchangeSeconds:
    """Modelled seconds of a layer in an iteration under both exchanges.

    Attributes:
        megatron_s: Seconds if a token travels once for each of its experts.
        deduplicated_s: Seconds if a token travels once to each node and device.
    """

    megatron_s: float
    deduplicated_s: float

    @property
    def saves(self) -> bool:
        """Whether the deduplicated exchange saves enough to use it."""
        return self.deduplicated_s < (1 - LEAST_GAIN) * self.megatron_s


def exchange_seconds(context: LayerContext, history: LoadHistory, plan: LayerPlan) -> ExchangeSeconds | None:
    """Price a plan under both exchanges; ``None`` without measured costs or without a forecast.

    Args:
        context: Data of the layer.
        history: Loads of the iterations before.
        plan: Plan of the layer.
    """
    if context.profile is None or context.profile.choices is None or not len(history):
        return None
    counts_DE = np.rint(history.forecast_DE()).astype(np.int64)
    times = context.profile.num_micro_batches
    megatron_s, deduplicated_s = (
        plan_seconds(plan, counts_DE, with_exchange(context, deduplicated), num_micro_batches=times)
        for deduplicated in (False, True)
    )
    return ExchangeSeconds(megatron_s, deduplicated_s)


def is_deduplicated(strategy: Strategy, context: LayerContext, history: LoadHistory, plan: LayerPlan) -> bool:
    """Whether the layer's tokens travel by the deduplicated exchange: always, never, or if it saves seconds.

    Args:
        strategy: Strategy that planned the layer.
        context: Data of the layer.
        history: Loads of the iterations before.
        plan: Plan of the layer.
    """
    if strategy.exchange != "by_price" or context.num_devices == 1:
        return strategy.exchange == "deduplicated"
    seconds = exchange_seconds(context, history, plan)
    return seconds is not None and seconds.saves


def with_exchange(context: LayerContext, deduplicated: bool) -> LayerContext:
    """The data of a layer with prices of one of the exchanges.

    Args:
        context: Data of the layer.
        deduplicated: Whether prices count the deduplicated exchange.
    """
    profile = context.profile
    if profile is None or profile.deduplicated == deduplicated:
        return context
    return replace(context, profile=replace(profile, deduplicated=deduplicated))
