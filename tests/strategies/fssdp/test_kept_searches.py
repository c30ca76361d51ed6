import dataclasses

import numpy as np
import pytest

from megatron_fssdp.planning.placement.placement import even_owners
from megatron_fssdp.planning.replica_life import ReplicaLife
from megatron_fssdp.planning.search import LEAST_SAVING
from megatron_fssdp.strategies.fssdp.kept_searches import RENEWAL, KeptSearches, search_of

from .hot_layer import CONTEXT, DEVICES, EXPERTS, PROFILE, hot_counts_DE

LAYER = 3


class Iterations(KeptSearches):
    """Plans one layer's iterations with one slot, and counts its searches."""

    def __init__(self):
        super().__init__(lambda _: {ReplicaLife.ITERATION: 1}, hides=True)
        self.num_searches = self.number = 0
        self.last = None

    def searched(self, *args):
        self.num_searches += 1
        return super().searched(*args)

    def searches(self, load_DE, context=CONTEXT):
        """Plan the next iteration; whether a search was made for it."""
        before, context = self.num_searches, dataclasses.replace(context, layer=LAYER)
        self.last = self.of(context, load_DE, self.number).placement
        assert self.last.replicas_per_device_D.max() <= 1
        self.number += 1
        return self.num_searches > before


@pytest.mark.parametrize("more", [0, 1])
def test_loads_are_searched_once_in_an_interval_and_equal_ones_until_nothing_changes(more):
    iterations = Iterations()
    loads = (hot_counts_DE(3, pairs=3_000 + more * number) for number in range(3 * RENEWAL))
    searched = [number for number, load_DE in enumerate(loads) if iterations.searches(load_DE)]
    assert searched == [0, *(times * RENEWAL - LAYER for times in range(1, 4 if more else 2))]


def test_loads_that_break_the_promise_are_searched():
    iterations = Iterations()
    assert iterations.searches(hot_counts_DE(3))
    assert not iterations.searches(hot_counts_DE(3, pairs=3_005))
    assert not iterations.searches(0.7 * hot_counts_DE(3)), "less load lowers the promise"
    assert iterations.searches(hot_counts_DE(12))
    assert iterations.last is not None
    assert iterations.last.present_ED[12].sum() > 4


def test_other_owners_slots_and_costs_are_searched():
    load_DE = hot_counts_DE(3)
    moved = dataclasses.replace(CONTEXT, owner_E=np.roll(even_owners(EXPERTS, DEVICES), 2))
    more = dataclasses.replace(moved, profile=dataclasses.replace(PROFILE, token_bytes=8_000))
    iterations = Iterations()
    assert iterations.searches(load_DE)
    assert iterations.searches(load_DE, moved)
    assert iterations.last is not None
    np.testing.assert_array_equal(iterations.last.owner_E, moved.owner_E)
    assert iterations.searches(load_DE, more)


def test_a_kept_placement_costs_at_most_a_little_more_than_a_new_search():
    """Both are searches that may miss the best placement, so single ones differ by more than all together."""
    ratios = []
    for seed in range(6):
        rng = np.random.default_rng(seed)
        iterations, log_E = Iterations(), rng.normal(size=EXPERTS)
        for _ in range(40):
            log_E = log_E + 0.01 * rng.normal(size=EXPERTS)
            load_DE = np.tile(np.exp(log_E) * 4_000 / np.exp(log_E).sum(), (DEVICES, 1))
            iterations.searches(load_DE)
            search = search_of(CONTEXT, load_DE, ReplicaLife.ITERATION, True)
            _, least_s = search.best_placement(slots=1)
            assert iterations.last is not None
            ratios.append(search.seconds(iterations.last) / least_s)
    assert max(ratios) <= 1 + 8 * LEAST_SAVING
    assert np.mean(ratios) <= 1 + LEAST_SAVING / 2


def test_an_iteration_that_is_planned_again_has_the_same_placement():
    """Evaluations between two iterations do so."""
    iterations = Iterations()
    assert iterations.searches(hot_counts_DE(3))
    for _ in range(3):
        iterations.number -= 1
        assert not iterations.searches(hot_counts_DE(3))
