"""Megatron's own training loop on four virtual CUDA devices: no findings, and the numbers of CPU ranks."""

from pathlib import Path

import pytest

from tests.megatron_adapter.virtual_training import (
    assert_clean,
    assert_same_without_findings,
    train_on_cpu,
    train_virtually,
)

WORLD_SIZE = 4
EP2 = "--expert-model-parallel-size 2"
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 8000"
PP2 = f"{EP2} --num-layers 4 --pipeline-model-parallel-size 2"
RESHARD = "--moe-strategy-set reshard_interval=2 --train-iters 5"

CASES = {
    "none": f"{EP2} {OVERLAP} --moe-strategy none",
    "fssdp without overlap": f"{EP2} --moe-strategy fssdp",
    "fssdp rematerialized": f"{EP2} {OVERLAP} --moe-strategy fssdp --moe-strategy-set rematerialize=true",
    "fssdp calibrated": f"{EP2} {OVERLAP} --moe-strategy fssdp --moe-strategy-set calibrate=true",
    "fssdp in bf16": f"{EP2} {OVERLAP} --moe-strategy fssdp --bf16",
    "fssdp, everything recomputed": (
        f"{EP2} --moe-strategy fssdp --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1"
    ),
    "fssdp, MoE layers recomputed": (
        f"{EP2} --moe-strategy fssdp --recompute-granularity selective --recompute-modules moe"
    ),
    "prophet, split transfers": f"{EP2} {OVERLAP} --moe-strategy prophet",
    "fastermoe, smart schedule": (
        f"{EP2} {OVERLAP} --moe-strategy fastermoe --moe-strategy-set smart_schedule=true"
    ),
    "flexmoe, resident replicas": f"{EP2} {OVERLAP} --moe-strategy flexmoe --train-iters 6",
    "quota, each micro-batch": f"{EP2} {OVERLAP} --moe-strategy quota",
    "smartmoe, owners exchanged": f"{EP2} {OVERLAP} --moe-strategy smartmoe --train-iters 6",
    "auto": f"{EP2} {OVERLAP} --moe-strategy auto --train-iters 6",
    "pipeline": f"{PP2} --moe-strategy fssdp",
    "pipeline with overlap": f"{PP2} {OVERLAP} --moe-strategy fssdp",
    "interleaved pipeline": (
        f"{PP2} {OVERLAP} --num-layers-per-virtual-pipeline-stage 1 --moe-strategy fssdp"
    ),
    "interleaved pipeline, split transfers": (
        f"{PP2} {OVERLAP} --num-layers-per-virtual-pipeline-stage 1 --moe-strategy prophet"
    ),
    "tensor and sequence parallel": (
        f"{EP2} --tensor-model-parallel-size 2 --sequence-parallel --moe-strategy fssdp"
    ),
    "experts' tensor parallel": (
        f"{EP2} --tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 2 "
        f"--moe-strategy fssdp {OVERLAP}"
    ),
    **{
        f"parm, {schedule}": (
            f"{EP2} --tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 2 "
            f"--moe-strategy parm --moe-strategy-set schedule={schedule}"
        )
        for schedule in ("baseline", "megatron", "s1", "s2", "auto")
    },
    "re-shards": f"{EP2} --moe-strategy fssdp {RESHARD}",
    "re-shards with overlap": f"{EP2} {OVERLAP} --moe-strategy fssdp {RESHARD}",
    "re-shards in an interleaved pipeline": (
        f"{PP2} {OVERLAP} --num-layers-per-virtual-pipeline-stage 1 --moe-strategy fssdp {RESHARD}"
    ),
    "record of the run, evaluation": (
        f"{EP2} {OVERLAP} --moe-strategy fssdp --split 90,10,0 --eval-iters 1 --eval-interval 2 "
        "--log-interval 1 --log-memory-to-tensorboard"
    ),
}


def test_megatron_trains_on_virtual_devices_like_on_cpu_ranks(text_data: Path) -> None:
    """One training with pipeline stages, the distributed optimizer and both overlap flags."""
    runs = assert_same_without_findings(
        WORLD_SIZE,
        f"{EP2} {OVERLAP} --num-layers 2 --train-iters 2 --moe-strategy prophet",
        text_data,
    )
    for run in runs:
        assert run.counts["P2P batch"] > 0
        assert run.counts["stream made"] > 1


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_training_has_no_findings_and_the_numbers_of_cpu_ranks(case: str, text_data: Path) -> None:
    assert_same_without_findings(WORLD_SIZE, CASES[case], text_data)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fssdp", "flexmoe"])
def test_a_saved_training_goes_on_with_the_same_numbers(
    strategy: str, text_data: Path, tmp_path: Path
) -> None:
    common = (
        f"{EP2} {OVERLAP} --moe-strategy {strategy} --moe-strategy-set reshard_interval=2 --train-iters 6"
    )
    saved = f"{common} --save {tmp_path / 'virtual'} --save-interval 3 --ckpt-format torch_dist"
    runs = train_virtually(WORLD_SIZE, saved, text_data)
    assert_clean(runs)
    (tmp_path / "virtual" / "latest_checkpointed_iteration.txt").write_text("3")
    resumed = train_virtually(
        WORLD_SIZE, f"{common} --load {tmp_path / 'virtual'} --ckpt-format torch_dist", text_data
    )
    assert_clean(resumed)
    assert resumed[-1].training.losses == runs[-1].training.losses[3:]
    on_cpu = train_on_cpu(
        WORLD_SIZE, f"{common} --load {tmp_path / 'virtual'} --ckpt-format torch_dist", text_data
    )
    assert on_cpu[-1].losses == resumed[-1].training.losses
