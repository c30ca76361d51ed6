"""Plans by the exact counts of one micro-batch, which the host knows after the gate (ours).

All ranks make them from equal arguments. Nothing hides their gathers, and the host works while the device
waits, so prices have both.

Shape letters: D devices, E experts.
"""

from dataclasses import replace
from functools import lru_cache

import numpy as np

from megatron_fssdp.planning.cost.host_seconds import MEASURED
from megatron_fssdp.planning.cost.link_seconds import gather_counts_s
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.quotas import quota_assignment
from megatron_fssdp.planning.replica_life import ReplicaLife
from megatron_fssdp.planning.search import LEAST_SAVING, layer_search
from megatron_fssdp.planning.transfer.transfer_plan import two_level_transfer
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.plan_price import fastest, plan_price

MOST_SEARCHED = 0.05
"""Seconds of a search after the gate over those of a layer's micro-batch, up to which it is made."""


def counting_s(context: LayerContext) -> float:
    """Seconds in which all ranks get the exact counts of a micro-batch, and nothing else happens."""
    return gather_counts_s(context.costs.links, context.topology, context.num_experts)


def search_s(context: LayerContext) -> float:
    """Seconds in which the host plans a layer of this size by exact counts."""
    return _search_s(context.num_experts, context.num_devices)


@lru_cache
def _search_s(num_experts: int, num_devices: int) -> float:
    return MEASURED.of_layer("fssdp", num_experts, num_devices).after_gate_s


def even_s(context: LayerContext, counts_DE: np.ndarray) -> float:
    """Modelled seconds of an iteration with as many pairs in which all loads are even: no plan is faster."""
    return _even_s(context, float(counts_DE.sum() / counts_DE.size))


@lru_cache(maxsize=512)  # layers of a model have equally many pairs in all iterations
def _even_s(context: LayerContext, mean: float) -> float:
    mean_DE = np.full((context.num_devices, context.num_experts), mean)
    return plan_price(context.owners_only, mean_DE, context).seconds


def corrected(
    plan: LayerPlan, counts_DE: np.ndarray, context: LayerContext, *, slots: int, times: int
) -> LayerPlan:
    """The plan, or one that is faster in ``times`` micro-batches with these counts, int64 ``[D, E]``.

    Its new replicas live as long as the plan's, and their gathers count. Costs are measured.
    """
    counts_DE = times * counts_DE
    planned_s = plan_price(plan, counts_DE, context, num_micro_batches=times).seconds
    if even_s(context, counts_DE) > (1 - LEAST_SAVING) * planned_s:
        return plan
    search = layer_search(
        *(context.owner_E, counts_DE, context.topology, context.costs), life=plan.life, hides=False
    )
    start = plan.placement if plan.placement.replicas_per_device_D.max() <= slots else None
    found, _ = search.best_placement(slots=slots, most_replicated=context.num_experts, start=start)
    new = _with(found, replace(plan, corrects=False), context)
    new_s = plan_price(new, counts_DE, context, num_micro_batches=times, planned=plan).seconds
    return new if new_s < planned_s else plan


def of_micro_batch(plan: LayerPlan, counts_DE: np.ndarray, context: LayerContext, *, slots: int) -> LayerPlan:
    """A plan for this micro-batch alone, or ``plan``, which has no replicas; counts are int64 ``[D, E]``.

    Candidates are quotas with the lowest possible highest load, and the placement of a search for the fewest
    seconds, if one takes little of a micro-batch. Costs are measured.
    """
    times, topology = context.costs.num_micro_batches, context.topology
    plan_s = plan_price(plan, counts_DE, context, num_micro_batches=1).seconds
    if even_s(context, times * counts_DE) / times > (1 - LEAST_SAVING) * plan_s:
        return plan
    tokens_ED = quota_assignment(context.owner_E, counts_DE, topology, slots=slots)
    held = ExpertPlacement(context.owner_E, plan.placement.present_ED | (tokens_ED > 0))
    plans = [plan, replace(_with(held, plan, context), tokens_ED=tokens_ED)]
    if search_s(context) <= MOST_SEARCHED * plan_s:
        search = layer_search(
            *(context.owner_E, times * counts_DE, topology, context.costs),
            life=ReplicaLife.MICRO_BATCH,
            hides=False,
        )
        found, _ = search.best_placement(slots=slots, most_replicated=context.num_experts)
        by_search = _with(found, plan, context)
        plans += [by_search, _levelled(by_search, counts_DE, context)]
    return fastest(plans, counts_DE, context, times=1)


def _with(placement: ExpertPlacement, plan: LayerPlan, context: LayerContext) -> LayerPlan:
    return replace(plan, placement=placement, transfer=two_level_transfer(placement, context.topology))


def _levelled(plan: LayerPlan, counts_DE: np.ndarray, context: LayerContext) -> LayerPlan:
    """The plan with the exact shares of these counts as quotas, which need no other gather of counts."""
    exact = replace(plan, dispatch_policy="exact").dispatch(counts_DE, context.topology)
    return replace(plan, tokens_ED=exact.whole_tokens_ED)
