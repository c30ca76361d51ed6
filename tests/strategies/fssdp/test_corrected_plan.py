"""``fssdp`` corrects its plans after the gate, and leaves slots unplanned where forecasts do not hold."""

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.config.strategy.fssdp_settings import FssdpSettings
from megatron_fssdp.planning.balanced.replica_planner import LayerSearch
from megatron_fssdp.planning.cost import host_seconds
from megatron_fssdp.planning.cost.cluster_cost import ClusterCost
from megatron_fssdp.planning.cost.cost_model import LinkCost
from megatron_fssdp.planning.cost.layer_profile import LayerProfile
from megatron_fssdp.planning.loads.load_history import LoadHistory
from megatron_fssdp.planning.native.kernel import KernelForm
from megatron_fssdp.planning.placement.owner_map import OwnerMap
from megatron_fssdp.planning.placement.placement import even_owners
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.strategies.fssdp import corrected_plan
from megatron_fssdp.strategies.fssdp.corrected_plan import ExactCounts
from megatron_fssdp.strategies.fssdp.fssdp_strategy import FssdpStrategy
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.plan_seconds import plan_seconds
from tests.drawn_examples import examples

DEVICES, EXPERTS = 8, 16
NEAR, FAR = LinkCost(1e-5, 1 / 1e10), LinkCost(1e-5, 1 / 1e9)
PROFILE = LayerProfile(
    non_moe_s=2e-2,
    cluster=ClusterCost(NEAR, FAR, expert_flops_per_s=1e12),
    expert_bytes=4_000_000,
    token_bytes=4_000,
    flops_per_token=4e6,
    memory_capacity=4,
)
CONTEXT = LayerContext(1, even_owners(EXPERTS, DEVICES), Topology.uniform(DEVICES, 4), PROFILE)


