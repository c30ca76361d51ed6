from dataclasses import replace

import numpy as np
import pytest

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES
from megatron_fssdp.planning.cost.cost_model import ClusterCost, LinkCost
from megatron_fssdp.planning.cost.deduplicated_traffic import TokenChoices
from megatron_fssdp.planning.cost.layer_profile import LayerProfile
from megatron_fssdp.planning.placement.placement import even_owners
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.replica_life import ReplicaLife
from megatron_fssdp.planning.transfer.transfer_plan import two_level_transfer
from megatron_fssdp.strategies.auto.auto_strategy import AutoStrategy
from megatron_fssdp.strategies.ep import EpSettings
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.layer_planning import plan_after_gate, plan_before_gate
from megatron_fssdp.strategies.plan_price import plan_price
from megatron_fssdp.strategies.registry import build_strategy
from megatron_fssdp.strategies.strategy import Strategy
from tests.planning.placement_cases import history_of
from tests.support.random_placement import with_replicas

LINK = LinkCost(0.0, 1e-9)
PROFILE = LayerProfile(1e-3, ClusterCost(LINK, LINK, 1e9), 10_000, 1000, 1e5, 2)
CONTEXT = LayerContext(1, even_owners(8, 4), Topology.uniform(4, 2), PROFILE)
PLACEMENT = with_replicas(CONTEXT.placement, [(0, 3)])
PLAN = LayerPlan(PLACEMENT, two_level_transfer(PLACEMENT, CONTEXT.topology))
COUNTS_DE = np.full((4, 8), 10)
HISTORY = history_of(CONTEXT, COUNTS_DE, window=1)


class Given(Strategy[EpSettings]):
    """Answers what it is given, or raises it."""

    package = "theirs"

    def __init__(self, answer):
        super().__init__(EpSettings())
        self.answer = answer

    def before_gate(self, context, history):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def after_gate(self, context, counts_DE, plan, num_micro_batches):
        return self.before_gate(context, HISTORY)


@pytest.mark.parametrize(
    ("answer", "changes", "words"),
    [
        (ZeroDivisionError("two\nlines"), {}, "Given of package theirs failed in .*: ZeroDivisionError: two"),
        (None, {}, "Given of package theirs: got None, wanted a LayerPlan"),
        (PLAN, {"overlaps": False}, "got a plan with 1 replicas, wanted gather_ahead=False"),
        (PLAN, {"replica_life": ReplicaLife.MICRO_BATCH}, "of Given.replica_life, MICRO_BATCH; .*ITERATION"),
        (PLAN, {"may_replicate": lambda layer: False}, "wanted no replicas"),
    ],
)
def test_a_mistake_is_one_line_with_the_package(answer, changes, words):
    strategy = Given(answer)
    for name, value in changes.items():
        setattr(strategy, name, value)
    plain = replace(LayerPlan.owners_only(CONTEXT), corrects=True)
    with pytest.raises(ConfigurationError, match=words) as before:
        plan_before_gate(strategy, CONTEXT, HISTORY)
    with pytest.raises(ConfigurationError, match=words) as after:
        plan_after_gate(strategy, CONTEXT, COUNTS_DE, plain, 1)
    for refusal in (before, after):
        assert "theirs" in str(refusal.value)
        assert "\n" not in str(refusal.value)


def test_a_plan_refuses_transfers_that_do_not_serve_its_placement():
    with pytest.raises(ValueError, match="does not reach device"):
        replace(PLAN, transfer=LayerPlan.owners_only(CONTEXT).transfer)


def test_plans_that_abilities_cover_and_failures_of_shipped_strategies_pass():
    for plan in (PLAN, replace(PLAN, rematerialize=True)):
        assert replace(plan_before_gate(Given(plan), CONTEXT, HISTORY), corrects=False) == plan
    shipped = Given(ZeroDivisionError())
    shipped.package = "megatron-fssdp"
    with pytest.raises(ZeroDivisionError):
        plan_before_gate(shipped, CONTEXT, HISTORY)


def test_a_dispatcher_that_sends_tokens_once_is_priced_so_and_never_switched():
    """Top-4 of 8 experts over two slow nodes, where the deduplicated exchange and steps pay."""
    slow = replace(PROFILE, cluster=ClusterCost(LINK, LinkCost(0.0, 1e-6), 1e8), choices=TokenChoices(4))
    flex = replace(slow, choices=TokenChoices(4, is_fused=True))
    travel = {"exchange": "by_price"}, {"smart_schedule": "by_price"}
    megatron, fused = (replace(CONTEXT, profile=profile) for profile in (slow, flex))
    for settings, name in zip(travel, ("deduplicated", "in_steps"), strict=True):
        strategy = build_strategy("ep", EpSettings.model_validate(settings))
        switched = [getattr(plan_before_gate(strategy, layer, HISTORY), name) for layer in (megatron, fused)]
        assert switched == [True, False]
    plain, tokens = LayerPlan.owners_only(CONTEXT), replace(fused, profile=replace(flex, deduplicated=True))
    seconds = [plan_price(plain, COUNTS_DE, layer).seconds for layer in (megatron, fused, tokens)]
    assert seconds[1] == seconds[2] < seconds[0]
    once = megatron.with_exchange(True)
    assert plan_price(plain, COUNTS_DE, once).seconds < seconds[0]
    assert megatron.with_exchange(True) is once, "what is known about it is found again"


def test_a_candidate_of_another_package_that_fails_is_not_selected_and_is_named(caplog):
    """Each rank prices other layers: an exception on one rank would leave the others waiting."""
    settings = STRATEGIES["auto"].settings()
    ep, failing = build_strategy("ep", EpSettings()), Given(ZeroDivisionError())
    auto = AutoStrategy(settings, {"ep": ep, "given": failing})
    history = history_of(CONTEXT, *[COUNTS_DE] * 3, window=auto.window)
    prices_LC = auto.price([CONTEXT], [history])
    assert np.isinf(prices_LC).tolist() == [[False, True]]
    assert "candidate 'given' of package theirs failed for layer 1" in caplog.text
    auto.resume({1: "given"})
    with pytest.raises(ConfigurationError, match="Given of package theirs failed in before_gate for layer 1"):
        plan_before_gate(auto, CONTEXT, history)
