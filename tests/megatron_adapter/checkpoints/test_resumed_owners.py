"""A run that was stopped between two re-shards resumes with the same owners.

The run re-shards every 4 iterations and is saved after 5. Its owners and all their contents are compared
bitwise with a run without a break.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_fssdp.planning.placement.owner_map import OwnerMap

from ..owner_journal import FOLDER, OwnerJournal, keep_journal
from ..training_run import TrainingRun, relative_difference, train

LAYOUT = (
    "--ckpt-format torch_dist --train-iters 10 --disable-bias-linear --adam-beta1 0.8 --adam-beta2 0.9 "
    "--lr 5e-3"
)
FSSDP = (
    "--moe-strategy fssdp --moe-strategy-set slots=2 --moe-strategy-set overlap_degree=1 "
    "--moe-strategy-set reshard_interval=4"
)
DISTRIBUTED = "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"

# name: (ranks, Megatron's arguments)
LAYOUTS = {
    "plain": (2, "--expert-model-parallel-size 2"),
    "distributed_in_parts": (4, f"--expert-model-parallel-size 2 {DISTRIBUTED}"),
    "interleaved_pipeline": (
        4,
        "--expert-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers 4 "
        f"--num-layers-per-virtual-pipeline-stage 1 {DISTRIBUTED}",
    ),
    "expert_tensor_parallel_swiglu": (
        4,
        f"--expert-model-parallel-size 2 --expert-tensor-parallel-size 2 --swiglu {DISTRIBUTED}",
    ),
}


@dataclass(frozen=True)
class Journey:
    """A training and the journal of its ranks."""

    run: TrainingRun
    journal: OwnerJournal


def _go(world_size: int, layout: str, data: Path, folder: Path) -> Journey:
    run = train(
        world_size, f"{LAYOUT} {layout}", data, before=keep_journal, env={FOLDER: str(folder / "journal")}
    )
    return Journey(run, OwnerJournal.read(folder / "journal"))


def _whole(name: str, data: Path, folder: Path) -> Journey:
    world_size, layout = LAYOUTS[name]
    journey = _go(world_size, f"{layout} {FSSDP} --save {folder} --save-interval 5", data, folder)
    for owners in journey.journal.owners[5].values():
        assert not OwnerMap.from_lists(owners).is_even
    assert journey.journal.owners[5] == journey.journal.owners[8] != journey.journal.owners[4]
    return journey


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_resumes_between_two_reshards(name: str, text_data: Path, tmp_path: Path) -> None:
    world_size, layout = LAYOUTS[name]
    whole = _whole(name, text_data, tmp_path)
    resumed = _go(
        world_size, f"{layout} {FSSDP} --load {tmp_path} --ckpt-step 5", text_data, tmp_path / "resumed"
    )
    journal = resumed.journal
    assert sum("keep the owners of the checkpoint" in line for line in journal.lines) == 1
    assert journal.contents[6] == whole.journal.contents[6]
    assert sorted(journal.owners) == [6, 7, 8, 9, 10]
    assert journal.owners[6] == journal.owners[7] == journal.owners[8] == whole.journal.owners[5]
    # It re-shards after 8 iterations, like the run without a break, but knows fewer loads.
    assert journal.owners[9] == journal.owners[10] != journal.owners[8]
    assert relative_difference(resumed.run.losses, whole.run.losses[5:]) <= 1e-5
    assert relative_difference(resumed.run.grad_norms, whole.run.grad_norms[5:]) <= 1e-4


# name: (ranks, arguments, whether the owners of "plain" or "distributed_in_parts" fit)
READERS = {
    "ep4": (4, "--expert-model-parallel-size 4", False),
    "pp2": (4, "--expert-model-parallel-size 2 --pipeline-model-parallel-size 2", False),
    "etp2": (4, "--expert-model-parallel-size 2 --expert-tensor-parallel-size 2", True),
}


@pytest.mark.slow
def test_a_resume_in_another_layout_starts_with_even_owners(text_data: Path, tmp_path: Path) -> None:
    whole = _whole("distributed_in_parts", text_data, tmp_path)
    for name, (world_size, layout, fits) in READERS.items():
        resumed = _go(
            world_size,
            f"{layout} {DISTRIBUTED} {FSSDP} --load {tmp_path} --ckpt-step 5",
            text_data,
            tmp_path / name,
        )
        lines = [line for line in resumed.journal.lines if "owner map is not used" in line]
        assert len(lines) == (0 if fits else 1), (name, lines)
        evens = [OwnerMap.from_lists(owners).is_even for owners in resumed.journal.owners[6].values()]
        assert evens == [not fits] * len(evens), name
        assert relative_difference(resumed.run.losses, whole.run.losses[5:]) <= 1e-5, name


@pytest.mark.slow
def test_megatron_without_the_plugin_resumes_the_run(text_data: Path, tmp_path: Path) -> None:
    whole = _whole("plain", text_data, tmp_path)
    stock = {
        size: train(
            size,
            f"{LAYOUT} --expert-model-parallel-size {size} --load {tmp_path} --ckpt-step 5",
            text_data,
            launcher=False,
        )
        for size in (2, 4)
    }
    for run in stock.values():
        assert relative_difference(run.losses, whole.run.losses[5:]) <= 1e-5
