"""The owner map in a checkpoint is used where it fits; test_resumed_hints.py trains with it."""

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_fssdp.megatron_adapter.checkpoints import checkpoint_hints
from megatron_fssdp.megatron_adapter.checkpoints.checkpoint_hints import (
    OwnerHint,
    fitting_owners,
    hints_of,
    take_or_log,
)
from megatron_fssdp.megatron_adapter.experts.expert_slots import StageOwners
from megatron_fssdp.planning.placement.owner_map import OwnerMap
from megatron_fssdp.strategies.registry import build_strategy
from tests.support.training_preload import run_megatron_ranks

from ..uneven_owners import even_stage, random_stage

RNG = np.random.default_rng(1)
FIRST, OTHER = STAGES = [random_stage(RNG, numbers, 4, 2) for numbers in ([1, 2], [3, 4])]
BOTH = {"stages": [stage.as_lists() for stage in STAGES]}
SWAPPED = {"stages": BOTH["stages"][::-1]}
BUCKETS = {"distrib_optim_sharding_type": "dp_reshardable"}
EP4, EXPERTS8 = (StageOwners(OwnerMap.even(*sizes), (1, 2)) for sizes in ((2, 4, 4), (2, 8, 2)))
TWICE = {"stages": [{**FIRST.as_lists(), "slot_LE": [[0] * 4] * 2}, None]}


def test_a_hint_of_the_same_layout_gives_the_saved_owner_map() -> None:
    for rank, stage in enumerate(STAGES):
        owners = fitting_owners(BOTH, {}, even_stage(stage), rank, 2)
        assert owners is not None
        assert owners.digest() == stage.owners.digest()
    assert fitting_owners({"stages": [None]}, {}, even_stage(FIRST), 0, 1) is None


@pytest.mark.parametrize(
    ("hint", "metadata", "stage", "match"),
    [
        ({"stages": [FIRST.as_lists()]}, {}, FIRST, "1 pipeline stages, wanted 2"),
        (SWAPPED, {}, FIRST, "MoE layers 3, 4 .* on stage 0, wanted MoE layers 1, 2 "),
        (BOTH, {}, None, "wanted no MoE layers"),
        (BOTH, {}, EP4, "on 2 devices on stage 0, wanted .* on 4 devices"),
        (BOTH, {}, EXPERTS8, "4 experts on .*, wanted .* 8 experts"),
        (BOTH, BUCKETS, FIRST, "bucket position"),
        (TWICE, {}, FIRST, "used twice"),
    ],
)
def test_hints_of_other_layouts_are_not_used(
    hint: Any, metadata: Any, stage: StageOwners | None, match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        fitting_owners(hint, metadata, stage, 0, 2)


def test_all_ranks_gather_the_same_hint_and_one_logs_why_it_is_not_used() -> None:
    hints = run_megatron_ranks(_gather, 4, ep=2, pp=2)
    assert [hint["stages"] for hint, _, _ in hints] == [[None, OTHER.as_lists()]] * 4
    assert [none for _, none, _ in hints] == [None] * 4
    assert [len(lines) for _, _, lines in hints] == [3, 0, 0, 0]
    other_layout, *damaged = hints[0][2]
    assert "owners are not used: got an owner map of 1 pipeline stages, wanted 2" in other_layout
    assert all("owners are not used: it cannot be read" in line for line in damaged)


def _gather(rank: int, world_size: int) -> Any:
    from megatron.core import parallel_state

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    checkpoint_hints.logger.addHandler(handler)
    stage = STAGES[parallel_state.get_pipeline_model_parallel_rank()]
    slots: Any = SimpleNamespace(saved_owners=None)

    def hint(one: StageOwners) -> OwnerHint:
        slots.stage_owners = lambda: one
        return OwnerHint(slots)

    mine = stage if stage is OTHER else even_stage(stage)
    hints = [hint(one).gather() for one in (mine, even_stage(stage))]
    for saved in ({"stages": [None]}, [1], {"stages": [{"layer_numbers": [1]}, None]}):
        take_or_log(hint(stage), saved, {})
    assert slots.saved_owners is None
    return *hints, lines


@pytest.mark.parametrize(
    ("name", "keys", "wanted"),
    [
        ("ep", {}, ""),
        ("fssdp", {"reshard_interval": 0}, "loads"),
        ("fssdp", {}, "owners loads"),
        ("auto", {}, "owners choices loads"),
        ("auto", {"smartmoe": False}, "choices loads"),
    ],
)
def test_checkpoints_keep_what_a_run_may_change(name: str, keys: dict[str, Any], wanted: str) -> None:
    """Where owners stay, checkpoint formats that identify experts by position are allowed."""
    from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES

    strategy = build_strategy(name, STRATEGIES[name].settings(**keys))
    session: Any = SimpleNamespace(strategy=strategy, slots=None, runtime=None)
    found = hints_of(session)
    assert [hint.key for hint in found] == [f"megatron_fssdp_{word}" for word in wanted.split()]
