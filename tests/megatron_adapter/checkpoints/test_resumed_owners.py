"""A run that was stopped between two re-shards resumes with the same owners, if its layout is the same.

The run re-shards every 4 iterations and is saved after 5. Adam's learning rate is high and its averages are
short, so that a wrong state shows in the losses.
"""

from pathlib import Path

import numpy as np
import pytest

from megatron_fssdp.records.placements import read_placements

from ..training_run import TrainingRun, assert_close, rows, train

COMMON = "{TORCH_DIST} --train-iters 10 {SHORT_AVERAGES} --lr 5e-3"
FSSDP = "fssdp slots=2 overlap_degree=1 reshard_interval=4"
# name | ranks | the run's layout | layout in which it resumes, if it is another one
LAYOUTS = rows(
    """
    plain | 2 | {EP2} {NO_BIAS} |
    distributed_in_parts | 4 | {EP2} {RESHARDABLE} {NO_BIAS} |
    interleaved_pipeline | 4 | {EP2} {INTERLEAVED} {RESHARDABLE} {NO_BIAS} |
    expert_tensor_parallel_swiglu | 4 | {EP2} {PARTED} |
    more_devices | 4 | {EP2} {RESHARDABLE} {NO_BIAS} | {EP4} {RESHARDABLE} {NO_BIAS}
    more_stages | 4 | {EP2} {RESHARDABLE} {NO_BIAS} | {EP2} {PP2} {RESHARDABLE} {NO_BIAS}
    """,
    PARTED="--expert-tensor-parallel-size 2 {GATED} {RESHARDABLE}",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_resumes_between_two_reshards(name: str, text_data: Path, tmp_path: Path) -> None:
    num_ranks, layout, other = LAYOUTS[name]

    def go(arguments: str, records: str) -> tuple[TrainingRun, dict[int, np.ndarray]]:
        strategy = f"{FSSDP} record_dir={tmp_path / records}"
        run = train(int(num_ranks), f"{COMMON} {arguments}", text_data, strategy=strategy)
        placements = read_placements(tmp_path / records)
        return run, dict(zip(placements.iterations.tolist(), placements.owned_ILED, strict=True))

    whole, owners = go(f"{layout} --save {tmp_path / 'saved'} --save-interval 5", "whole")
    assert (owners[5] != owners[4]).any()
    resumed, found = go(f"{other or layout} --load {tmp_path / 'saved'} --ckpt-step 5", "resumed")
    assert_close(resumed, whole, norms=1e-3, since=5)
    assert sorted(found) == [6, 7, 8, 9, 10]
    # It re-shards after 8 iterations, like the run without a break.
    assert (found[9] != found[8]).any()
    said = "owners are not used" if other else "keep the owners of the checkpoint"
    assert sum(said in message for message in resumed.messages) == 1
    if not other:
        assert all((found[iteration] == owners[5]).all() for iteration in (6, 7, 8))
