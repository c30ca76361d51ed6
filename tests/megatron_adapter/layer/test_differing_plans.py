"""Under ``FSSDP_CHECK_PLANS=1``, all ranks stop when their plans differ."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_fssdp.testing.ranks import RankError

from ..training_run import train, wrap

FSSDP = "fssdp slots=2 overlap_degree=4"
DIFFERENT_IN = 3


def plan_alone() -> None:
    """From one iteration on, have rank 1 plan no replicas in layer 2."""
    from megatron.training.global_vars import get_args

    from megatron_fssdp.planning.placement.placement import ExpertPlacement
    from megatron_fssdp.strategies.fssdp import FssdpStrategy
    from tests.support.random_placement import plain_transfer

    def other_plan(before_gate: Any, self: Any, context: Any, history: Any) -> Any:
        plan = before_gate(self, context, history)
        if os.environ["RANK"] != "1" or context.layer != 2 or get_args().curr_iteration + 1 < DIFFERENT_IN:
            return plan
        placement = ExpertPlacement.owners_only(context.owner_E, context.num_devices)
        return replace(plan, placement=placement, transfer=plain_transfer(placement))

    wrap(FssdpStrategy, "before_gate", other_plan)


def test_all_ranks_stop_and_name_layer_and_iteration(text_data: Path) -> None:
    options: Any = {"strategy": f"{FSSDP} FSSDP_CHECK_PLANS=1", "before": plan_alone, "grace_s": 60}
    with pytest.raises(RankError) as caught:
        train(2, "{EP2} --train-iters 4", text_data, **options)
    assert sorted(caught.value.ranks) == [0, 1]
    message = str(caught.value)
    for rank in range(2):
        # Layer 2 is planned while the rows of layer 1 travel.
        where = f"in iteration {DIFFERENT_IN}, in the forward pass of MoE layer 1: RuntimeError: [fssdp] "
        assert f"[fssdp] rank {rank} stopped {where}" in message
    wanted = f"the plan of layer 2 in iteration {DIFFERENT_IN} is not the same on all 2 ranks: ranks [1]"
    assert message.count(wanted) >= 2
