"""Budgets of the host: what a forward pass of a layer may do at most, counted on virtual CUDA devices."""

from functools import cache

import pytest

from benchmarks.host_counts.counted_layers import CASES, MEGATRON, RANKS, Case, count_on_rank
from benchmarks.host_counts.counted_passes import CountedPasses, most_of
from megatron_fssdp.testing import run_ranks

MOST_OPERATORS = 6
"""Operators from the synchronization to the first rows on the wire."""

QUICK = [case for case in CASES if case.name in ("fssdp", "fssdp, no correction", "quota")]


@cache
def counts(*, whole: bool) -> dict[str, CountedPasses]:
    cases = CASES if whole else QUICK
    return most_of(run_ranks(count_on_rank, RANKS, cases, whole, timeout_s=300))


def assert_in_budget(case: Case, passes: CountedPasses) -> None:
    first, again = passes.first, passes.again
    if case.schedule != "baseline":  # The ranks that share an expert first exchange their numbers of tokens.
        assert first.synchronizations == 1, first.places
    assert again.synchronizations == 0, again.places
    if not case.transfers_first:  # Weights have to be packed and sent before the rows.
        assert first.operators_after <= MOST_OPERATORS
    assert first.plans_ahead == 0
    assert first.plans_after_gate <= case.plans_after_gate


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_the_budgets_hold(case: Case) -> None:
    assert_in_budget(case, counts(whole=False)[case.name])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_budgets_hold_under_every_strategy(case: Case) -> None:
    assert_in_budget(case, counts(whole=True)[case.name])


@pytest.mark.slow
def test_megatrons_dispatcher_waits_at_least_as_often() -> None:
    found = counts(whole=True)
    megatron = found[MEGATRON]
    for case in CASES:
        if case.schedule != "baseline":
            assert found[case.name].first.synchronizations <= megatron.first.synchronizations
        assert found[case.name].again.synchronizations <= megatron.again.synchronizations


@pytest.mark.slow
def test_strategies_that_plan_after_the_gate_are_counted() -> None:
    found = counts(whole=True)
    for case in CASES:
        if case.plans_after_gate and case.strategy != "fssdp":
            assert found[case.name].first.plans_after_gate == 1, case.name
