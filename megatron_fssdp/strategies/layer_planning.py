"""Where every plan is made: what the strategy answers, how its tokens travel, and whether it may.

The runtime and the simulator get all plans from here. How tokens travel (``token_travel.py``) is decided
before the gate, from the loads of earlier iterations, and all passes of the iteration follow the decision.

Shape letters: D devices, E experts.
"""

from dataclasses import replace

import numpy as np

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.planning.loads import LoadHistory
from megatron_fssdp.planning.replica_life import ReplicaLife
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.strategy import Strategy, mistakes_named
from megatron_fssdp.strategies.token_travel import in_steps, is_deduplicated, with_exchange


def plan_before_gate(strategy: Strategy, context: LayerContext, history: LoadHistory) -> LayerPlan:
    """The strategy's plan for a layer's iteration, which also says how its tokens travel.

    Raises:
        ConfigurationError: A strategy of another package failed, or the plan needs an ability that the
            strategy does not declare.
    """
    with mistakes_named(strategy, f"before_gate for layer {context.layer}"):
        plan = strategy.before_gate(context, history)
    _check(strategy, context, plan)
    layer = (strategy, context, history, plan)
    return _travelling(plan, in_steps(*layer), is_deduplicated(*layer))


def plan_after_gate(
    strategy: Strategy, context: LayerContext, counts_DE: np.ndarray, plan: LayerPlan, num_micro_batches: int
) -> LayerPlan:
    """The plan for exact counts (:meth:`Strategy.after_gate`). How its tokens travel does not change.

    Raises:
        ConfigurationError: As in :func:`plan_before_gate`.
    """
    context = with_exchange(context, plan.deduplicated)
    with mistakes_named(strategy, f"after_gate for layer {context.layer}"):
        new = strategy.after_gate(context, counts_DE, plan, num_micro_batches)
    if new is not plan:
        _check(strategy, context, new)
    return _travelling(new, plan.in_steps, plan.deduplicated)


def _travelling(plan: LayerPlan, in_steps: bool, deduplicated: bool) -> LayerPlan:
    is_same = plan.in_steps == in_steps and plan.deduplicated == deduplicated
    return plan if is_same else replace(plan, in_steps=in_steps, deduplicated=deduplicated)


def _check(strategy: Strategy, context: LayerContext, plan: LayerPlan) -> None:
    """Refuse what is no plan, and a plan that the strategy's declared abilities do not cover."""
    name, life = type(strategy).__name__, strategy.replica_life
    what = f"layer {context.layer}: {name} of package {strategy.package}"
    if not isinstance(plan, LayerPlan):
        raise ConfigurationError(f"{what}: got {plan!r:.80}, wanted a LayerPlan; correct the strategy")
    if not plan.transfer.edges:
        return
    if not strategy.may_replicate(context.layer):
        wanted = f"no replicas, because {name}.may_replicate says no"
    elif plan.life is not life and (life is not ReplicaLife.SELECTED or plan.life is ReplicaLife.RESIDENT):
        wanted = f"replicas of {name}.replica_life, {life.name}; the plan's is {plan.life.name}"
    elif plan.gather_ahead and not strategy.overlaps:
        wanted = f"gather_ahead=False, because {name}.overlaps says no"
    else:
        return
    raise ConfigurationError(
        f"{what}: got a plan with {plan.placement.num_replicas} replicas, wanted {wanted}: change the plan "
        "or declare the ability"
    )
