"""Early plans equal plans made later, for every strategy, also if some of them are dropped."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES
from megatron_fssdp.planning.loads.load_history import LoadHistory
from megatron_fssdp.planning.placement.placement import even_owners
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.runtime.execution.early_plan import EarlyPlan
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.registry import build_strategy
from megatron_fssdp.strategies.strategy import Strategy

from ..drawn_placements import PROFILE

DEVICES, EXPERTS = 4, 8
TOPOLOGY = Topology.uniform(DEVICES, 2)
NAMES = [name for name, entry in STRATEGIES.items() if name != "none"]


def strategy_of(name: str) -> Strategy:
    settings = STRATEGIES[name].settings
    more = {"plan_interval": 3} if name == "prophet" else {}
    return build_strategy(name, settings.model_validate(more))


def outcome(plan: LayerPlan) -> tuple[object, ...]:
    """The parts of a plan by which plans differ."""
    return plan.placement.digest(), plan.transfer, plan.split, plan.dispatch_policy, plan.life


@pytest.mark.parametrize("name", NAMES)
def test_early_plans_equal_late_plans_if_some_are_dropped(name: str) -> None:
    rng = np.random.default_rng(3)
    early_strategy, late_strategy = strategy_of(name), strategy_of(name)
    context = LayerContext(1, even_owners(EXPERTS, DEVICES), TOPOLOGY)
    history = LoadHistory(early_strategy.window, DEVICES, EXPERTS)
    reference = LoadHistory(late_strategy.window, DEVICES, EXPERTS)
    early: EarlyPlan | None = None
    used, num_replicas = 0, 0
    for iteration in range(14):
        if iteration in (2, 9):  # Costs are measured, and later changed.
            context = replace(context, profile=replace(PROFILE, expert_bytes=iteration))
        if early is not None and early.fits(early_strategy, context, history):
            plan, used = early.plan, used + 1
        else:
            plan = early_strategy.before_gate(context, history)
        wanted = late_strategy.before_gate(context, reference)
        assert outcome(plan) == outcome(wanted), iteration
        num_replicas += plan.placement.num_replicas
        counts_DE = rng.multinomial(64, rng.dirichlet(np.full(EXPERTS, 0.3)), size=DEVICES)
        early = EarlyPlan.make(early_strategy, context, history, counts_DE)
        if iteration in (5, 11):  # The iteration is repeated with other loads.
            counts_DE = rng.multinomial(64, rng.dirichlet(np.full(EXPERTS, 0.3)), size=DEVICES)
            history.append(counts_DE)
        else:
            history = early.history
        reference.append(counts_DE)
    assert used == 14 - 1 - 4
    assert num_replicas or name not in ("fssdp", "prophet")


def test_a_plan_for_another_selection_does_not_fit() -> None:
    strategy = strategy_of("auto")
    context = LayerContext(1, even_owners(EXPERTS, DEVICES), TOPOLOGY)
    history = LoadHistory(strategy.window, DEVICES, EXPERTS)
    early = EarlyPlan.make(strategy, context, history, np.ones((DEVICES, EXPERTS), np.int64))
    assert history.is_empty
    assert early.fits(strategy, context, early.history)
    assert not early.fits(strategy, context, history)
    strategy.resume({1: "fssdp"})
    assert not early.fits(strategy, context, early.history)
