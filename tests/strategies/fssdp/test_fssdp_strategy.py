import dataclasses

import numpy as np
import pytest

from megatron_fssdp.planning.cost.deduplicated_traffic import TokenChoices
from megatron_fssdp.planning.cost.link_seconds import gather_counts_s
from megatron_fssdp.planning.loads import max_over_mean
from megatron_fssdp.planning.replica_life import ReplicaLife
from megatron_fssdp.planning.transfer.transfer_plan import two_level_transfer
from megatron_fssdp.strategies.fssdp import FssdpSettings
from megatron_fssdp.strategies.fssdp.fssdp_strategy import FssdpStrategy, with_cheaper_shares
from megatron_fssdp.strategies.fssdp.kept_searches import RENEWAL
from megatron_fssdp.strategies.layer_plan import LayerPlan
from megatron_fssdp.strategies.plan_price import plan_price
from tests.planning.placement_cases import history_of
from tests.support.random_placement import with_replicas

from .hot_layer import CONTEXT, DEVICES, EXPERTS, PROFILE, hot_counts_DE


def past_of(*counts):
    return history_of(CONTEXT, *counts, window=3)


# --- every layer has the life that costs less, within the replicas that fit


def life_of(counts_DE, mixed, **settings):
    """Life and most replicas on a device of the plan for loads, and that the plan keeps to its limit."""
    profile = dataclasses.replace(PROFILE, memory_capacity=3, mixed_capacity=mixed, num_micro_batches=4)
    context = dataclasses.replace(CONTEXT, profile=dataclasses.replace(profile, flops_per_token=4e8))
    strategy = FssdpStrategy(FssdpSettings(**settings))
    plan = strategy.before_gate(context, past_of(counts_DE))
    most = int(plan.placement.replicas_per_device_D.max())
    assert most <= strategy.slots_by_life(context)[plan.life] <= strategy.slots(context)
    assert plan.early == 0 or plan.life is ReplicaLife.ITERATION
    return plan.life, most


def test_replicas_for_a_pass_are_used_where_too_few_can_stay():
    single, several = hot_counts_DE(3), hot_counts_DE(0, 1, 2, 3, 4, 5)
    keeps, in_pass = ReplicaLife.ITERATION, ReplicaLife.LAYER_PASS
    assert life_of(single, (1, 8, 1))[0] is keeps, "one replica on each device is enough"
    life, most = life_of(several, (1, 8, 1))
    assert life is in_pass
    assert most > 1
    assert life_of(several, (8, 8, 1))[0] is keeps, "all can stay"
    # The measured iterations ran with as many replicas for a pass as a device owns.
    assert life_of(several, (0, 0, 1)) == (in_pass, 2)
    assert life_of(several, None)[0] is keeps
    assert life_of(several, (1, 8, 1), rematerialize=False) == (keeps, 3)
    assert life_of(single, (8, 8, 1), rematerialize=True)[0] is in_pass
    assert life_of(several, (1, 8, 1), slots=2) == (keeps, 2)


def test_a_layer_changes_the_life_of_its_replicas_with_its_loads():
    profile = dataclasses.replace(PROFILE, mixed_capacity=(1, 8, 1), flops_per_token=4e8)
    context, strategy = dataclasses.replace(CONTEXT, profile=profile), FssdpStrategy(FssdpSettings())
    history, lives = past_of(), []
    for hot in ((3,), *[(0, 1, 2, 3, 4, 5)] * 2, *[(3,)] * (RENEWAL + 1)):
        history.append(hot_counts_DE(*hot, pairs=9_000))
        lives.append(strategy.before_gate(context, history).life.name)
    assert lives[:3] == ["ITERATION", "LAYER_PASS", "LAYER_PASS"]
    assert lives[-1] == "ITERATION"


# --- tokens are shared out by exact counts where this takes no more modelled seconds

SLOW = dataclasses.replace(CONTEXT, profile=dataclasses.replace(PROFILE, flops_per_token=4e8))
"""Experts that compute for so long that the time to compute shares hardly counts."""


def plan_with(*replicas, policy="even"):
    placement = with_replicas(CONTEXT.placement, replicas)
    return LayerPlan(placement, two_level_transfer(placement, CONTEXT.topology), dispatch_policy=policy)


# Expert 3 belongs to device 1, which also has expert 2. Device 5 has the experts 10 and 11, with little load.
SHARED = plan_with((3, 5))
UNEVEN = hot_counts_DE(3, 2)


def policy_of(plan, context, *counts):
    return with_cheaper_shares(plan, context, past_of(*counts)).dispatch_policy


def test_every_micro_batch_pays_for_its_shares():
    times = 4
    context = dataclasses.replace(CONTEXT, profile=dataclasses.replace(PROFILE, num_micro_batches=times))

    def difference(name, counts_DE, *replicas):
        """Seconds of a part of the price that exact dispatch has above even dispatch."""
        plans = (plan_with(*replicas, policy=policy) for policy in ("exact", "even"))
        exact, even = (getattr(plan_price(plan, counts_DE, context), name) for plan in plans)
        return float(exact - even)

    assert difference("experts_s", UNEVEN, (3, 5)) < 0
    assert difference("before_s", UNEVEN, (3, 5)) == 0
    assert difference("seconds", UNEVEN) == 0, "there is nothing to share"
    shares_s = gather_counts_s(PROFILE.links, CONTEXT.topology, EXPERTS) + PROFILE.exact_shares_s
    nothing_DE = np.zeros_like(UNEVEN)
    assert difference("all_to_all_s", nothing_DE, (3, 5)) == pytest.approx(times * shares_s)


