"""What a strategy's plan costs by :func:`layer_seconds`, so that strategies can be compared with each other.

Shape letters: D devices, E experts.
"""

import numpy as np

from megatron_fssdp.planning.cost.layer_seconds import LayerPrice, LayerWork, counts_seconds, layer_seconds
from megatron_fssdp.planning.cost.transfer_split import WHOLE
from megatron_fssdp.planning.transfer.transfer_plan import additional_transfer
from megatron_fssdp.strategies.strategy import LayerContext, LayerPlan


def plan_price(
    plan: LayerPlan,
    counts_DE: np.ndarray,
    context: LayerContext,
    *,
    num_micro_batches: int = 1,
    planned: LayerPlan | None = None,
) -> LayerPrice:
    """Modelled seconds of a layer in an iteration under a plan, by what they go on.

    Args:
        plan: What is executed.
        counts_DE: (token, k) pairs of an iteration by source and expert, int64 ``[D, E]``.
        context: The layer; it has a profile.
        num_micro_batches: Micro-batches of the iteration; each has its part of the counts.
        planned: What was planned before the gate, if that is not ``plan``.
    """
    profile, topology = context.profile, context.topology
    if profile is None:
        raise ValueError(f"layer {context.layer}: got no profile, wanted measured costs to count with")
    planned = planned or plan
    addition = None
    if planned is not plan and not plan.each_micro_batch:
        addition = additional_transfer(planned.placement, plan.placement, topology)
    work = LayerWork.of(
        plan.traffic(counts_DE, topology, num_micro_batches),
        plan.transfer,
        topology,
        planned=planned.transfer,
        addition=addition,
    )
    return layer_seconds(
        work,
        profile,
        plan.life,
        counts_s=counts_seconds(profile, topology, context.num_experts),
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
    """All seconds of :func:`plan_price`, both passes and the compute before the layer."""
    price = plan_price(plan, counts_DE, context, num_micro_batches=num_micro_batches, planned=planned)
    return float(price.seconds)
