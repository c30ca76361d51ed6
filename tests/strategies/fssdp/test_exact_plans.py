"""Plans by exact counts are never slower, within their slots, and level what the past does not know."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.planning.cost.deduplicated_traffic import TokenChoices
from megatron_fssdp.planning.loads import max_over_mean
from megatron_fssdp.planning.replica_life import ReplicaLife
from megatron_fssdp.strategies.fssdp.exact_plans import corrected, even_s, of_micro_batch
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.plan_price import plan_price
from tests.drawn_examples import examples

from .hot_layer import CONTEXT, DEVICES, EXPERTS, PROFILE, hot_counts_DE
from .test_fssdp_strategy import plan_with

TIMES = 4
SLOW = dataclasses.replace(
    CONTEXT, profile=dataclasses.replace(PROFILE, flops_per_token=4e7, num_micro_batches=TIMES)
)
PLAIN = LayerPlan.owners_only(SLOW, each_micro_batch=True)
LOADS = st.integers(0, 2**32 - 1).map(
    lambda seed: np.random.default_rng(seed).poisson(
        np.random.default_rng(seed).gamma(0.4, 1500, EXPERTS), (DEVICES, EXPERTS)
    )
)


def seconds(
    plan: LayerPlan, counts_DE: np.ndarray, planned: LayerPlan | None = None, context: LayerContext = SLOW
) -> float:
    return plan_price(plan, TIMES * counts_DE, context, planned=planned).seconds


@examples(30)
@given(counts_DE=LOADS, slots=st.integers(1, 4))
def test_a_plan_of_one_micro_batch_is_never_slower_and_keeps_its_slots(
    counts_DE: np.ndarray, slots: int
) -> None:
    plan = of_micro_batch(PLAIN, counts_DE, SLOW, slots=slots)
    assert plan is PLAIN or plan.life is ReplicaLife.MICRO_BATCH
    assert seconds(plan, counts_DE) <= seconds(PLAIN, counts_DE)
    assert plan.placement.replicas_per_device_D.max() <= slots
    if plan.tokens_ED is not None:
        np.testing.assert_array_equal(plan.tokens_ED.sum(axis=1), counts_DE.sum(axis=0))
        assert not plan.tokens_ED[~plan.placement.present_ED].any()


@examples(30)
@given(before_DE=LOADS, counts_DE=LOADS, slots=st.integers(1, 4))
def test_a_corrected_plan_is_never_slower_with_its_additions(
    before_DE: np.ndarray, counts_DE: np.ndarray, slots: int
) -> None:
    plain = dataclasses.replace(SLOW.owners_only, corrects=True)
    past = dataclasses.replace(corrected(plain, before_DE, SLOW, slots=slots, times=TIMES), corrects=True)
    plan = corrected(past, counts_DE, SLOW, slots=slots, times=TIMES)
    assert plan is past or not plan.corrects
    assert plan.life is past.life
    assert plan.placement.replicas_per_device_D.max() <= slots
    assert seconds(plan, counts_DE, past) <= seconds(past, counts_DE)


def test_a_jump_is_levelled() -> None:
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


def test_even_loads_keep_the_plan_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_fssdp.strategies.fssdp.exact_plans.layer_search", None)
    past = dataclasses.replace(SLOW.owners_only, corrects=True)
    counts_DE = hot_counts_DE()
    assert seconds(past, counts_DE) == pytest.approx(even_s(SLOW, TIMES * counts_DE), rel=1e-6)
    assert corrected(past, counts_DE, SLOW, slots=2, times=TIMES) is past
    assert of_micro_batch(PLAIN, counts_DE, SLOW, slots=2) is PLAIN


def test_tokens_that_travel_once_are_not_shared_out_exactly() -> None:
    profile = dataclasses.replace(SLOW.costs, deduplicated=True, choices=TokenChoices(2))
    context = dataclasses.replace(SLOW, profile=profile)
    past = dataclasses.replace(context.owners_only, corrects=True)
    plan = corrected(past, hot_counts_DE(12, 3), context, slots=2, times=TIMES)
    assert plan.placement.num_replicas
    assert plan.dispatch_policy == "even"