def test_exact_shares_are_used_where_they_pay_and_decided_once_for_a_placement():
    assert policy_of(SHARED, SLOW, UNEVEN) == "exact"
    assert policy_of(SHARED, SLOW, np.zeros_like(UNEVEN)) == "even"
    strategy = FssdpStrategy(FssdpSettings(slots=1, planned_from="past"))
    plans = [strategy.before_gate(SLOW, past_of(*[UNEVEN] * number)) for number in (1, 2, 3)]
    assert plans[0].placement.num_replicas
    assert plans[0] is plans[1] is plans[2]
    fast = dataclasses.replace(
        CONTEXT, profile=dataclasses.replace(PROFILE, flops_per_token=1.0, token_bytes=1)
    )
    assert policy_of(SHARED, fast, UNEVEN // 10) == "even", "the shares take longer than they save"
    assert policy_of(SHARED, SLOW) == "even", "no loads are known"
    # Evenly, every device would compute its own tokens of expert 3, and device 6 those of expert 12 as well.
    everywhere = plan_with(*((3, device) for device in range(DEVICES) if device != 1))
    counts_DE = hot_counts_DE(3)
    counts_DE[:, 12] += 400
    assert policy_of(everywhere, SLOW, counts_DE) == "exact"


MICRO_BATCHES = 8
TIMES = dataclasses.replace(PROFILE, num_micro_batches=MICRO_BATCHES)


def drifting(seed, num_iterations):
    """Micro-batches of iterations: log-normal loads, which drift from one to the next by sigma 0.3."""
    rng = np.random.default_rng(seed)
    mean_E = rng.normal(size=EXPERTS)

    def micro_batch():
        load_E = np.exp(mean_E + 0.3 * rng.normal(size=EXPERTS))
        return rng.multinomial(4_096, load_E / load_E.sum(), size=DEVICES)

    return [[micro_batch() for _ in range(MICRO_BATCHES)] for _ in range(num_iterations)]


def history_with(*iterations):
    history = past_of()
    for of_iteration in iterations:
        history.append(sum(of_iteration), [lambda counts_DE=batch: counts_DE for batch in of_iteration])
    return history


def test_loads_that_drift_between_micro_batches_are_shared_exactly():
    context = dataclasses.replace(CONTEXT, profile=TIMES)
    exact, even = [], []
    for seed in range(6):
        *past, coming = drifting(seed, 4)
        plan = FssdpStrategy(FssdpSettings(slots=3)).before_gate(context, history_with(*past))
        assert plan.dispatch_policy == "exact"
        for ratios, way in ((exact, plan), (even, dataclasses.replace(plan, dispatch_policy="even"))):
            ratios += [max_over_mean(way.dispatch(load, CONTEXT.topology).device_tokens_D) for load in coming]
    assert max(exact) <= 1.1 < np.mean(even)


def test_single_micro_batches_decide_and_equal_ones_decide_as_their_sum():
    """The simulator knows sums, of equal micro-batches."""
    context = dataclasses.replace(CONTEXT, profile=TIMES)
    policies = []
    for seed in range(12):
        (of_iteration,) = drifting(seed, 1)
        equal, total = [of_iteration[0]] * MICRO_BATCHES, MICRO_BATCHES * of_iteration[0]
        plans = [
            FssdpStrategy(FssdpSettings(slots=1)).before_gate(context, history)
            for history in (history_with(of_iteration), past_of(sum(of_iteration)))
        ]
        policies.append(tuple(plan.dispatch_policy for plan in plans))
        known, alone = (
            with_cheaper_shares(plans[0], context, history).dispatch_policy
            for history in (history_with(equal), past_of(total))
        )
        assert known == alone
    assert set(policies) == {("exact", "even"), ("exact", "exact"), ("even", "even")}


def test_price_decides_unless_it_knows_too_little_or_a_graph_has_one_form():
    def policy(context=SLOW, **settings):
        strategy = FssdpStrategy(FssdpSettings(slots=1, **settings))
        rng = np.random.default_rng(0)
        counts_DE = rng.integers(0, 100, (DEVICES, EXPERTS)) * (1 + 9 * (np.arange(EXPERTS) < 4))
        plan = strategy.before_gate(context, past_of(counts_DE))
        assert plan.placement.num_replicas
        return plan.dispatch_policy

    assert policy() == "exact"
    for choices, deduplicated in ((TokenChoices(1), True), (TokenChoices(1, is_fused=True), False)):
        profile = dataclasses.replace(SLOW.costs, choices=choices, deduplicated=deduplicated)
        once = dataclasses.replace(SLOW, profile=profile)
        assert policy(once) == "even", "its price does not know which tokens travel"
    assert policy(overlap_degree=4) == "even"
    assert policy(planner="hecate") == "even"
    assert policy(dataclasses.replace(CONTEXT, profile=None)) == "even"
    assert policy(dataclasses.replace(SLOW, shares_evenly=True)) == "even"
