"""Budgets of the host: what a forward pass of a layer may do at most, counted on virtual CUDA devices."""

from functools import cache

import pytest

from benchmarks.host.counted_layers import CASES, MEGATRON, RANKS, count_on_rank
from benchmarks.host.counted_passes import most_of
from megatron_fssdp.testing import run_ranks
from tests.support.training_preload import VIRTUAL_PRELOAD

QUICK = [case for case in CASES if case.name in (MEGATRON, "fssdp", "fssdp, exact shares", "quota")]


@cache
def counts(*, whole):
    num_ranks, cases = (RANKS, CASES) if whole else (2, QUICK)
    return most_of(run_ranks(count_on_rank, num_ranks, cases, preload=VIRTUAL_PRELOAD))


def assert_in_budget(case, counts):
    """No strategy waits more often than Megatron, also if it plans each micro-batch by its counts."""
    megatron, passes = counts[MEGATRON], counts[case.name]
    waits = megatron.first.synchronizations
    assert passes.first.synchronizations == waits, passes.first.places
    assert passes.again.synchronizations <= waits, passes.again.places
    if case.settings.get("overlap", True) and not case.plans_after_gate:
        more = 4 if case.shares == "even" else 8
        assert passes.first.operators_before <= megatron.first.operators_before + more
    if case.plans_after_gate:
        # The wait comes before the remap, and there is no other one.
        operators = passes.first.operators_before + passes.first.operators_after
        assert operators <= megatron.first.operators_before
    else:
        # The rows leave directly after the wait.
        assert passes.first.operators_after <= megatron.first.operators_after
    assert passes.first.plans_ahead <= 1  # The next layer is planned while the rows travel.


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_the_budgets_hold(case):
    assert_in_budget(case, counts(whole=False))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_budgets_hold_under_every_strategy(case):
    assert_in_budget(case, counts(whole=True))
