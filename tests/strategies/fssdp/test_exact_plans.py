"""Plans by exact counts are never slower, within their slots, and level what the past does not know.

``fssdp`` plans from whatever counts would have been faster lately, and every rank follows.
"""

import dataclasses
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.strategy.strategy_registry import resolve_strategy
from megatron_fssdp.planning.cost.deduplicated_traffic import TokenChoices
from megatron_fssdp.planning.loads import LoadHistory, max_over_mean
from megatron_fssdp.planning.replica_life import ReplicaLife
from megatron_fssdp.strategies.fssdp import FssdpSettings
from megatron_fssdp.strategies.fssdp.exact_plans import corrected, even_s, of_micro_batch
from megatron_fssdp.strategies.fssdp.fssdp_strategy import FssdpStrategy
from megatron_fssdp.strategies.layer_plan import LayerPlan
from megatron_fssdp.strategies.layer_planning import plan_before_gate
from megatron_fssdp.strategies.plan_price import plan_price
from tests.drawn_examples import SEEDS, examples

from .hot_layer import CONTEXT, DEVICES, EXPERTS, PROFILE, hot_counts_DE
from .test_fssdp_strategy import plan_with

TIMES = 4
SLOW = dataclasses.replace(
    CONTEXT, profile=dataclasses.replace(PROFILE, flops_per_token=4e7, num_micro_batches=TIMES)
)
PLAIN = LayerPlan.owners_only(SLOW, each_micro_batch=True)
LOADS = SEEDS.map(
    lambda seed: np.random.default_rng(seed).poisson(
        np.random.default_rng(seed).gamma(0.4, 1500, EXPERTS), (DEVICES, EXPERTS)
    )
)


def seconds(plan, counts_DE, planned=None, context=SLOW):
    return plan_price(plan, TIMES * counts_DE, context, planned=planned).seconds


@examples(30)
@given(counts_DE=LOADS, slots=st.integers(1, 4))
def test_a_plan_of_one_micro_batch_is_never_slower_and_keeps_its_slots(counts_DE, slots):
    plan = of_micro_batch(PLAIN, counts_DE, SLOW, slots=slots)
    assert plan is PLAIN or plan.life is ReplicaLife.MICRO_BATCH
    assert seconds(plan, counts_DE) <= seconds(PLAIN, counts_DE)
    assert plan.placement.replicas_per_device_D.max() <= slots
    if plan.tokens_ED is not None:
        np.testing.assert_array_equal(plan.tokens_ED.sum(axis=1), counts_DE.sum(axis=0))
        assert not plan.tokens_ED[~plan.placement.present_ED].any()


@examples(30)
@given(before_DE=LOADS, counts_DE=LOADS, slots=st.integers(1, 4))
def test_a_corrected_plan_is_never_slower_with_its_additions(before_DE, counts_DE, slots):
    plain = dataclasses.replace(SLOW.owners_only, corrects=True)
    past = dataclasses.replace(corrected(plain, before_DE, SLOW, slots=slots, times=TIMES), corrects=True)
    plan = corrected(past, counts_DE, SLOW, slots=slots, times=TIMES)
    assert plan is past or not plan.corrects
    assert plan.life is past.life
    assert plan.placement.replicas_per_device_D.max() <= slots
    assert seconds(plan, counts_DE, past) <= seconds(past, counts_DE)


def test_a_jump_is_levelled():
    past = dataclasses.replace(plan_with((3, 5), (2, 6)), corrects=True)
    counts_DE = hot_counts_DE(12)
    for plan in (
        corrected(past, counts_DE, SLOW, slots=2, times=TIMES),
        of_micro_batch(PLAIN, counts_DE, SLOW, slots=2),
    ):
        loads_D = plan.dispatch(counts_DE, SLOW.topology).device_tokens_D
        assert max_over_mean(loads_D) < 1.5
        assert len(plan.placement.holders(12)) > 4
    assert max_over_mean(past.dispatch(counts_DE, SLOW.topology).device_tokens_D) > 5


def test_even_loads_keep_the_plan_and_are_searched_once(monkeypatch):
    context = dataclasses.replace(SLOW, profile=dataclasses.replace(SLOW.costs, expert_bytes=400_000_000))
    past = dataclasses.replace(context.owners_only, corrects=True)
    plain = LayerPlan.owners_only(context, each_micro_batch=True)
    counts_DE = hot_counts_DE()
    for _ in range(2):
        assert corrected(past, counts_DE, context, slots=2, times=TIMES) is past
        assert of_micro_batch(plain, counts_DE, context, slots=2) is plain
        monkeypatch.setattr("megatron_fssdp.strategies.fssdp.exact_plans.search_of", None)


def test_even_loads_get_the_replicas_that_save_traffic():
    profile = dataclasses.replace(SLOW.costs, expert_bytes=40_000, token_bytes=400_000)
    context = dataclasses.replace(SLOW, profile=profile)
    past = dataclasses.replace(context.owners_only, corrects=True)
    plain = LayerPlan.owners_only(context, each_micro_batch=True)
    even_DE, hot_DE = hot_counts_DE(pairs=0), hot_counts_DE(0)
    for counts_DE in (even_DE, hot_DE):
        for planned, plan in (
            (past, corrected(past, counts_DE, context, slots=2, times=TIMES)),
            (plain, of_micro_batch(plain, counts_DE, context, slots=2)),
        ):
            least_s = even_s(context, float(TIMES * even_DE.mean()), plan.life, 2, plan is not plain)
            assert seconds(plan, counts_DE, planned, context) < 0.9 * seconds(past, counts_DE, None, context)
            assert counts_DE is hot_DE or seconds(plan, even_DE, planned, context) < 1.2 * least_s


