"""Tokens are shared out by exact counts where this saves more modelled seconds than it takes."""

import dataclasses

import numpy as np
import pytest

from megatron_fssdp.config.strategy.fssdp_settings import FssdpSettings
from megatron_fssdp.planning.cost.layer_seconds import counts_seconds
from megatron_fssdp.planning.transfer.transfer_plan import two_level_transfer
from megatron_fssdp.strategies.fssdp.fssdp_strategy import FssdpStrategy
from megatron_fssdp.strategies.fssdp.priced_dispatch import PricedDispatch
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.plan_seconds import plan_price

from .hot_layers import CONTEXT, DEVICES, EXPERTS, PROFILE, history_of, hot_counts_DE

SLOW = dataclasses.replace(CONTEXT, profile=dataclasses.replace(PROFILE, flops_per_token=4e8))
"""Experts that compute for so long that the time to compute shares hardly counts."""


def plan_with(*replicas: tuple[int, int], policy: str = "even") -> LayerPlan:
    placement = CONTEXT.owners.with_replicas(replicas)
    return LayerPlan(placement, two_level_transfer(placement, CONTEXT.topology), dispatch_policy=policy)  # type: ignore[arg-type]


# Expert 3 belongs to device 1, which also has expert 2. Device 5 has the experts 10 and 11, with little load.
SHARED = plan_with((3, 5))
UNEVEN = hot_counts_DE(3, 2)


def policy_of(plan: LayerPlan, context: LayerContext, *counts: np.ndarray) -> str:
    return PricedDispatch().policy(plan, context, history_of(*counts))


def test_every_micro_batch_pays_for_its_shares() -> None:
    times = 4
    context = dataclasses.replace(CONTEXT, profile=dataclasses.replace(PROFILE, num_micro_batches=times))

    def difference(name: str, counts_DE: np.ndarray, *replicas: tuple[int, int]) -> float:
        """Seconds of a part of the price that exact dispatch has above even dispatch."""
        exact, even = (
            plan_price(plan_with(*replicas, policy=policy), counts_DE, context, num_micro_batches=times)
            for policy in ("exact", "even")
        )
        return float(getattr(exact, name) - getattr(even, name))

    assert difference("experts_s", UNEVEN, (3, 5)) < 0
    assert difference("before_s", UNEVEN, (3, 5)) == 0
    assert difference("seconds", UNEVEN) == 0, "there is nothing to share"
    shares_s = counts_seconds(PROFILE, CONTEXT.topology, EXPERTS) + PROFILE.exact_shares_s
    nothing_DE = np.zeros_like(UNEVEN)
    assert difference("all_to_all_s", nothing_DE, (3, 5)) == pytest.approx(times * shares_s)


def test_it_is_used_where_it_pays() -> None:
    assert policy_of(SHARED, SLOW, UNEVEN) == "exact"
    small = dataclasses.replace(PROFILE, flops_per_token=1.0, token_bytes=1)
    fast = dataclasses.replace(CONTEXT, profile=small)
    assert policy_of(SHARED, fast, UNEVEN // 10) == "even", "the shares take longer than they save"
    assert policy_of(LayerPlan.owners_only(CONTEXT), SLOW, UNEVEN) == "even", "there is nothing to share"
    assert policy_of(SHARED, SLOW) == "even", "no loads are known"


def test_an_expert_on_all_devices_is_shared_if_one_device_has_more_to_compute() -> None:
    """Evenly, every device would compute its own tokens of the expert."""
    everywhere = plan_with(*((3, device) for device in range(DEVICES) if device != 1))
    counts_DE = hot_counts_DE(3)
    counts_DE[:, 12] += 400  # only on its owner, device 6, which computes its own tokens of expert 3 as well
    assert policy_of(everywhere, SLOW, counts_DE) == "exact"


def test_a_placement_is_decided_once() -> None:
    dispatch = PricedDispatch()
    assert dispatch.policy(SHARED, SLOW, history_of(UNEVEN)) == "exact"
    assert dispatch.policy(SHARED, SLOW, history_of(np.full_like(UNEVEN, 7))) == "exact"
    assert dispatch.policy(plan_with((3, 5)), SLOW, history_of(np.zeros_like(UNEVEN))) == "even"


def test_the_strategy_decides_unless_the_policy_or_the_limits_are_given() -> None:
    def policy(context: LayerContext = SLOW, **settings: object) -> str:
        strategy = FssdpStrategy(FssdpSettings(slots=1, **settings))
        rng = np.random.default_rng(0)
        counts_DE = rng.integers(0, 100, (DEVICES, EXPERTS)) * (1 + 9 * (np.arange(EXPERTS) < 4))
        plan = strategy.before_gate(context, history_of(counts_DE))
        assert plan.placement.num_replicas
        return plan.dispatch_policy

    assert policy() == "exact"
    assert policy(exchange="deduplicated") == "even", "its price does not know which tokens travel"
    assert policy(dispatch_policy="even") == "even"
    assert policy(overlap_degree=4) == "even"
    assert policy(planner="hecate") == "even"
    assert policy(overlap_degree=4, dispatch_policy="exact") == "exact"
    unmeasured = dataclasses.replace(CONTEXT, profile=None)
    assert policy(unmeasured) == "even"


def test_the_host_waits_for_counts_only_to_calibrate() -> None:
    for policy in ("even", "exact", None):
        assert not FssdpStrategy(FssdpSettings(dispatch_policy=policy)).asks_after_gate(1)
    assert FssdpStrategy(FssdpSettings(calibrate=True)).asks_after_gate(1)


def test_calibration_keeps_the_way_of_dispatch() -> None:
    """With the planner by seconds, too: replicas are only added, and loads are still shared exactly."""
    strategy = FssdpStrategy(FssdpSettings(slots=2, calibrate=True))
    plan = strategy.before_gate(SLOW, history_of(hot_counts_DE(3, 2), hot_counts_DE(3, 2)))
    assert plan.placement.num_replicas
    after = strategy.after_gate(SLOW, hot_counts_DE(12), plan, 1)
    assert after is not plan
    assert after.dispatch_policy == plan.dispatch_policy
    assert not (plan.placement.present_ED & ~after.placement.present_ED).any()
