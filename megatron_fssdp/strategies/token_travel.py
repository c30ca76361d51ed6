"""Decides with each plan whether tokens travel in FasterMoE's steps (§4.2) or by the deduplicated exchange.

Where price decides, both ways are priced for the plan's replicas under the forecast of the loads. Without
measured costs or without a forecast, tokens travel in Megatron's way.

Shape letters: D devices, E experts.
"""

from dataclasses import dataclass, replace

import numpy as np

from megatron_fssdp.planning.cost.layer_seconds import exchange_times, expert_seconds
from megatron_fssdp.planning.cost.link_seconds import plain_links
from megatron_fssdp.planning.cost.stepped_exchange import SteppedExchange
from megatron_fssdp.planning.loads import LoadHistory
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.plan_seconds import plan_seconds
from megatron_fssdp.strategies.strategy import Strategy

LEAST_GAIN = 0.08
"""Share of a layer's modelled seconds that the deduplicated exchange must save.

The second hop adds start-ups and bytes inside nodes, and the price knows neither the host's work for it nor
the copies of rows. On the testbed, with balanced routing and top-2, 4 and 8, it promises 4, 14 and 29 % of a
layer's seconds, and -6, 9 and 23 % were measured (docs/decisions.md). Between the first two, the
exchange breaks even at a promise of 8 %.
"""


def in_steps(strategy: Strategy, context: LayerContext, history: LoadHistory, plan: LayerPlan) -> bool:
    """Whether the layer runs in steps: always, never, or if the price of a micro-batch is lower in steps."""
    profile, topology, ring = context.profile, context.topology, strategy.ring(0, context.topology)
    if ring is None or strategy.travel.smart_schedule != "by_price":
        return ring is not None
    if profile is None or not len(history):
        return False
    steps = SteppedExchange.of(ring, topology, profile.messages.step_host_s)
    if steps is None:
        return False
    times, cluster = profile.num_micro_batches, profile.cluster
    dispatch = plan.dispatch(_forecast(history), topology, times)
    tokens = float(dispatch.device_tokens_D.max())
    experts_s = expert_seconds(tokens, profile.flops_per_token, cluster.expert_flops_per_s, times)
    links = plain_links(cluster).all_to_all
    return steps.saves(*exchange_times(links, dispatch.busiest, profile.token_bytes, times), experts_s)


@dataclass(frozen=True)
class ExchangeSeconds:
    """Modelled seconds of a layer in an iteration under Megatron's and under the deduplicated exchange."""

    megatron_s: float
    deduplicated_s: float

    @property
    def saves(self) -> bool:
        """Whether the deduplicated exchange saves enough to use it."""
        return self.deduplicated_s < (1 - LEAST_GAIN) * self.megatron_s


def exchange_seconds(context: LayerContext, history: LoadHistory, plan: LayerPlan) -> ExchangeSeconds | None:
    """Price a layer's plan under both exchanges; ``None`` without measured costs or without a forecast."""
    if context.profile is None or context.profile.choices is None or not len(history):
        return None
    counts_DE, times = _forecast(history), context.profile.num_micro_batches
    ways = (with_exchange(context, deduplicated) for deduplicated in (False, True))
    return ExchangeSeconds(*(plan_seconds(plan, counts_DE, way, num_micro_batches=times) for way in ways))


def is_deduplicated(strategy: Strategy, context: LayerContext, history: LoadHistory, plan: LayerPlan) -> bool:
    """Whether the layer's tokens travel by the deduplicated exchange: always, never, or if it pays."""
    exchange = strategy.travel.exchange
    if exchange != "by_price" or context.num_devices == 1:
        return exchange == "deduplicated"
    seconds = exchange_seconds(context, history, plan)
    return seconds is not None and seconds.saves


def with_exchange(context: LayerContext, deduplicated: bool) -> LayerContext:
    """The data of a layer with prices of the deduplicated exchange, or of Megatron's."""
    profile = context.profile
    if profile is None or profile.deduplicated == deduplicated:
        return context
    return replace(context, profile=replace(profile, deduplicated=deduplicated))


def _forecast(history: LoadHistory) -> np.ndarray:
    return np.rint(history.forecast_DE()).astype(np.int64)