def test_tokens_that_travel_once_are_not_shared_out_exactly():
    profile = dataclasses.replace(SLOW.costs, deduplicated=True, choices=TokenChoices(2))
    context = dataclasses.replace(SLOW, profile=profile)
    past = dataclasses.replace(context.owners_only, corrects=True)
    plan = corrected(past, hot_counts_DE(12, 3), context, slots=2, times=TIMES)
    assert plan.placement.num_replicas
    assert plan.dispatch_policy == "even"


QUICK_LINKS = dataclasses.replace(
    SLOW, profile=dataclasses.replace(SLOW.costs, expert_bytes=400_000, flops_per_token=4e8)
)
"""Experts whose weights travel quickly, so that gathers that nothing hides pay."""


def plans_of(iterations, context=QUICK_LINKS, **settings):
    """The plan before the gate of each iteration, each a list of micro-batches ``[D, E]``."""
    strategy = FssdpStrategy(FssdpSettings(slots=2, **settings))
    history, plans = LoadHistory(strategy.window, DEVICES, EXPERTS), []
    for micro_batches in iterations:
        plans.append(plan_before_gate(strategy, context, history))
        history.append(sum(micro_batches), [partial(np.copy, counts_DE) for counts_DE in micro_batches])
    return plans


def test_loads_that_stay_are_planned_from_the_past():
    plans = plans_of([[hot_counts_DE(3)] * 4] * 8)
    assert plans[0].corrects, "nothing is known yet"
    assert not any(plan.each_micro_batch for plan in plans)
    assert not any(plan.corrects for plan in plans[5:]), "five iterations were compared"
    assert plans[-1].placement.num_replicas


def test_loads_that_jump_between_iterations_are_corrected():
    hot = [0, 0, 6, 6, 12, 12, 3, 3, 9, 9]
    plans = plans_of([[hot_counts_DE(expert)] * 4 for expert in hot])
    assert all(plan.corrects for plan in plans[-3:])
    assert plans[-1].placement.num_replicas, "what the past plans is gathered beside attention"
    calm = plans_of([[hot_counts_DE(expert)] * 4 for expert in [*hot, *[1] * 8]])
    assert not calm[-1].corrects


def test_replicas_that_hide_are_kept_where_exact_counts_of_each_iteration_save_as_much():
    """With one micro-batch, correcting the plan and planning each one differ only where loads stay."""
    single = dataclasses.replace(
        QUICK_LINKS, profile=dataclasses.replace(QUICK_LINKS.costs, num_micro_batches=1)
    )
    rng, iterations = np.random.default_rng(0), []
    for _ in range(4):
        load_E = rng.lognormal(sigma=1.5, size=EXPERTS)
        iterations += [[rng.multinomial(1000, load_E / load_E.sum(), size=DEVICES)]] * 3
    assert all(plan.corrects for plan in plans_of(iterations, single))


def test_until_iterations_are_compared_a_first_jump_is_corrected(monkeypatch):
    rng = np.random.default_rng(0)
    drifting = [[hot_counts_DE(3) + rng.integers(0, 2, (DEVICES, EXPERTS))] * 4 for _ in range(9)]
    plans = plans_of(drifting)
    assert all(plan.corrects for plan in plans[:5])
    assert not any(plan.corrects for plan in plans[-2:])
    module = "megatron_fssdp.strategies.fssdp.exact_plans"
    monkeypatch.setattr(f"{module}.planning_s", lambda context: (100.0, 100.0))
    assert [plan.corrects for plan in plans_of(drifting)] == [True, *[False] * 8], "it would wait too long"


def test_loads_that_jump_between_micro_batches_are_planned_one_by_one():
    rng = np.random.default_rng(0)
    iterations = [[hot_counts_DE(expert) for expert in rng.permutation(EXPERTS)[:4]] for _ in range(8)]
    plans = plans_of(iterations)
    assert all(plan.each_micro_batch and not plan.placement.num_replicas for plan in plans[-3:])
    assert plans[-1].life is ReplicaLife.MICRO_BATCH
    for reason in ("delays_gradients", "shares_evenly"):
        context = dataclasses.replace(QUICK_LINKS, **{reason: True})
        others = plans_of(iterations, context)
        assert not any(plan.each_micro_batch for plan in others)
        assert any(plan.corrects for plan in others) == (reason == "delays_gradients")
    assert not any(plan.each_micro_batch for plan in plans_of(iterations, rematerialize=True))


@pytest.mark.parametrize("source", ["past", "first", "each"])
def test_a_given_source_binds(source):
    plans = plans_of([[hot_counts_DE(3)] * 4] * 3, planned_from=source)
    assert [plan.corrects for plan in plans] == [source == "first"] * 3
    assert [plan.each_micro_batch for plan in plans] == [source == "each"] * 3


@pytest.mark.parametrize(
    "overrides",
    [
        ["planner=hecate", "planned_from=first"],
        ["overlap_degree=2", "planned_from=past"],
        ["rematerialize=true", "planned_from=each"],
    ],
)
def test_a_source_without_effect_is_refused(overrides):
    with pytest.raises(ConfigurationError, match="planned_from"):
        resolve_strategy("fssdp", overrides=overrides)


def test_large_layers_are_compared_rarely(monkeypatch):
    """The host compares while the device waits."""
    compared = []
    module = "megatron_fssdp.strategies.fssdp.exact_plans"
    monkeypatch.setattr(f"{module}.corrected", lambda plan, *args, **limits: compared.append(1) or plan)
    jumping = [[hot_counts_DE(expert)] * 4 for expert in [0, 6] * 20]
    plans_of(jumping)
    often = len(compared)
    compared.clear()
    monkeypatch.setattr(f"{module}.planning_s", lambda context: (10.0, 10.0))
    plans_of(jumping)
    assert 0 < len(compared) < often / 2
