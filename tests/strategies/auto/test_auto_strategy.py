from dataclasses import replace

import numpy as np
import pytest

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES, strategy_settings
from megatron_fssdp.strategies.auto import auto_strategy
from megatron_fssdp.strategies.auto.auto_strategy import AutoStrategy, select_by_seconds
from megatron_fssdp.strategies.layer_plan import LayerPlan
from megatron_fssdp.strategies.plan_price import plan_price
from megatron_fssdp.strategies.registry import build_strategy
from tests.planning.placement_cases import history_of

from ..test_layer_planning import CONTEXT

EVEN = np.full((4, 8), 100)
HOT = EVEN + 600 * (np.arange(8) == 3)


def automatic(**keys):
    strategy = build_strategy("auto", STRATEGIES["auto"].settings.model_validate(keys))
    assert isinstance(strategy, AutoStrategy)
    return strategy


def past_of(strategy, *counts):
    return history_of(CONTEXT, *counts, window=strategy.window)


def choose(strategy, *counts):
    """Strategy of layer 1 after ``auto`` reconsiders it under these loads."""
    strategy.select([1], strategy.price([CONTEXT], [past_of(strategy, *counts)]))
    return strategy.selected(1)


def test_a_hot_expert_gets_replicas_and_loses_them_when_it_cools():
    strategy = automatic()
    assert choose(strategy, *[HOT] * 6) == "fssdp"
    plan = strategy.before_gate(CONTEXT, past_of(strategy, HOT))
    plan = strategy.after_gate(CONTEXT, HOT, plan, 1)
    assert plan.placement.num_replicas
    assert choose(strategy, *[EVEN] * 12) == strategy.selected(1), (
        "all strategies take equally long, so the present one stays"
    )
    assert choose(automatic(fssdp=False), *[HOT] * 6) == "ep"


def test_candidates_are_priced_by_their_own_plans(monkeypatch):
    """Each candidate plans from loads before an iteration, and is priced by that iteration's loads."""
    monkeypatch.setattr(auto_strategy, "COMPARED_ITERATIONS", 2)
    strategy = automatic()
    loads = [EVEN, HOT, HOT + EVEN, EVEN + 50 * np.arange(8), HOT]
    history = past_of(strategy, *loads)
    prices = dict(zip(strategy.candidates, strategy.price([CONTEXT], [history])[0].tolist(), strict=True))
    plain = LayerPlan.owners_only(CONTEXT)
    assert prices["ep"] == pytest.approx(np.mean([plan_price(plain, c, CONTEXT).seconds for c in loads[-2:]]))
    fixed = build_strategy("fssdp", strategy.settings.candidates["fssdp"])
    charged = []
    for upto in (3, 4):
        planned = fixed.before_gate(CONTEXT, past_of(fixed, *loads[:upto]))
        plan = fixed.after_gate(CONTEXT, loads[upto], planned, 1)
        charged.append(plan_price(plan, loads[upto], CONTEXT, planned=planned).seconds)
    assert prices["fssdp"] == pytest.approx(np.mean(charged))


def test_plans_equal_those_of_the_selected_strategy():
    strategy = automatic(fssdp={"slots": 1})
    for name in strategy.candidates:
        strategy.resume({1: name, 2: "flexmoe"})
        assert (strategy.selected(1), strategy.selected(2)) == (name, "ep"), (
            "a strategy that is not a candidate is left out"
        )
        fixed = build_strategy(name, strategy.settings.candidates[name])
        history = past_of(strategy, EVEN, HOT, EVEN, HOT)
        plan = strategy.before_gate(CONTEXT, history)
        wanted = fixed.before_gate(CONTEXT, history.excerpt(fixed.window))
        assert plan.placement == wanted.placement
        assert plan.each_micro_batch == wanted.each_micro_batch
        plan, wanted = (s.after_gate(CONTEXT, HOT, p, 1) for s, p in ((strategy, plan), (fixed, wanted)))
        assert plan.placement == wanted.placement


@pytest.mark.parametrize("seed", range(8))
def test_ranks_that_price_other_layers_make_equal_plans(seed):
    """Each rank prices only some layers, and gets the seconds of the others from the other ranks."""
    pricing, receiving = automatic(), automatic()
    rng = np.random.default_rng(seed)
    counts = [np.rint(HOT * rng.uniform(0.8, 1.2, size=(4, 8))).astype(np.int64) for _ in range(8)]
    seconds_LC = pricing.price([CONTEXT], [past_of(pricing, *counts[:4])])
    for strategy in (pricing, receiving):
        strategy.select([1], seconds_LC)
        assert strategy.selected(1) == "fssdp"
    for number in range(4, len(counts)):
        history = past_of(pricing, *counts[:number])
        plan, wanted = (strategy.before_gate(CONTEXT, history) for strategy in (pricing, receiving))
        assert plan.placement == wanted.placement
        assert plan.dispatch_policy == wanted.dispatch_policy


def test_selections_are_told_in_one_line():
    strategy = automatic()
    contexts = [replace(CONTEXT, layer=layer) for layer in (1, 2, 4)]
    histories = [past_of(strategy, *[counts_DE] * 6) for counts_DE in (HOT, HOT, EVEN)]
    for prefix in ("selected: ", "nothing changes: "):
        report = strategy.select([1, 2, 4], strategy.price(contexts, histories))
        line = f"{prefix}{strategy.selected(1)} in layers 1-2, ep in layer 4"
        assert report.describe().startswith(line)
        is_first = prefix == "selected: "
        assert report.changes == ((1, 2) if is_first else ())
        assert ("new in layers 1-2; predicted gain" in report.describe()) == is_first


def test_selections_happen_at_their_interval_once_costs_are_known():
    strategy = automatic(choice_interval=10)
    assert next(n for n in range(12) if strategy.selects_at(3, n)) == 4
    choose(strategy, *[EVEN] * 6)
    assert not strategy.selects_at(11, 9)
    assert not strategy.selects_at(20, 0)
    assert strategy.selects_at(20, 9)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"fssdp": {"nodes": 2}}, "fssdp.nodes has no meaning for a candidate"),
        ({"fssdp": {"reshard_interval": 5}}, "fssdp.reshard_interval has no meaning"),
        ({"fssdp": {"overlap": False}}, "fssdp.overlap has no meaning"),
        ({"quota": True}, "quota"),
        ({"fssdp": 3}, "wanted a valid boolean or an object"),
        ({"slots": 3}, "has no meaning under strategy 'auto'"),
    ],
)
def test_keys_that_no_candidate_has_are_refused(keys, message):
    with pytest.raises(ConfigurationError, match=message):
        strategy_settings("auto", keys, "test")


@pytest.mark.parametrize(
    ("seconds", "present", "wanted"),
    [
        ([10.0, 9.8, 9.9], 0, 0),  # 2 % counts as equal
        ([10.0, 9.0, 8.9], 0, 1),  # the first of the strategies that count as equal
        ([10.0, 9.0, 8.0], 0, 2),
        ([8.1, 9.0, 8.0], 2, 2),  # a layer does not change back for an equal strategy
        ([7.0, 9.0, 8.0], 2, 0),
        ([10.0, np.inf, 11.0], 1, 0),  # the present strategy can no longer serve the layer
        ([0.0, 0.0], 1, 1),
    ],
)
def test_selections_equal_those_worked_out_by_hand(seconds, present, wanted):
    assert select_by_seconds(np.array([seconds]), np.array([present])).tolist() == [wanted]
