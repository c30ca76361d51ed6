"""A layer keeps its placement while it holds what its search promised."""

import dataclasses

import numpy as np
import pytest

from megatron_fssdp.planning.placement.placement import even_owners
from megatron_fssdp.planning.search import LEAST_SAVING, LayerSearch, layer_search
from megatron_fssdp.strategies.fssdp.kept_placements import RENEWAL, KeptPlacements

from .hot_layers import CONTEXT, DEVICES, EXPERTS, PROFILE, hot_counts_DE

LAYER, SLOTS = 3, 1


def search_of(load_DE: np.ndarray, owner_E: np.ndarray = CONTEXT.owner_E, **costs: object) -> LayerSearch:
    profile = dataclasses.replace(PROFILE, **costs)  # type: ignore[arg-type]
    return layer_search(owner_E, load_DE, CONTEXT.topology, profile, rematerialize=False, hides=True)


class Iterations:
    """Plans one layer's iterations, and counts its searches."""

    def __init__(self) -> None:
        self.kept = KeptPlacements(num_iterations=10)
        self.number = 0

    def searches(self, search: LayerSearch, slots: int = SLOTS) -> bool:
        """Plan the next iteration; whether a search was made for it."""
        found, seconds = self.kept.best_placement(LAYER, self.number, search, slots)
        assert seconds == pytest.approx(search.seconds(found), rel=1e-12)
        assert found.replicas_per_device_D.max() <= slots
        before = getattr(self, "last", None)
        self.last = found
        self.number += 1
        return found is not before


def test_equal_loads_are_searched_once_in_an_interval() -> None:
    iterations, search = Iterations(), search_of(hot_counts_DE(3))
    searched = [number for number in range(2 * RENEWAL) if iterations.searches(search)]
    assert searched == [0, RENEWAL - LAYER, 2 * RENEWAL - LAYER]


def test_loads_that_break_the_promise_are_searched() -> None:
    iterations = Iterations()
    assert iterations.searches(search_of(hot_counts_DE(3)))
    assert not iterations.searches(search_of(hot_counts_DE(3, pairs=3_005)))
    assert not iterations.searches(search_of(0.7 * hot_counts_DE(3))), "less load lowers the promise"
    assert iterations.searches(search_of(hot_counts_DE(12)))
    assert iterations.last.present_ED[12].sum() > 4


def test_many_small_changes_are_compared_with_the_promise_and_not_with_each_other() -> None:
    iterations, pairs = Iterations(), [3_000 + 20 * i for i in range(RENEWAL - LAYER)]
    searched = [iterations.searches(search_of(hot_counts_DE(3, pairs=number))) for number in pairs]
    assert searched[0]
    assert any(searched[1:])
    assert not all(searched[1:])


def test_other_owners_slots_and_costs_are_searched() -> None:
    load_DE = hot_counts_DE(3)
    moved = np.roll(even_owners(EXPERTS, DEVICES), 2)
    iterations = Iterations()
    assert iterations.searches(search_of(load_DE))
    assert iterations.searches(search_of(load_DE, moved))
    np.testing.assert_array_equal(iterations.last.owner_E, moved)
    assert iterations.searches(search_of(load_DE, moved), slots=2)
    assert iterations.searches(search_of(load_DE, moved, token_bytes=8_000), slots=2)


def test_a_kept_placement_costs_at_most_a_little_more_than_a_new_search() -> None:
    rng = np.random.default_rng(0)
    iterations, log_E = Iterations(), rng.normal(size=EXPERTS)
    for _ in range(40):
        log_E = log_E + 0.01 * rng.normal(size=EXPERTS)
        load_DE = np.tile(np.exp(log_E) * 4_000 / np.exp(log_E).sum(), (DEVICES, 1))
        search = search_of(load_DE)
        iterations.searches(search)
        _, least_s = search.best_placement(slots=SLOTS, most_replicated=EXPERTS)
        assert search.seconds(iterations.last) <= (1 + 4 * LEAST_SAVING) * least_s


def test_iterations_before_the_last_one_can_be_planned_again() -> None:
    """`auto` does so."""
    kept, search = KeptPlacements(num_iterations=4), search_of(hot_counts_DE(3))
    first, _ = kept.best_placement(LAYER, 0, search, SLOTS)
    for number in (1, 2, 1, 2, 3):
        assert kept.best_placement(LAYER, number, search, SLOTS)[0] is first
