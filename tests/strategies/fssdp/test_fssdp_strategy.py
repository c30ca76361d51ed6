import dataclasses

import numpy as np
import pytest

from megatron_fssdp.planning.cost.cost_model import ClusterCost, LinkCost
from megatron_fssdp.planning.cost.deduplicated_traffic import TokenChoices
from megatron_fssdp.planning.cost.layer_profile import LayerProfile
from megatron_fssdp.planning.cost.link_seconds import gather_counts_s
from megatron_fssdp.planning.loads import LoadHistory, max_over_mean
from megatron_fssdp.planning.placement.placement import ExpertPlacement, even_owners
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.replica_life import ReplicaLife
from megatron_fssdp.planning.search import LEAST_SAVING, layer_search
from megatron_fssdp.planning.transfer.transfer_plan import two_level_transfer
from megatron_fssdp.strategies.fssdp.fssdp_settings import FssdpSettings
from megatron_fssdp.strategies.fssdp.fssdp_strategy import RENEWAL, FssdpStrategy
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan, plan_price
from tests.support.random_placement import with_replicas

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


def hot_counts_DE(*hot: int, pairs: int = 3_000) -> np.ndarray:
    counts_DE = np.full((DEVICES, EXPERTS), 100, np.int64)
    counts_DE[:, list(hot)] += pairs
    return counts_DE


def history_of(*counts: np.ndarray) -> LoadHistory:
    history = LoadHistory(3, DEVICES, EXPERTS)
    for counts_DE in counts:
        history.append(counts_DE)
    return history


# --- a placement is kept while it holds what its search promised

LAYER = 3


class Iterations:
    """Plans one layer's iterations, and counts its searches."""

    def __init__(self, slots: int = 1) -> None:
        self.strategy = FssdpStrategy(FssdpSettings(slots=slots))
        self.number = 0
        self.last: ExpertPlacement | None = None

    def searches(self, load_DE: np.ndarray, context: LayerContext = CONTEXT) -> bool:
        """Plan the next iteration; whether a search was made for it."""
        context = dataclasses.replace(context, layer=LAYER)
        found = self.strategy._found(context, load_DE, self.number).placement
        assert found.replicas_per_device_D.max() <= self.strategy.slots(context)
        is_new, self.last = found is not self.last, found
        self.number += 1
        return is_new


def test_equal_loads_are_searched_once_in_an_interval() -> None:
    iterations = Iterations()
    searched = [number for number in range(2 * RENEWAL) if iterations.searches(hot_counts_DE(3))]
    assert searched == [0, RENEWAL - LAYER, 2 * RENEWAL - LAYER]


def test_loads_that_break_the_promise_are_searched() -> None:
    iterations = Iterations()
    assert iterations.searches(hot_counts_DE(3))
    assert not iterations.searches(hot_counts_DE(3, pairs=3_005))
    assert not iterations.searches(0.7 * hot_counts_DE(3)), "less load lowers the promise"
    assert iterations.searches(hot_counts_DE(12))
    assert iterations.last is not None
    assert iterations.last.present_ED[12].sum() > 4


def test_other_owners_slots_and_costs_are_searched() -> None:
    load_DE = hot_counts_DE(3)
    moved = dataclasses.replace(CONTEXT, owner_E=np.roll(even_owners(EXPERTS, DEVICES), 2))
    more = dataclasses.replace(moved, profile=dataclasses.replace(PROFILE, token_bytes=8_000))
    iterations = Iterations()
    assert iterations.searches(load_DE)
    assert iterations.searches(load_DE, moved)
    assert iterations.last is not None
    np.testing.assert_array_equal(iterations.last.owner_E, moved.owner_E)
    assert iterations.searches(load_DE, more)


def test_a_kept_placement_costs_at_most_a_little_more_than_a_new_search() -> None:
    rng = np.random.default_rng(0)
    iterations, log_E = Iterations(), rng.normal(size=EXPERTS)
    for _ in range(40):
        log_E = log_E + 0.01 * rng.normal(size=EXPERTS)
        load_DE = np.tile(np.exp(log_E) * 4_000 / np.exp(log_E).sum(), (DEVICES, 1))
        iterations.searches(load_DE)
        search = layer_search(
            CONTEXT.owner_E, load_DE, CONTEXT.topology, PROFILE, life=ReplicaLife.ITERATION, hides=True
        )
        _, least_s = search.best_placement(slots=1, most_replicated=EXPERTS)
        assert iterations.last is not None
        assert search.seconds(iterations.last) <= (1 + 4 * LEAST_SAVING) * least_s


def test_an_iteration_that_is_planned_again_has_the_same_placement() -> None:
    """Evaluations between two iterations do so."""
    iterations = Iterations()
    assert iterations.searches(hot_counts_DE(3))
    for _ in range(3):
        iterations.number -= 1
        assert not iterations.searches(hot_counts_DE(3))


# --- every layer has the life that costs less, within the replicas that fit


