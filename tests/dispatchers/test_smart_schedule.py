"""Dispatch, experts and combine in steps give the stock layer's results and gradients."""

from typing import Any

import pytest
import torch

from megatron_fssdp.dispatchers.smart_schedule import SmartScheduleTokenDispatcher, _Pass
from megatron_fssdp.planning.placement.topology import GroupRing

from .slot_layers import (
    BF16,
    OVERLAP,
    PADDED,
    RECOMPUTE,
    SHARED,
    TOP1,
    TOP4,
    SlotCase,
    compare,
    run_layer_ranks,
)

CASES = {
    "groups of 1": SlotCase(group_size=1),
    "groups of 2": SlotCase(group_size=2),
    "one group": SlotCase(group_size=4, nodes=(0, 0, 0, 0)),
    "own group last": SlotCase(TOP4, group_size=1, own_last=True),
    "groups of 2, own group last, recomputed": SlotCase(RECOMPUTE, group_size=2, own_last=True),
    "experts recomputed": SlotCase(group_size=1, recomputes_experts=True),
    "empty slots, skewed, top-1": SlotCase(TOP1, group_size=2, replicas=False, skew=2.0),
    "ranks without rows": SlotCase(
        {"moe_expert_capacity_factor": 8.0}, group_size=1, tokens=(5, 9, 1, 12), silent=(1, 2)
    ),
    "capacity": SlotCase({"moe_expert_capacity_factor": 0.7}, group_size=2, skew=1.0),
    "capacity, padded": SlotCase(PADDED, group_size=1),
    "shared experts": SlotCase(SHARED, group_size=2),
    "shared experts, overlapped": SlotCase(OVERLAP, group_size=1),
    "shared experts, overlapped, recomputed": SlotCase({**OVERLAP, **RECOMPUTE}, group_size=1),
    "segments": SlotCase(group_size=1, segments=True),
    "segments, groups of 2": SlotCase(TOP4, group_size=2, segments=True),
    "bf16": SlotCase(BF16, group_size=2),
}


def test_layers_equal_the_stock_layer() -> None:
    results = run_layer_ranks(compare, 4, CASES, ep=4)
    for name, case in CASES.items():
        tolerance = 2e-2 if "bf16" in case.config else 1e-6
        num_steps = 4 // (case.group_size or 1)
        num_forward = 4 if "recompute_modules" in case.config else 2  # two micro-batches
        for of_rank in results:
            result = of_rank[name]
            assert {"output", "input", "router.weight"} < set(result.errors)
            assert max(result.errors.values()) < tolerance, (name, result.errors)
            assert result.num_calls == num_steps * num_forward * (1 + case.recomputes_experts), name
            # Once in the last step of each forward pass, and once before each backward pass.
            assert result.num_awaited == num_forward + 2, name


def test_weights_are_awaited_where_rows_need_them() -> None:
    """Four groups of one rank; slot 1 of two can still be in transfer."""
    counts_DP = torch.tensor([[0, 5], [3, 0], [2, 1], [4, 0]])  # from ranks 0 to 3

    def steps_that_wait(in_transfer: list[int] | None, own_last: bool) -> list[int]:
        nothing: Any = None
        ring = GroupRing(0, 4, 1, own_last)
        one_pass = _Pass(ring, counts_DP, [], nothing, nothing, in_transfer, nothing)
        return [step for step in range(4) if one_pass.needs_weights(step)]

    assert steps_that_wait([1], own_last=False) == [0, 2, 3]
    # A rank's own rows come last, so rank 1's rows are computed before any wait.
    assert steps_that_wait([1], own_last=True) == [1, 3]
    assert steps_that_wait([], own_last=True) == [3]
    assert steps_that_wait(None, own_last=True) == [0, 1, 2, 3]


def test_settings_that_do_not_fit_are_refused() -> None:
    for message in run_layer_ranks(_refusal, 2, False, tp=2, ep=1, etp=2):
        assert "tensor parallelism over 2 ranks" in message
    assert all("--delay-wgrad-compute" in message for message in run_layer_ranks(_refusal, 2, True, ep=2))


def _refusal(rank: int, world_size: int, delays: bool) -> str:
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    from ..megatron_adapter.layer.small_config import moe_config

    groups = get_default_pg_collection()
    config = moe_config(groups.ep.size(), 8, 4)
    config.delay_wgrad_compute = delays
    slots = list(range(4 // groups.ep.size()))
    with pytest.raises(ValueError) as error:  # noqa: PT011
        SmartScheduleTokenDispatcher(len(slots), slots, config, groups, ring=GroupRing(0, 4, 2))
    return str(error.value)
