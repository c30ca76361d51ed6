"""A run that was stopped between two re-shards resumes with the same owners.

The run re-shards every 4 iterations and is saved after 5. Its owners and all their contents are compared
bitwise with a run without a break.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fssdp.planning.placement.owner_map import OwnerMap

from ..training_run import TrainingRun, assert_close, before_iterations, note, rows, train
from ..uneven_owners import optimizer_states

COMMON = "{TORCH_DIST} --train-iters 10 {NO_BIAS} {SHORT_AVERAGES} --lr 5e-3"
FSSDP = "fssdp slots=2 overlap_degree=1 reshard_interval=4"
# name | ranks | Megatron's arguments
LAYOUTS = rows(
    """
    plain | 2 | {EP2}
    distributed_in_parts | 4 | {EP2} {RESHARDABLE}
    interleaved_pipeline | 4 | {EP2} {INTERLEAVED} {RESHARDABLE}
    expert_tensor_parallel_swiglu | 4 | {EP2} --expert-tensor-parallel-size 2 --swiglu {RESHARDABLE}
    """
)


@dataclass(frozen=True)
class Journey:
    """A training; by iteration, its owner maps by pipeline stage, and hashes of what each expert was."""

    run: TrainingRun
    owners: dict[int, dict[int, Any]]
    contents: dict[int, dict[str, str]]


def note_owners() -> None:
    """On each rank, note the owners and the experts' contents when an iteration begins."""
    from megatron.core import parallel_state

    from megatron_fssdp.megatron_adapter.entry.registration import requested_strategy

    def write(iteration: int, model: Any, optimizer: Any) -> None:
        slots: Any = requested_strategy().session.slots  # type: ignore[union-attr]
        device = parallel_state.get_expert_model_parallel_rank()
        # Parts of an expert, or of its optimizer state, are told apart.
        part = (
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_data_parallel_rank(),
        )
        contents = {}
        for slot, parameters in enumerate(slots.parameters):
            layer, expert = slots.owners.expert_in(device, slot)
            digest = hashlib.blake2b()
            for parameter in parameters:
                for tensor in (parameter.data, *optimizer_states(optimizer, parameter)[1].values()):
                    digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
            contents[f"{slots.layer_numbers()[layer]}/{expert}/{part}"] = digest.hexdigest()
        stage = parallel_state.get_pipeline_model_parallel_rank()
        note((iteration, stage, slots.owners.as_lists(), contents))

    before_iterations(write)


def _go(num_ranks: str, arguments: str, data: Path) -> Journey:
    run = train(int(num_ranks), f"{COMMON} {arguments}", data, strategy=FSSDP, before=note_owners)
    journey = Journey(run, {}, {})
    for iteration, stage, owners, contents in run.notes:
        assert journey.owners.setdefault(iteration, {}).setdefault(stage, owners) == owners
        journey.contents.setdefault(iteration, {}).update(contents)
    return journey


def _whole(name: str, data: Path, folder: Path) -> Journey:
    num_ranks, layout = LAYOUTS[name]
    whole = _go(num_ranks, f"{layout} --save {folder} --save-interval 5", data)
    assert not any(OwnerMap.from_lists(owners).is_even for owners in whole.owners[5].values())
    assert whole.owners[5] == whole.owners[8] != whole.owners[4]
    return whole


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_resumes_between_two_reshards(name: str, text_data: Path, tmp_path: Path) -> None:
    num_ranks, layout = LAYOUTS[name]
    whole = _whole(name, text_data, tmp_path)
    resumed = _go(num_ranks, f"{layout} --load {tmp_path} --ckpt-step 5", text_data)
    assert sum("keep the owners of the checkpoint" in line for line in resumed.run.messages) == 1
    assert resumed.contents[6] == whole.contents[6]
    assert sorted(resumed.owners) == [6, 7, 8, 9, 10]
    assert resumed.owners[6] == resumed.owners[7] == resumed.owners[8] == whole.owners[5]
    # It re-shards after 8 iterations, like the run without a break, but knows fewer loads.
    assert resumed.owners[9] == resumed.owners[10] != resumed.owners[8]
    assert_close(resumed.run, whole.run, since=5)


# Megatron's arguments, and whether the owners of "distributed_in_parts" fit.
READERS = {"{EP4}": False, "{EP2} {PP2}": False, "{EP2} --expert-tensor-parallel-size 2": True}


@pytest.mark.slow
def test_a_resume_in_another_layout_starts_with_even_owners(text_data: Path, tmp_path: Path) -> None:
    whole = _whole("distributed_in_parts", text_data, tmp_path)
    for name, fits in READERS.items():
        resumed = _go("4", f"{name} {{RESHARDABLE}} --load {tmp_path} --ckpt-step 5", text_data)
        lines = [line for line in resumed.run.messages if "owner map is not used" in line]
        assert len(lines) == (0 if fits else 1), (name, lines)
        evens = [OwnerMap.from_lists(owners).is_even for owners in resumed.owners[6].values()]
        assert evens == [not fits] * len(evens), name
        assert_close(resumed.run, whole.run, norms=1e-3, since=5)