def life_of(
    counts_DE: np.ndarray, mixed: tuple[int, int, int] | None, **settings: object
) -> tuple[ReplicaLife, int]:
    """Life and most replicas on a device of the plan for loads, and that the plan keeps to its limit."""
    profile = dataclasses.replace(PROFILE, memory_capacity=3, mixed_capacity=mixed, num_micro_batches=4)
    context = dataclasses.replace(CONTEXT, profile=dataclasses.replace(profile, flops_per_token=4e8))
    strategy = FssdpStrategy(FssdpSettings(**settings))  # type: ignore[arg-type]
    plan = strategy.before_gate(context, history_of(counts_DE))
    most = int(plan.placement.replicas_per_device_D.max())
    assert most <= strategy.slots_by_life(context)[plan.life] <= strategy.slots(context)
    assert plan.early == 0 or plan.life is ReplicaLife.ITERATION
    return plan.life, most


def test_replicas_for_a_pass_are_used_where_too_few_can_stay() -> None:
    one, several = hot_counts_DE(3), hot_counts_DE(0, 1, 2, 3, 4, 5)
    keeps, in_pass = ReplicaLife.ITERATION, ReplicaLife.LAYER_PASS
    assert life_of(one, (1, 8, 1))[0] is keeps, "one replica on each device is enough"
    life, most = life_of(several, (1, 8, 1))
    assert life is in_pass
    assert most > 1
    assert life_of(several, (8, 8, 1))[0] is keeps, "all can stay"
    # The measured iterations ran with as many replicas for a pass as a device owns.
    assert life_of(several, (0, 0, 1)) == (in_pass, 2)
    assert life_of(several, None)[0] is keeps
    assert life_of(several, (1, 8, 1), rematerialize=False) == (keeps, 3)
    assert life_of(one, (8, 8, 1), rematerialize=True)[0] is in_pass
    assert life_of(several, (1, 8, 1), slots=2) == (keeps, 2)


def test_a_layer_changes_the_life_of_its_replicas_with_its_loads() -> None:
    profile = dataclasses.replace(PROFILE, mixed_capacity=(1, 8, 1), flops_per_token=4e8)
    context, strategy = dataclasses.replace(CONTEXT, profile=profile), FssdpStrategy(FssdpSettings())
    history, lives = history_of(), []
    for hot in ((3,), *[(0, 1, 2, 3, 4, 5)] * 2, *[(3,)] * (RENEWAL + 1)):
        history.append(hot_counts_DE(*hot, pairs=9_000))
        lives.append(strategy.before_gate(context, history).life.name)
    assert lives[:3] == ["ITERATION", "LAYER_PASS", "LAYER_PASS"]
    assert lives[-1] == "ITERATION"


# --- tokens are shared out by exact counts where this takes no more modelled seconds

SLOW = dataclasses.replace(CONTEXT, profile=dataclasses.replace(PROFILE, flops_per_token=4e8))
"""Experts that compute for so long that the time to compute shares hardly counts."""


def plan_with(*replicas: tuple[int, int], policy: str = "even") -> LayerPlan:
    placement = with_replicas(CONTEXT.placement, replicas)
    return LayerPlan(placement, two_level_transfer(placement, CONTEXT.topology), dispatch_policy=policy)  # type: ignore[arg-type]


# Expert 3 belongs to device 1, which also has expert 2. Device 5 has the experts 10 and 11, with little load.
SHARED = plan_with((3, 5))
UNEVEN = hot_counts_DE(3, 2)


def policy_of(plan: LayerPlan, context: LayerContext, *counts: np.ndarray) -> str:
    return FssdpStrategy(FssdpSettings())._policy(plan, context, history_of(*counts))


def test_every_micro_batch_pays_for_its_shares() -> None:
    times = 4
    context = dataclasses.replace(CONTEXT, profile=dataclasses.replace(PROFILE, num_micro_batches=times))

    def difference(name: str, counts_DE: np.ndarray, *replicas: tuple[int, int]) -> float:
        """Seconds of a part of the price that exact dispatch has above even dispatch."""
        exact, even = (
            plan_price(plan_with(*replicas, policy=policy), counts_DE, context)
            for policy in ("exact", "even")
        )
        return float(getattr(exact, name) - getattr(even, name))

    assert difference("experts_s", UNEVEN, (3, 5)) < 0
    assert difference("before_s", UNEVEN, (3, 5)) == 0
    assert difference("seconds", UNEVEN) == 0, "there is nothing to share"
    shares_s = gather_counts_s(PROFILE.links, CONTEXT.topology, EXPERTS) + PROFILE.exact_shares_s
    nothing_DE = np.zeros_like(UNEVEN)
    assert difference("all_to_all_s", nothing_DE, (3, 5)) == pytest.approx(times * shares_s)


