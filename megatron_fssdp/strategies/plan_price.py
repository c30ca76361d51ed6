"""The modelled seconds of plans, which decide about every choice.

Shape letters: D devices, E experts, L MoE layers.
"""

from collections.abc import Iterable

import numpy as np

from megatron_fssdp.planning.compiled_form import kernel
from megatron_fssdp.planning.cost.cost_model import BACKWARD_PER_FORWARD
from megatron_fssdp.planning.cost.deduplicated_traffic import expected_hops, hops_traffic
from megatron_fssdp.planning.cost.layer_seconds import LayerPrice, layer_costs, transfer_times
from megatron_fssdp.planning.cost.link_seconds import NO_TRANSFER, gather_counts_s, transfer_traffic
from megatron_fssdp.planning.transfer.transfer_plan import TransferPlan, additional_transfer
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan


def plan_price(
    plan: LayerPlan,
    counts_DE: np.ndarray,
    context: LayerContext,
    *,
    num_micro_batches: int | None = None,
    planned: LayerPlan | None = None,
) -> LayerPrice:
    """Modelled seconds of a layer in an iteration under a plan, divided into their causes.

    ``counts_DE`` are (token, k) pairs of an iteration, int64 ``[D, E]``, in equal micro-batches, by default
    as many as the profile's. ``planned`` is the plan before the gate, if ``after_gate`` replaced it by
    ``plan``.
    """
    profile, topology, addition, planned = context.costs, context.topology, NO_TRANSFER, planned or plan
    if planned is not plan and not plan.each_micro_batch:
        added = additional_transfer(planned.placement, plan.placement, topology)
        addition = transfer_traffic(added, topology)
    times = num_micro_batches or profile.num_micro_batches
    dispatch, choices = plan.dispatch(counts_DE, topology, times), profile.sent_choices
    if choices is None:
        pairs = dispatch.busiest
    else:
        # Other dispatches than the even one are estimated like it: they differ in few of the tokens.
        pairs = hops_traffic(expected_hops(counts_DE, plan.placement, topology, choices))
    counts_s = gather_counts_s(profile.links, topology, context.num_experts)
    if plan.shares_exactly:
        counts_s += counts_s + profile.exact_shares_s
    transfers = [transfer_traffic(made.transfer, topology) for made in (plan, planned)] + [addition]
    costs = layer_costs(
        profile,
        plan.life,
        counts_s,
        max(traffic.num_hops for traffic in transfers),
        num_micro_batches=times,
        hides=plan.gather_ahead,
        early=plan.early if plan.is_split else 0.0,
        choices=choices,
    )
    moves = ((*traffic.busiest.bounds, traffic.num_hops, *traffic.fill_hops) for traffic in transfers)
    tokens = float(dispatch.device_tokens_D.max())
    parts_s = kernel("price_formula").PriceFormula(costs).parts(tokens, *pairs.bounds, *moves)
    return LayerPrice(times * (1 + BACKWARD_PER_FORWARD) * profile.non_moe_s, *parts_s)


def fastest(
    plans: Iterable[LayerPlan],
    counts_DE: np.ndarray,
    context: LayerContext,
    times: int,
    planned: LayerPlan | None = None,
) -> LayerPlan:
    """The plan with the fewest seconds of :func:`plan_price` in ``times`` micro-batches, or the first one."""

    def seconds(plan: LayerPlan) -> float:
        return plan_price(plan, counts_DE, context, num_micro_batches=times, planned=planned).seconds

    return min(plans, key=seconds)


def early_share(transfer: TransferPlan, num_pairs: float, context: LayerContext) -> float:
    """Share of each expert's weights that travels beside the experts of the layer before.

    As much as fits travels beside the compute between the layers, such as attention, and the rest beside the
    experts (Pro-Prophet, §V-B, Alg. 2). What neither hides makes the compute between the layers wait. The
    layer before is assumed to have as many (token, k) pairs in an iteration, spread evenly. Costs are
    measured.
    """
    profile, traffic = context.costs, transfer_traffic(transfer, context.topology)
    gather_s = transfer_times(profile.links, traffic, profile.expert_bytes, profile.messages).seconds
    flops = num_pairs * profile.flops_per_token / (context.num_devices * profile.num_micro_batches)
    expert_s = flops / profile.cluster.expert_flops_per_s
    return min(max(gather_s - profile.non_moe_s, 0.0), expert_s) / gather_s if gather_s else 0.0