@pytest.fixture(scope="module", autouse=True)
def _host_times_of_compiled_kernels() -> Iterator[None]:
    """With the times of plain kernels, corrections of layers of a few milliseconds would not pay."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (corrected_plan, host_seconds):
            patch.setattr(module, "kernel_form", lambda: KernelForm(True))
        yield


def hot_counts_DE(*hot: int, pairs: int = 3_000) -> np.ndarray:
    counts_DE = np.full((DEVICES, EXPERTS), 100, np.int64)
    counts_DE[:, list(hot)] += pairs
    return counts_DE


def strategy(**settings: object) -> FssdpStrategy:
    return FssdpStrategy(FssdpSettings(slots=1, **settings))


def iterations(strategy: FssdpStrategy, *counts: np.ndarray) -> list[tuple[LayerPlan, LayerPlan]]:
    """The plans before and after the gate of iterations with these counts."""
    history, found = LoadHistory(strategy.window, DEVICES, EXPERTS), []
    for counts_DE in counts:
        planned = strategy.before_gate(CONTEXT, history)
        found.append((planned, strategy.after_gate(CONTEXT, counts_DE, planned, 1)))
        history.append(counts_DE)
    return found


def test_full_slots_are_used_again_when_another_expert_becomes_hot() -> None:
    old, new = hot_counts_DE(3), hot_counts_DE(12)
    *_, (same, kept), (planned, corrected) = iterations(strategy(), old, old, old, new)
    assert kept is same, "the forecast holds, so nothing changes"
    assert len(kept.placement.holders(3)) > 4
    assert (
        planned.placement.replicas_per_device_D.max() == 1 == corrected.placement.replicas_per_device_D.max()
    )
    assert len(corrected.placement.holders(12)) > 4 > len(corrected.placement.holders(3))
    corrected_s = plan_seconds(corrected, new, CONTEXT, planned=planned)
    assert corrected_s < 0.8 * plan_seconds(planned, new, CONTEXT)
    *_, (planned, corrected) = iterations(strategy(calibrate=False), old, old, old, new)
    assert corrected is planned


def test_a_hot_expert_in_the_first_measured_iteration_gets_replicas() -> None:
    ((planned, corrected),) = iterations(strategy(), hot_counts_DE(5))
    assert not planned.placement.num_replicas
    assert len(corrected.placement.holders(5)) > 4


def test_replicas_are_dropped_when_the_load_becomes_even() -> None:
    hot, even = hot_counts_DE(3), hot_counts_DE()
    *_, (planned, corrected) = iterations(strategy(), hot, hot, hot, even)
    assert planned.placement.num_replicas > corrected.placement.num_replicas
    assert not (corrected.placement.present_ED & ~planned.placement.present_ED).any(), "nothing is gathered"


def test_slots_stay_free_where_forecasts_never_hold_and_are_planned_again_where_they_do() -> None:
    large = dataclasses.replace(PROFILE, expert_bytes=40_000_000)  # so that a wrong gather is expensive
    context = dataclasses.replace(CONTEXT, profile=large)
    fssdp, history = strategy(), LoadHistory(5, DEVICES, EXPERTS)
    planned_ahead = []
    for hot in [0, 5, 10, 15, 4, 9, 14, 3, 8, 13, *([2] * 8)]:
        counts_DE = hot_counts_DE(hot, pairs=12_000)
        plan = fssdp.before_gate(context, history)
        planned_ahead.append(plan.placement.num_replicas > 0)
        after = fssdp.after_gate(context, counts_DE, plan, 1)
        assert len(after.placement.holders(hot)) > 2
        history.append(counts_DE)
    assert not any(planned_ahead[4:10])
    assert planned_ahead[-1]


@pytest.mark.parametrize("settings", [{}, {"overlap": False}, {"rematerialize": True}, {"split": True}])
@given(seed=st.integers(0, 2**32 - 1), num_micro_batches=st.integers(1, 3))
@examples(8)
def test_corrections_never_cost_more_and_keep_the_limits(
    settings: dict[str, bool], seed: int, num_micro_batches: int
) -> None:
    rng = np.random.default_rng(seed)
    fssdp, history = strategy(**settings), LoadHistory(5, DEVICES, EXPERTS)
    for _ in range(4):
        counts_DE = rng.integers(0, 200, (DEVICES, EXPERTS)) * (1 + 30 * (rng.random(EXPERTS) < 0.1))
        planned = fssdp.check_plan(CONTEXT, fssdp.before_gate(CONTEXT, history))
        after = fssdp.check_plan(CONTEXT, fssdp.after_gate(CONTEXT, counts_DE, planned, num_micro_batches))
        assert after.placement.replicas_per_device_D.max() <= 1
        assert (after.gather_ahead, after.rematerialize) == (planned.gather_ahead, planned.rematerialize)
        total_DE = num_micro_batches * counts_DE
        seconds = [
            plan_seconds(plan, total_DE, CONTEXT, num_micro_batches=num_micro_batches, planned=planned)
            for plan in (planned, after)
        ]
        assert seconds[1] <= seconds[0]
        history.append(total_DE)


def test_the_assignment_of_quotas_suffices_where_a_search_takes_longer_than_it_could_still_save() -> None:
    small = dataclasses.replace(PROFILE, token_bytes=40, expert_bytes=40_000, flops_per_token=1e5)
    context = dataclasses.replace(CONTEXT, profile=small)
    plain, counts_DE = LayerPlan.owners_only(context), hot_counts_DE(6, 7, pairs=300)
    exact = ExactCounts(context, counts_DE, 1, slots=2, quota_policy="unbound")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayerSearch, "best_placement", None)  # The search is not asked.
        corrected = exact.corrected(plain, None)
    assert corrected.has_searched
    assert 0 < corrected.plan.placement.replicas_per_device_D.max() <= 2
    assert corrected.seconds < plan_seconds(plain, counts_DE, context)
    tokens_D = corrected.plan.traffic(counts_DE, context.topology).tokens_D
    assert tokens_D.max() <= 1.01 * tokens_D.mean(), "tokens are divided as exactly as under `quota`"


def test_all_ranks_correct_alike() -> None:
    """A second object that gets the same questions gives the same answers."""
    counts = [hot_counts_DE(hot) for hot in (3, 3, 12, 12, 5, 5, 5)]
    for one, other in zip(iterations(strategy(), *counts), iterations(strategy(), *counts), strict=True):
        assert [plan.placement for plan in one] == [plan.placement for plan in other]


def test_owners_stay_where_hot_experts_keep_moving() -> None:
    """A move that pays while one device is hot does not last until the next device is."""
    slow = dataclasses.replace(PROFILE, non_moe_s=2e-3, owned_bytes=120_000_000)
    context = dataclasses.replace(CONTEXT, profile=slow)
    owners = OwnerMap.even(1, EXPERTS, DEVICES)
    for period, moves in ((1_000, True), (3, False)):
        fssdp, history = FssdpStrategy(FssdpSettings(slots=0)), LoadHistory(5, DEVICES, EXPERTS)
        new = owners
        for iteration in range(20):
            if fssdp.reshards_at(iteration):
                settled = dataclasses.replace(context, num_since_jump=history.num_since_jump)
                new = fssdp.reshard([settled], history.mean_E()[None], new)
            device = iteration // period % DEVICES
            fssdp.before_gate(dataclasses.replace(context, owner_E=new.device_LE[0]), history)
            history.append(hot_counts_DE(2 * device, 2 * device + 1, pairs=1_000))
        assert bool(owners.moves_to(new)) == moves