def test_exact_shares_are_used_where_they_pay_and_decided_once_for_a_placement() -> None:
    strategy = FssdpStrategy(FssdpSettings())
    assert strategy._policy(SHARED, SLOW, history_of(UNEVEN)) == "exact"
    assert strategy._policy(SHARED, SLOW, history_of(np.full_like(UNEVEN, 7))) == "exact"
    assert strategy._policy(plan_with((3, 5)), SLOW, history_of(np.zeros_like(UNEVEN))) == "even"
    small = dataclasses.replace(PROFILE, flops_per_token=1.0, token_bytes=1)
    fast = dataclasses.replace(CONTEXT, profile=small)
    assert policy_of(SHARED, fast, UNEVEN // 10) == "even", "the shares take longer than they save"
    assert policy_of(SHARED, SLOW) == "even", "no loads are known"
    # Evenly, every device would compute its own tokens of expert 3, and device 6 those of expert 12 as well.
    everywhere = plan_with(*((3, device) for device in range(DEVICES) if device != 1))
    counts_DE = hot_counts_DE(3)
    counts_DE[:, 12] += 400
    assert policy_of(everywhere, SLOW, counts_DE) == "exact"


MICRO_BATCHES = 8
TIMES = dataclasses.replace(PROFILE, num_micro_batches=MICRO_BATCHES)


def drifting(seed: int, num_iterations: int) -> list[list[np.ndarray]]:
    """Micro-batches of iterations: log-normal loads, which drift from one to the next by sigma 0.3."""
    rng = np.random.default_rng(seed)
    mean_E = rng.normal(size=EXPERTS)

    def micro_batch() -> np.ndarray:
        load_E = np.exp(mean_E + 0.3 * rng.normal(size=EXPERTS))
        return rng.multinomial(4_096, load_E / load_E.sum(), size=DEVICES)

    return [[micro_batch() for _ in range(MICRO_BATCHES)] for _ in range(num_iterations)]


def history_with(*iterations: list[np.ndarray]) -> LoadHistory:
    history = LoadHistory(3, DEVICES, EXPERTS)
    for of_iteration in iterations:
        history.append(sum(of_iteration), [lambda counts_DE=one: counts_DE for one in of_iteration])  # type: ignore[misc]
    return history


def test_loads_that_drift_between_micro_batches_are_shared_exactly() -> None:
    context = dataclasses.replace(CONTEXT, profile=TIMES)
    exact, even = [], []
    for seed in range(6):
        *past, coming = drifting(seed, 4)
        plan = FssdpStrategy(FssdpSettings(slots=3)).before_gate(context, history_with(*past))
        assert plan.dispatch_policy == "exact"
        for ratios, way in ((exact, plan), (even, dataclasses.replace(plan, dispatch_policy="even"))):
            ratios += [max_over_mean(way.dispatch(one, CONTEXT.topology).device_tokens_D) for one in coming]
    assert max(exact) <= 1.1 < np.mean(even)


def test_single_micro_batches_decide_and_equal_ones_decide_as_their_sum() -> None:
    """The simulator knows sums, of equal micro-batches."""
    context = dataclasses.replace(CONTEXT, profile=TIMES)
    policies = []
    for seed in range(12):
        (of_iteration,) = drifting(seed, 1)
        equal, total = [of_iteration[0]] * MICRO_BATCHES, MICRO_BATCHES * of_iteration[0]
        plans = [
            FssdpStrategy(FssdpSettings(slots=1)).before_gate(context, history)
            for history in (history_with(of_iteration), history_of(sum(of_iteration)))
        ]
        policies.append(tuple(plan.dispatch_policy for plan in plans))
        known, alone = (
            FssdpStrategy(FssdpSettings())._policy(plans[0], context, history)
            for history in (history_with(equal), history_of(total))
        )
        assert known == alone
    assert set(policies) == {("exact", "even"), ("exact", "exact"), ("even", "even")}


def test_price_decides_unless_it_knows_too_little_or_a_graph_has_one_form() -> None:
    def policy(context: LayerContext = SLOW, **settings: object) -> str:
        strategy = FssdpStrategy(FssdpSettings(slots=1, **settings))
        rng = np.random.default_rng(0)
        counts_DE = rng.integers(0, 100, (DEVICES, EXPERTS)) * (1 + 9 * (np.arange(EXPERTS) < 4))
        plan = strategy.before_gate(context, history_of(counts_DE))
        assert plan.placement.num_replicas
        return plan.dispatch_policy

    assert policy() == "exact"
    for choices, deduplicated in ((TokenChoices(1), True), (TokenChoices(1, is_fused=True), False)):
        profile = dataclasses.replace(SLOW.costs, choices=choices, deduplicated=deduplicated)
        once = dataclasses.replace(SLOW, profile=profile)
        assert policy(once) == "even", "its price does not know which tokens travel"
    assert policy(overlap_degree=4) == "even"
    assert policy(planner="hecate") == "even"
    unmeasured = dataclasses.replace(CONTEXT, profile=None)
    assert policy(unmeasured) == "even"
    assert policy(dataclasses.replace(SLOW, shares_evenly=True)) == "even"
