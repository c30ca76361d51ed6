"""Decides with each plan whether the layer runs in the steps of FasterMoE's smart schedule (§4.2).

The runtime and the simulator get all plans from here, so that the decision is the same under every strategy.
How tokens travel (``priced_exchange.py``) is decided here, too. Both decisions are made before the gate, from
the loads of earlier iterations. All micro-batches, backward passes and recomputed forward passes of the
iteration follow them.

Shape letters: D devices, E experts.
"""

from dataclasses import replace

import numpy as np

from megatron_fssdp.planning.cost.layer_seconds import exchange_times, expert_seconds
from megatron_fssdp.planning.cost.link_seconds import plain_links
from megatron_fssdp.planning.cost.stepped_exchange import SteppedExchange
from megatron_fssdp.planning.loads import LoadHistory
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.priced_exchange import is_deduplicated, with_exchange
from megatron_fssdp.strategies.strategy import Strategy


def plan_before_gate(strategy: Strategy, context: LayerContext, history: LoadHistory) -> LayerPlan:
    """The strategy's plan for a layer's iteration, which also says how its tokens travel.

    Args:
        strategy: Strategy that plans the layer.
        context: Data of the layer.
        history: Loads of the last iterations.
    """
    plan = strategy.before_gate(context, history)
    return _decided(
        plan, in_steps(strategy, context, history, plan), is_deduplicated(strategy, context, history, plan)
    )


def plan_after_gate(
    strategy: Strategy, context: LayerContext, counts_DE: np.ndarray, plan: LayerPlan, num_micro_batches: int
) -> LayerPlan:
    """The strategy's plan for exact counts. The decisions of :func:`plan_before_gate` do not change.

    Args:
        strategy: Strategy that plans the layer.
        context: Data of the layer.
        counts_DE: (token, k) pairs of the micro-batch by source device and expert, int64 ``[D, E]``.
        plan: Result of :func:`plan_before_gate`.
        num_micro_batches: Number of micro-batches for which the new plan is used.

    Returns:
        The new plan, or ``plan`` itself.
    """
    context = with_exchange(context, plan.deduplicated)
    new = strategy.after_gate(context, counts_DE, plan, num_micro_batches)
    return _decided(new, plan.in_steps, plan.deduplicated)


def _decided(plan: LayerPlan, in_steps: bool, deduplicated: bool) -> LayerPlan:
    is_same = plan.in_steps == in_steps and plan.deduplicated == deduplicated
    return plan if is_same else replace(plan, in_steps=in_steps, deduplicated=deduplicated)


def in_steps(strategy: Strategy, context: LayerContext, history: LoadHistory, plan: LayerPlan) -> bool:
    """Whether the layer runs in steps: always, never, or if the price of a micro-batch is lower in steps.

    Without measured costs or without a forecast, nothing is known about the price, and the layer exchanges
    with all devices at once.
    """
    if not strategy.smart_schedule or context.num_devices == 1:
        return False
    if strategy.smart_schedule != "by_price":
        return True
    profile, topology = context.profile, context.topology
    ring = strategy.ring(0, topology)
    if profile is None or ring is None or not len(history):
        return False
    steps = SteppedExchange.of(ring, topology, profile.messages.step_host_s)
    if steps is None:
        return False
    times = profile.num_micro_batches
    counts_DE = np.rint(history.forecast_DE()).astype(np.int64)
    dispatch = plan.dispatch(counts_DE, topology, times)
    links = plain_links(profile.cluster).all_to_all
    experts_s = expert_seconds(
        float(dispatch.device_tokens_D.max()),
        profile.flops_per_token,
        profile.cluster.expert_flops_per_s,
        times,
    )
    return steps.saves(*exchange_times(links, dispatch.busiest, profile.token_bytes, times), experts_s)
