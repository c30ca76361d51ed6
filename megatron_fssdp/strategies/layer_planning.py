"""Where strategies are asked: for every plan, and for what moves between two iterations.

Trainings, the simulator and the testbed ask here, and carry it out in their ways. A plan is checked, and gets
how its tokens travel.

Whether tokens travel in FasterMoE's steps (§4.2) or by the deduplicated exchange is decided before the gate,
for all passes of the iteration. Where price decides, both ways are priced under the forecast of the loads.
Without measured costs or a forecast, tokens travel in Megatron's way. So they do if Megatron's dispatcher
sends each token once itself.

Shape letters: L MoE layers, D devices, E experts.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.planning.cost.layer_seconds import exchange_times
from megatron_fssdp.planning.cost.link_seconds import SteppedExchange
from megatron_fssdp.planning.loads import LoadHistory
from megatron_fssdp.planning.placement.owner_map import OwnerMap
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.replica_life import ReplicaLife
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.plan_price import plan_price
from megatron_fssdp.strategies.strategy import MovesOwners, ResidentReplicas, Strategy, mistakes_named

LEAST_GAIN = 0.08
"""Share of a layer's modelled seconds that the deduplicated exchange must save.

The price knows neither the host's work for the second hop nor the copies of rows. On the testbed, with top-2,
4 and 8, it promised 4, 14 and 29 %, and -6, 9 and 23 % were measured. It breaks even at about 8 %.
"""

_LIVES = {
    ReplicaLife.MICRO_BATCH: (ReplicaLife.MICRO_BATCH, ReplicaLife.LAYER_PASS),
    ReplicaLife.ITERATION: tuple(life for life in ReplicaLife if life is not ReplicaLife.RESIDENT),
    ReplicaLife.SELECTED: tuple(life for life in ReplicaLife if life is not ReplicaLife.RESIDENT),
}
"""Lives of plans that a declared life allows; others allow only themselves. A pass needs the least memory."""


def plan_before_gate(strategy: Strategy, context: LayerContext, history: LoadHistory) -> LayerPlan:
    """The strategy's plan for a layer's iteration, which also says how its tokens travel.

    Raises:
        ConfigurationError: A strategy of another package failed, or its plan needs an undeclared ability.
    """
    with mistakes_named(strategy, f"before_gate for layer {context.layer}"):
        plan = strategy.before_gate(context, history)
    _check(strategy, context, plan)
    if strategy.asks_after_gate(context.layer) and not (plan.each_micro_batch or plan.corrects):
        plan = replace(plan, corrects=True)
    deduplicated = strategy.travel.exchange == "deduplicated"
    if strategy.travel.exchange == "by_price":
        deduplicated = _deduplicates(context, history, plan)
    return _travelling(plan, in_steps(strategy, context, history, plan), deduplicated)


def plan_after_gate(
    strategy: Strategy, context: LayerContext, counts_DE: np.ndarray, plan: LayerPlan, num_micro_batches: int
) -> LayerPlan:
    """The plan for exact counts (:meth:`Strategy.after_gate`). How its tokens travel does not change."""
    if not (plan.each_micro_batch or plan.corrects):
        return plan
    context = context.with_exchange(plan.deduplicated)
    with mistakes_named(strategy, f"after_gate for layer {context.layer}"):
        new = strategy.after_gate(context, counts_DE, plan, num_micro_batches)
    if new is not plan:
        _check(strategy, context, new)
    return _travelling(new, plan.in_steps, plan.deduplicated)


def _deduplicates(context: LayerContext, history: LoadHistory, plan: LayerPlan) -> bool:
    """Whether the deduplicated exchange saves enough modelled seconds of an iteration."""
    choices = None if context.profile is None else context.profile.choices
    if context.num_devices == 1 or choices is None or choices.is_fused or not history:
        return False
    megatron_s, deduplicated_s = (
        plan_price(plan, _forecast(history), context.with_exchange(way)).seconds for way in (False, True)
    )
    return deduplicated_s < (1 - LEAST_GAIN) * megatron_s


def in_steps(strategy: Strategy, context: LayerContext, history: LoadHistory, plan: LayerPlan) -> bool:
    """Whether the layer runs in steps: always, never, or if the price of a micro-batch is lower in steps."""
    profile, topology, ring = context.profile, context.topology, strategy.ring(0, context.topology)
    if ring is None or strategy.travel.smart_schedule != "by_price":
        return ring is not None
    if profile is None or not len(history) or (profile.choices and profile.choices.is_fused):
        return False
    steps = SteppedExchange.of(ring, topology, profile.messages.step_host_s)
    if steps is None:
        return False
    times = profile.num_micro_batches
    dispatch = plan.dispatch(_forecast(history), topology, times)
    tokens = float(dispatch.device_tokens_D.max())
    experts_s = tokens * profile.flops_per_token / profile.cluster.expert_flops_per_s / times
    exchanges = exchange_times(profile.links, dispatch.busiest, profile.token_bytes, times)
    return steps.saves(*exchanges, experts_s)


def _forecast(history: LoadHistory) -> np.ndarray:
    return np.rint(history.forecast_DE()).astype(np.int64)


def _travelling(plan: LayerPlan, in_steps: bool, deduplicated: bool) -> LayerPlan:
    is_same = plan.in_steps == in_steps and plan.deduplicated == deduplicated
    return plan if is_same else replace(plan, in_steps=in_steps, deduplicated=deduplicated)


def _check(strategy: Strategy, context: LayerContext, plan: LayerPlan) -> None:
    """Refuse what is no plan, and a plan that the strategy's declared abilities do not cover."""
    name, life = type(strategy).__name__, strategy.replica_life
    source = f"layer {context.layer}: {name} of package {strategy.package}"
    if not isinstance(plan, LayerPlan):
        raise ConfigurationError(f"{source}: got {plan!r:.80}, wanted a LayerPlan; correct the strategy")
    if not len(plan.transfer.table):
        return
    if not strategy.may_replicate(context.layer):
        wanted = f"no replicas, because {name}.may_replicate says no"
    elif plan.life not in _LIVES.get(life, (life,)):
        wanted = f"replicas of {name}.replica_life, {life.name}; the plan's is {plan.life.name}"
    elif plan.gather_ahead and not strategy.overlaps:
        wanted = f"gather_ahead=False, because {name}.overlaps says no"
    else:
        return
    raise ConfigurationError(
        f"{source}: got a plan with {plan.placement.num_replicas} replicas, wanted {wanted}: change the plan "
        "or declare the ability"
    )


