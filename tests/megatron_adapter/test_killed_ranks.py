"""A rank that is killed in the middle of a training: how the other one ends, and how the run goes on."""

import os
import re
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_fssdp.testing.ranks import RankError

from .test_uneven_checkpoint import differing_keys, stored_tensors
from .training_run import relative_difference, train

TRAINING = (
    "--expert-model-parallel-size 2 --moe-strategy fssdp --moe-strategy-set slots=2 "
    "--moe-strategy-set overlap_degree=4 --moe-strategy-set reshard_interval=2 --train-iters 4 "
    "--save-interval 2 --no-save-rng --no-load-rng"
)
KILLED_IN = 3  # the iteration after the first save and the first re-shard
NOTICED_S = 60  # a lost connection is noticed at once; the groups' own time-out is 10 minutes


@pytest.fixture(scope="module")
def whole(text_data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[tuple[float, ...], Path]:
    """Losses and checkpoints of a run that nobody killed."""
    folder = tmp_path_factory.mktemp("whole")
    return train(2, f"{TRAINING} --save {folder}", text_data).losses, folder


def die_in_all_gather() -> None:
    """Rank 1 is killed when it has handed over a piece of an expert."""
    from megatron_fssdp.collectives.transfer_cargo import GatherCargo

    _die_after(GatherCargo, "outgoing")


def die_in_reduce_scatter() -> None:
    """Rank 1 is killed when it has handed over a piece of a gradient."""
    from megatron_fssdp.collectives.transfer_cargo import ReductionCargo

    _die_after(ReductionCargo, "outgoing")


def die_in_forward() -> None:
    """Rank 1 is killed between the gate and the dispatch of a layer."""
    from megatron_fssdp.megatron_adapter.moe_layer import StrategyMoELayer

    _die_after(StrategyMoELayer, "route")


def die_in_reshard() -> None:
    """Rank 1 is killed when the first piece of the moving experts has been exchanged and written."""
    from megatron_fssdp.megatron_adapter import resharding

    exchange = resharding.exchange_slots

    def exchange_slots(group: Any, moves: Any, quantities: Sequence[Any], **options: Any) -> None:
        for kind in {type(quantity) for quantity in quantities}:
            _die_after(kind, "write")
        exchange(group, moves, quantities, **options)

    resharding.exchange_slots = exchange_slots


CASES = [
    # The other rank may first miss the counts of the layer's tokens.
    pytest.param(die_in_all_gather, "MoE layer ", id="in spAG"),
    pytest.param(die_in_reshard, "a re-shard", id="in a re-shard"),
    pytest.param(die_in_forward, "the forward pass of MoE layer 1", id="in forward", marks=pytest.mark.slow),
    pytest.param(die_in_reduce_scatter, "SparseReduceScatter", id="in spRS", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("die", "place"), CASES)
def test_the_other_rank_ends_and_the_run_goes_on(
    die: Callable[[], None],
    place: str,
    whole: tuple[tuple[float, ...], Path],
    text_data: Path,
    tmp_path: Path,
) -> None:
    losses, folder = whole
    with pytest.raises(RankError) as caught:
        train(2, f"{TRAINING} --save {tmp_path}", text_data, before=die, grace_s=NOTICED_S)
    message = str(caught.value)
    assert caught.value.ranks == (1, 0), message  # both by themselves
    assert "rank 1 was ended by signal 9" in message
    (line,) = re.findall(r"\[fssdp\] rank 0 stopped .*", message)
    print("\n" + line)
    assert line.startswith(f"[fssdp] rank 0 stopped in iteration {KILLED_IN}, in ")
    assert place in line
    assert f"The last complete checkpoint is of iteration 2: restart with --load {tmp_path}" in line

    assert differing_keys(stored_tensors(folder, 2), stored_tensors(tmp_path, 2)) == []
    resumed = train(2, f"{TRAINING} --load {tmp_path}", text_data)
    assert relative_difference(resumed.losses, losses[2:]) <= 1e-6


def _die_after(owner: Any, name: str) -> None:
    """Have rank 1 killed after a method's first call in an iteration."""
    from megatron.training.global_vars import get_args

    method = getattr(owner, name)

    def and_die(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        if os.environ["RANK"] == "1" and get_args().curr_iteration + 1 == KILLED_IN:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, and_die)
