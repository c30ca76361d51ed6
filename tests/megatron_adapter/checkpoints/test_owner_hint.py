"""The owner map in a checkpoint is used where it fits; test_resumed_hints.py trains with it."""

import logging
from types import SimpleNamespace
from unittest import mock

import pytest
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES
from megatron_fssdp.megatron_adapter.checkpoints import checkpoint_hints
from megatron_fssdp.megatron_adapter.checkpoints.checkpoint_hints import OwnerHint, take_or_log
from megatron_fssdp.planning.placement.owner_map import OwnerMap
from megatron_fssdp.strategies.registry import build_strategy
from tests.support.training_preload import on_ranks

from ..training_run import messages_of

EVEN = OwnerMap.even(2, 4, 2)
OWNERS = [EVEN.with_owners(EVEN.device_LE[:, order]) for order in ([2, 1, 0, 3], [1, 2, 3, 0])]
NUMBERS = [(1, 2), (3, 4)]
FIRST, OTHER = STAGES = [
    {"layer_numbers": [*numbers], **owners.as_lists()}
    for numbers, owners in zip(NUMBERS, OWNERS, strict=True)
]
BOTH, SWAPPED = {"stages": STAGES}, {"stages": STAGES[::-1]}
TWICE = {"stages": [{**FIRST, "slot_LE": [[0] * 4] * 2}, None]}


def slots_of(numbers, owners):
    return SimpleNamespace(layers=numbers, layer_numbers=lambda: numbers, owners=owners, saved_owners=None)


@pytest.mark.parametrize(
    ("hint", "sizes", "match"),
    [
        ({"stages": [FIRST]}, (2, 4, 2), "1 pipeline stages, wanted 2"),
        (SWAPPED, (2, 4, 2), r"MoE layers \(3, 4\) .* on stage 0, wanted 2 MoE layers \(1, 2\) "),
        (BOTH, None, "wanted no MoE layers"),
        (BOTH, (2, 4, 4), "on 2 devices on stage 0, wanted .* on 4 devices"),
        (BOTH, (2, 8, 2), "4 experts on .*, wanted .* 8 experts"),
        (TWICE, (2, 4, 2), "used twice"),
    ],
)
def test_hints_of_other_layouts_are_not_used(hint, sizes, match):
    given = checkpoint_hints.layout(NUMBERS[0], sizes and OwnerMap.even(*sizes))
    with pytest.raises(ValueError, match=match):
        checkpoint_hints.fitting_owners(hint, given, 0, 2)


@on_ranks(4, ep=2, pp=2)
def test_all_ranks_gather_the_same_hint_and_one_logs_why_it_is_not_used():
    lines = messages_of(checkpoint_hints.logger.name)
    checkpoint_hints.logger.setLevel(logging.INFO)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    moved, even = slots_of(NUMBERS[stage], EVEN), slots_of(NUMBERS[stage], EVEN)
    moved.saved_owners = OWNERS[1] if stage else None  # Experts are home for a save.
    hint, none = (OwnerHint(slots).gather() for slots in (moved, even))
    assert (hint["stages"], none) == ([None, OTHER], None)
    for saved in ({"stages": [None]}, [1], {"stages": [{"layer_numbers": [1]}, None]}):
        take_or_log(OwnerHint(even), saved)
    assert even.saved_owners is None
    take_or_log(OwnerHint(even), BOTH)
    assert even.saved_owners.digest() == OWNERS[stage].digest()
    if dist.get_rank():
        assert not lines
        return
    other_layout, *damaged, kept = lines
    assert "owners are not used: got an owner map of 1 pipeline stages, wanted 2" in other_layout
    assert len(damaged) == 2
    assert all("owners are not used: it cannot be read" in line for line in damaged)
    assert "keep the owners of the checkpoint" in kept


class Session(SimpleNamespace):
    """One to which there may be weak references."""


@on_ranks(2, pp=2)
def test_the_session_of_a_dropped_model_that_one_rank_still_has_changes_nothing():
    """Ranks collect garbage at other times."""
    sessions = [Session(slots=object(), name=name) for name in ("dropped", "saved")]
    for session in sessions:
        checkpoint_hints.add(session)
    if dist.get_rank():
        del sessions[0]

    def hints(session):
        return [SimpleNamespace(key=session.name, gather=lambda: checkpoint_hints._of_all_stages(1))]

    with mock.patch.multiple(checkpoint_hints, hints_of=hints, slots_in=lambda _: [sessions[-1].slots]):
        assert checkpoint_hints._save_hints(lambda state: state, {}) == {"saved": [1, 1]}


@pytest.mark.parametrize(
    ("name", "keys", "wanted"),
    [
        ("ep", {}, ""),
        ("fssdp", {"reshard_interval": 0}, "loads"),
        ("fssdp", {}, "owners loads"),
        ("auto", {}, "choices loads"),
    ],
)
def test_checkpoints_keep_what_a_run_may_change(name, keys, wanted):
    """Where owners stay, checkpoint formats that identify experts by position are allowed."""
    strategy = build_strategy(name, STRATEGIES[name].settings(**keys))
    session = SimpleNamespace(strategy=strategy, slots=None, runtime=None)
    hints = checkpoint_hints.hints_of(session)
    assert [hint.key for hint in hints] == [f"megatron_fssdp_{word}" for word in wanted.split()]
