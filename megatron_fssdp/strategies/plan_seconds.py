"""The modelled seconds of a strategy's plan by :func:`layer_seconds`, with which strategies are compared.

Shape letters: D devices, E experts.
"""

from dataclasses import replace

import numpy as np

from megatron_fssdp.planning.cost.layer_seconds import (
    LayerPrice,
    LayerWork,
    counts_seconds,
    layer_seconds,
)
from megatron_fssdp.planning.cost.transfer_split import WHOLE
from megatron_fssdp.planning.transfer.transfer_plan import additional_transfer
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan


def plan_price(
    plan: LayerPlan,
    counts_DE: np.ndarray,
    context: LayerContext,
    *,
    num_micro_batches: int = 1,
    planned: LayerPlan | None = None,
) -> LayerPrice:
    """Modelled seconds of a layer in an iteration under a plan, divided into their causes.

    Args:
        plan: Plan that is executed.
        counts_DE: (token, k) pairs of an iteration by source and expert, int64 ``[D, E]``.
        context: Data of the layer, with a profile.
        num_micro_batches: Number of micro-batches in the iteration; each has an equal part of the counts.
        planned: Plan before the gate, if ``after_gate`` replaced it by ``plan``.

    Raises:
        ValueError: The layer has no profile.
    """
    profile, topology = context.profile, context.topology
    if profile is None:
        raise ValueError(
            f"layer {context.layer}: got no profile, wanted measured costs; price plans only after the "
            "strategy's profile_iterations"
        )
    planned = planned or plan
    addition = None
    if planned is not plan and not plan.each_micro_batch:
        addition = additional_transfer(planned.placement, plan.placement, topology)
    work = LayerWork.of(
        plan.dispatch(counts_DE, topology, num_micro_batches),
        plan.transfer,
        topology,
        planned=planned.transfer,
        addition=addition,
    )
    choices = profile.sent_choices
    if choices is not None:
        sent = plan.sent_tokens(counts_DE, topology, choices)
        work = replace(work, pairs=sent, num_choices=choices.top_k)
    counts_s = counts_seconds(profile, topology, context.num_experts)
    if plan.shares_exactly:
        counts_s += counts_s + profile.exact_shares_s
    return layer_seconds(
        work,
        profile,
        plan.life,
        counts_s=counts_s,
        num_micro_batches=num_micro_batches,
        hides=plan.gather_ahead,
        split=plan.split if plan.is_split else WHOLE,
    )


def plan_seconds(
    plan: LayerPlan,
    counts_DE: np.ndarray,
    context: LayerContext,
    *,
    num_micro_batches: int = 1,
    planned: LayerPlan | None = None,
) -> float:
    """Total seconds of :func:`plan_price`: both passes of the layer and the compute before it.

    Args:
        plan: Plan that is executed.
        counts_DE: (token, k) pairs of an iteration by source and expert, int64 ``[D, E]``.
        context: Data of the layer, with a profile.
        num_micro_batches: Number of micro-batches in the iteration; each has an equal part of the counts.
        planned: Plan before the gate, if ``after_gate`` replaced it by ``plan``.
    """
    price = plan_price(plan, counts_DE, context, num_micro_batches=num_micro_batches, planned=planned)
    return float(price.seconds)
