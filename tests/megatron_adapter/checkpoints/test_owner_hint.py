"""The owner map in a checkpoint is used where it fits; test_resumed_owners.py trains with it."""

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_fssdp.megatron_adapter.experts.expert_slots import StageOwners
from megatron_fssdp.planning.placement.owner_map import OwnerMap
from megatron_fssdp.testing.parallel_state import run_megatron_ranks

from ..uneven_owners import even_stage, random_stage


def _stages() -> list[StageOwners]:
    rng = np.random.default_rng(1)
    return [random_stage(rng, numbers, 4, 2) for numbers in ([1, 2], [3, 4])]


def _hint(stages: list[StageOwners]) -> dict[str, Any]:
    return {"stages": [stage.as_lists() for stage in stages]}


def test_a_hint_of_the_same_layout_gives_the_saved_owner_map() -> None:
    from megatron_fssdp.megatron_adapter.checkpoints.checkpoint_hints import fitting_owners

    stages = _stages()
    for rank, stage in enumerate(stages):
        owners = fitting_owners(_hint(stages), {}, even_stage(stage), rank, 2)
        assert owners is not None
        assert owners.digest() == stage.owners.digest()
    assert fitting_owners({"stages": [None]}, {}, even_stage(stages[0]), 0, 1) is None


FIRST, OTHER = _stages()
BUCKETS = {"distrib_optim_sharding_type": "dp_reshardable"}
EP4, EXPERTS8 = (StageOwners(OwnerMap.even(*sizes), (1, 2)) for sizes in ((2, 4, 4), (2, 8, 2)))
TWICE = {"stages": [{**FIRST.as_lists(), "slot_LE": [[0] * 4] * 2}, None]}


@pytest.mark.parametrize(
    ("hint", "metadata", "stage", "match"),
    [
        (_hint([FIRST]), {}, FIRST, "1 pipeline stages, wanted 2"),
        (_hint([OTHER, FIRST]), {}, FIRST, r"layers \[3, 4\] on stage 0, wanted \[1, 2\]"),
        (_hint(_stages()), {}, None, "wanted none"),
        (_hint(_stages()), {}, EP4, "2 expert-parallel devices, wanted 4"),
        (_hint(_stages()), {}, EXPERTS8, "4 experts of a layer, wanted 8"),
        (_hint(_stages()), BUCKETS, FIRST, "bucket position"),
        ([1], {}, FIRST, "cannot be read"),
        ({"stages": [{"layer_numbers": [1]}, None]}, {}, FIRST, "cannot be read"),
        (TWICE, {}, FIRST, "used twice"),
    ],
)
def test_hints_of_other_layouts_are_not_used(
    hint: Any, metadata: Any, stage: StageOwners | None, match: str
) -> None:
    from megatron_fssdp.megatron_adapter.checkpoints.checkpoint_hints import fitting_owners

    with pytest.raises(ValueError, match=match):
        fitting_owners(hint, metadata, stage, 0, 2)


def test_all_ranks_gather_the_same_hint() -> None:
    hints = run_megatron_ranks(_gather, 4, ep=2, pp=2)
    stages = _stages()
    assert [hint["stages"] for hint, _, _ in hints] == [[None, stages[1].as_lists()]] * 4
    assert [none for _, none, _ in hints] == [None] * 4
    # Rank 0 logs one line that says why the hint is not used; the run continues.
    assert [len(lines) for _, _, lines in hints] == [1, 0, 0, 0]
    assert "not used: got an owner map of 1 pipeline stages, wanted 2" in hints[0][2][0]


def _gather(rank: int, world_size: int) -> Any:
    from megatron.core import parallel_state

    from megatron_fssdp.megatron_adapter.checkpoints import checkpoint_hints
    from megatron_fssdp.megatron_adapter.checkpoints.checkpoint_hints import OwnerHint

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    checkpoint_hints.logger.addHandler(handler)
    stage = _stages()[parallel_state.get_pipeline_model_parallel_rank()]
    mine = stage if stage.layer_numbers == (3, 4) else even_stage(stage)
    adopted: list[OwnerMap] = []

    def hint(one: StageOwners) -> OwnerHint:
        slots: Any = SimpleNamespace(stage_owners=lambda: one, adopt=adopted.append)
        return OwnerHint(slots)

    hints = [hint(one).gather() for one in (mine, even_stage(stage))]
    hint(stage).take({"stages": [None]}, {})
    assert not adopted
    return *hints, lines
