"""Balanced and unbound dispatch are used where they save more modelled seconds than the host takes."""

import dataclasses

import numpy as np

from megatron_fssdp.config.strategy.fssdp_settings import FssdpSettings
from megatron_fssdp.planning.cost.host_seconds import balanced_dispatch_s
from megatron_fssdp.planning.dispatch.token_dispatch import DispatchPolicy
from megatron_fssdp.planning.loads.load_history import LoadHistory
from megatron_fssdp.planning.transfer.transfer_plan import two_level_transfer
from megatron_fssdp.strategies.fssdp.fssdp_strategy import FssdpStrategy
from megatron_fssdp.strategies.fssdp.priced_dispatch import PricedDispatch, dispatched_seconds
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.plan_seconds import plan_seconds

from .test_corrected_plan import CONTEXT, DEVICES, EXPERTS, PROFILE, hot_counts_DE

SLOW = dataclasses.replace(CONTEXT, profile=dataclasses.replace(PROFILE, flops_per_token=1e9))
"""Experts that compute for so long that the host's time hardly counts."""


def plan_with(*replicas: tuple[int, int]) -> LayerPlan:
    plain = LayerPlan.owners_only(CONTEXT)
    placement = plain.placement.with_replicas(replicas)
    return dataclasses.replace(
        plain, placement=placement, transfer=two_level_transfer(placement, CONTEXT.topology)
    )


# Expert 3 belongs to device 1, which also has expert 2. Device 5 has the experts 10 and 11, with little load.
SHARED = plan_with((3, 5))
UNEVEN = hot_counts_DE(3, 2)


POLICIES: tuple[DispatchPolicy, ...] = ("even", "balanced", "unbound")


def history_of(*counts: np.ndarray) -> LoadHistory:
    history = LoadHistory(3, DEVICES, EXPERTS)
    for counts_DE in counts:
        history.append(counts_DE)
    return history


def test_the_host_splits_the_tokens_of_every_micro_batch_unless_they_are_split_evenly() -> None:
    times = 4
    context = dataclasses.replace(CONTEXT, profile=dataclasses.replace(PROFILE, num_micro_batches=times))

    def both_s(policy: DispatchPolicy, plan: LayerPlan = SHARED) -> tuple[float, float]:
        plan = dataclasses.replace(plan, dispatch_policy=policy)
        return (
            dispatched_seconds(plan, UNEVEN, context, num_micro_batches=times),
            plan_seconds(plan, UNEVEN, context, num_micro_batches=times),
        )

    host_s = times * balanced_dispatch_s(EXPERTS, DEVICES)
    for policy in ("balanced", "unbound"):
        with_host_s, without_s = both_s(policy)
        assert with_host_s == without_s + host_s
        assert without_s < both_s("even")[1]
    assert len({*both_s("even"), *both_s("even")}) == 1
    plain = LayerPlan.owners_only(CONTEXT)
    assert len({*both_s("unbound", plain)}) == 1, "there is nothing to split"


def policy_of(plan: LayerPlan, context: LayerContext, *counts: np.ndarray) -> str:
    return PricedDispatch().policy(plan, POLICIES, context, history_of(*counts))


def test_it_is_used_where_it_pays() -> None:
    assert policy_of(SHARED, SLOW, UNEVEN) == "unbound"
    small = dataclasses.replace(PROFILE, flops_per_token=1.0, token_bytes=1)
    fast = dataclasses.replace(CONTEXT, profile=small)
    assert policy_of(SHARED, fast, UNEVEN // 10) == "even", "the host is slower"
    assert policy_of(LayerPlan.owners_only(CONTEXT), SLOW, UNEVEN) == "even", "there is nothing to split"
    assert policy_of(SHARED, SLOW) == "even", "no loads are known"


def test_an_expert_on_all_devices_is_split_unbound_if_one_device_has_more_to_compute() -> None:
    everywhere = plan_with(*((3, device) for device in range(DEVICES) if device != 1))
    counts_DE = hot_counts_DE(3)
    counts_DE[:, 12] += 400  # only on its owner, device 6, which computes its own tokens of expert 3 as well
    assert policy_of(everywhere, SLOW, counts_DE) == "unbound"
    loads_D = {
        policy: dataclasses.replace(everywhere, dispatch_policy=policy)
        .dispatch([counts_DE], CONTEXT.topology)[0]
        .device_tokens_D()
        for policy in POLICIES
    }
    assert loads_D["even"].max() == loads_D["balanced"].max() > 1.05 * loads_D["unbound"].max()


def test_a_placement_is_decided_once() -> None:
    dispatch = PricedDispatch()
    assert dispatch.policy(SHARED, POLICIES, SLOW, history_of(UNEVEN)) == "unbound"
    assert dispatch.policy(SHARED, POLICIES, SLOW, history_of(np.full_like(UNEVEN, 7))) == "unbound"
    assert dispatch.policy(plan_with((3, 5)), POLICIES, SLOW, history_of(np.zeros_like(UNEVEN))) == "even"


def test_the_strategy_decides_unless_the_policy_or_the_limits_are_given() -> None:
    def policy(context: LayerContext = SLOW, **settings: object) -> str:
        strategy = FssdpStrategy(FssdpSettings(slots=1, **settings))
        rng = np.random.default_rng(0)
        counts_DE = rng.integers(0, 100, (DEVICES, EXPERTS)) * (1 + 9 * (np.arange(EXPERTS) < 4))
        plan = strategy.before_gate(context, history_of(counts_DE))
        assert plan.placement.num_replicas
        return plan.dispatch_policy

    assert policy() == "unbound"
    assert policy(exchange="deduplicated") == "balanced", "its price does not know more tokens that travel"
    assert policy(dispatch_policy="even") == "even"
    assert policy(overlap_degree=4) == "even"
    assert policy(planner="hecate") == "even"
    assert policy(overlap_degree=4, dispatch_policy="balanced") == "balanced"