class StageLoads(NamedTuple):
    """The layers of a pipeline stage, and the sums of their latest loads, float or int64 ``[L, D, E]``.

    The sums are over ``num_iterations`` of all ranks with copies of the same experts.
    """

    contexts: Sequence[LayerContext]
    total_LDE: np.ndarray
    num_iterations: int

    @classmethod
    def of(cls, contexts: Sequence[LayerContext], histories: Sequence[LoadHistory]) -> "StageLoads":
        """The loads of layers whose experts have no copies."""
        total_LDE = np.stack([history.total_DE() for history in histories])
        return cls(contexts, total_LDE, max(len(histories[0]), 1))


def moved_before(
    strategy: Strategy, iteration: int, loads: Callable[[], StageLoads], owners: OwnerMap
) -> OwnerMap | list[ExpertPlacement] | None:
    """New owners, or placements of resident replicas, after ``iteration`` complete iterations.

    ``None`` if it is not the turn of either; ``loads`` are asked for in turn only.

    Raises:
        ConfigurationError: A strategy of another package failed.
    """
    if isinstance(strategy, MovesOwners) and strategy.moves_owners and strategy.reshards_at(iteration):
        contexts, total_LDE, num_iterations = loads()
        with mistakes_named(strategy, "reshard"):
            return strategy.reshard(contexts, total_LDE.sum(axis=1) / num_iterations, owners)
    if isinstance(strategy, ResidentReplicas) and strategy.replicates_at(iteration):
        contexts, total_LDE, num_iterations = loads()
        with mistakes_named(strategy, "replicate"):
            mean_LDE = total_LDE / num_iterations
            return [strategy.replicate(*layer) for layer in zip(contexts, mean_LDE, strict=True)]
    return None
