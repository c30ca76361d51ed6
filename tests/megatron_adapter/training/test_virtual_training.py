"""Megatron's own training loop on four virtual CUDA devices: no findings, and the numbers of CPU ranks."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_fssdp.testing.virtual_cuda import FindingKind
from tests.megatron_adapter.training_run import command_line
from tests.megatron_adapter.virtual_training import (
    VIRTUAL_GPT,
    assert_clean,
    assert_same_without_findings,
    train_on_cpu,
    train_virtually,
)

WORLD_SIZE = 4
EP2 = "--expert-model-parallel-size 2"
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 8000"
PP2 = f"{EP2} --num-layers 4 --pipeline-model-parallel-size 2"
# Measured costs would select other replicas in every run.
FIXED = "--moe-strategy fssdp --moe-strategy-set slots=2 --moe-strategy-set overlap_degree=4"
RESHARD = f"{FIXED} --moe-strategy-set reshard_interval=2 --train-iters 5"
# Costs are measured in the first two iterations, and then select placements; the sums of other placements
# round differently.
MEASURED = "--moe-strategy-set profile_iterations=2 --train-iters 5"
ROUNDING = 1e-5

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
    "quota, each micro-batch": f"{EP2} {OVERLAP} --moe-strategy quota",
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
    **{
        f"shared experts beside {name}": (
            f"{EP2} {OVERLAP} --moe-shared-expert-intermediate-size 32 --moe-shared-expert-overlap "
            f"--moe-shared-expert-gate --disable-bias-linear {arguments}"
        )
        for name, arguments in {
            "the exchange": "--moe-strategy fssdp",
            "the exchange, sequence parallel": (
                "--tensor-model-parallel-size 2 --sequence-parallel --moe-strategy fssdp"
            ),
            "the deduplicated exchange": (
                "--moe-strategy fssdp --moe-strategy-set exchange=deduplicated --moe-strategy-set nodes=2"
            ),
            "parm's s1, recomputed": (
                "--moe-strategy parm --moe-strategy-set schedule=s1 --expert-tensor-parallel-size 2 "
                "--tensor-model-parallel-size 2 --sequence-parallel "
                "--recompute-granularity selective --recompute-modules moe"
            ),
            "parm's s2": (
                "--moe-strategy parm --moe-strategy-set schedule=s2 --expert-tensor-parallel-size 2 "
                "--tensor-model-parallel-size 2"
            ),
            "the smart schedule": "--moe-strategy fastermoe --moe-strategy-set smart_schedule=true",
        }.items()
    },
    **{
        f"combined 1F1B schedule, {name}": (
            f"{EP2} {OVERLAP} --bf16 --global-batch-size 16 --overlap-moe-expert-parallel-comm {arguments}"
        )
        for name, arguments in {
            "re-shards": f"--global-batch-size 32 {RESHARD}",
            "rematerialized": "--moe-strategy fssdp --moe-strategy-set rematerialize=true",
            "transfers in turn": "--moe-strategy fssdp --moe-strategy-set overlap=false",
            "split transfers": "--moe-strategy prophet",
            "each micro-batch": "--moe-strategy quota",
            "deduplicated exchange": (
                "--moe-strategy fssdp --moe-strategy-set exchange=deduplicated --moe-strategy-set nodes=2"
            ),
            "smart schedule": "--moe-strategy fastermoe --moe-strategy-set smart_schedule=true",
            "parm's s1": (
                "--moe-strategy parm --moe-strategy-set schedule=s1 --expert-tensor-parallel-size 2 "
                "--tensor-model-parallel-size 2 --sequence-parallel"
            ),
            "parm's s2": (
                "--moe-strategy parm --moe-strategy-set schedule=s2 --expert-tensor-parallel-size 2 "
                "--tensor-model-parallel-size 2"
            ),
        }.items()
    },
    "deduplicated exchange, MoE layers recomputed": (
        f"{EP2} {OVERLAP} --moe-strategy fssdp --moe-strategy-set exchange=deduplicated "
        "--recompute-granularity selective --recompute-modules moe"
    ),
    "deduplicated exchange, each micro-batch, pipeline": (
        f"{PP2} --moe-strategy quota --moe-strategy-set exchange=deduplicated"
    ),
    "re-shards": f"{EP2} {RESHARD}",
    "re-shards with overlap": f"{EP2} {OVERLAP} {RESHARD}",
    "re-shards in an interleaved pipeline": (
        f"{PP2} {OVERLAP} --num-layers-per-virtual-pipeline-stage 1 {RESHARD}"
    ),
    "evaluation": (
        f"{EP2} {OVERLAP} --moe-strategy fssdp --log-interval 1 --split 90,10,0 --eval-iters 1 "
        "--eval-interval 2"
    ),
    "tokens divided over tensor-parallel ranks": (
        f"{EP2} --tensor-model-parallel-size 2 --moe-strategy fssdp {OVERLAP}"
    ),
    "topology-aware gate": (
        f"{EP2} {OVERLAP} --moe-strategy fastermoe --moe-strategy-set router=topology_aware "
        "--moe-strategy-set leaving_share=0.3 --moe-strategy-set nodes=4"
    ),
    "a loader's own processes and thread": f"{EP2} --moe-strategy fssdp --num-workers 1",
}

MEASURED_CASES = {
    **{
        strategy: f"{EP2} {OVERLAP} --moe-strategy {strategy} {MEASURED}"
        for strategy in ("fssdp", "prophet", "fastermoe", "flexmoe", "smartmoe", "quota", "auto")
    },
    "flexmoe under pipeline stages": f"{PP2} {OVERLAP} --moe-strategy flexmoe {MEASURED}",
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
        # Where Megatron itself does not wait, the plugin's loop waits once in each of 2 iterations: for the
        # counts, when the optimizer has stepped.
        waits = Counter({place: n for place, n in run.host_syncs.items() if "runtime/" in place})
        assert waits.total() == 2, waits
        assert all("shared_counts.py" in place for place in waits), waits
        # Megatron's dispatcher waits once for each of 2 layers in each of 2 iterations.
        waits = Counter({place: n for place, n in run.host_syncs.items() if "token_dispatcher.py" in place})
        assert waits.total() == 2 * 2, waits


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_training_has_no_findings_and_the_numbers_of_cpu_ranks(case: str, text_data: Path) -> None:
    assert_same_without_findings(WORLD_SIZE, CASES[case], text_data)


@pytest.mark.slow
def test_combined_schedule_of_interleaved_stages_has_the_findings_of_stock_megatron(text_data: Path) -> None:
    """Megatron's messages between stages use memory of other streams. The strategy must not add findings."""
    arguments = (
        f"{PP2} {OVERLAP} --bf16 --global-batch-size 16 --overlap-moe-expert-parallel-comm "
        "--num-layers-per-virtual-pipeline-stage 1"
    )
    stock, ours = (
        train_virtually(WORLD_SIZE, f"{arguments} --moe-strategy {strategy}", text_data)
        for strategy in ("none", "fssdp")
    )
    for run, other in zip(ours, stock, strict=True):
        assert not run.training.exit_code, run.training.errors[-3000:]
        assert set(run.findings) <= set(other.findings)
    on_cpu = train_on_cpu(WORLD_SIZE, f"{arguments} --moe-strategy fssdp", text_data)
    assert ours[-1].training.losses == on_cpu[-1].losses


@pytest.mark.slow
@pytest.mark.parametrize("case", MEASURED_CASES)
def test_training_by_measured_costs_has_no_findings(case: str, text_data: Path) -> None:
    assert_same_without_findings(WORLD_SIZE, MEASURED_CASES[case], text_data, tolerance=ROUNDING)


@pytest.mark.slow
def test_a_run_is_recorded_with_the_memory_of_the_device(text_data: Path, tmp_path: Path) -> None:
    """The recorder's branches for CUDA: synchronized times and the peak of the device's memory."""
    record = tmp_path / "record"
    runs = train_virtually(
        WORLD_SIZE,
        f"{EP2} {OVERLAP} {RESHARD} --moe-strategy-set record_dir={record}",
        text_data,
    )
    assert_clean(runs)
    (path,) = record.glob("metrics.jsonl")
    first = json.loads(path.read_text().splitlines()[0])
    assert first["rank_memory"] == "allocated"
    assert any("training_hooks.py" in place and "device.synchronize" in place for place in runs[0].host_syncs)


@pytest.mark.slow
def test_torchrun_trains_through_both_launchers(text_data: Path, tmp_path: Path) -> None:
    """Megatron makes its NCCL groups itself, in real processes."""
    argv = command_line(VIRTUAL_GPT, f"{EP2} {OVERLAP} --moe-strategy fssdp", text_data)
    launchers = (
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "megatron_fssdp.testing.virtual_cuda", "--report", str(tmp_path / "report")),
        *("-m", "megatron_fssdp"),
    )
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    done = subprocess.run(
        [sys.executable, *launchers, *argv],
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, **environment},
    )
    assert not done.returncode, done.stderr[-3000:]
    for rank in range(2):
        report = json.loads((tmp_path / "report" / f"rank{rank}.json").read_text())
        assert report["exit_code"] == 0
        assert not report["findings"]
        assert report["known_findings"]
        assert f"rank {rank}: 0 findings" in done.stderr


@pytest.mark.slow
def test_a_saved_training_goes_on_with_the_same_numbers(text_data: Path, tmp_path: Path) -> None:
    """Owners moved before the checkpoint. Virtual devices and CPU ranks go on from it alike."""
    common = f"{EP2} {OVERLAP} {RESHARD} --ckpt-format torch_dist"
    folder = tmp_path / "checkpoint"
    runs = train_virtually(WORLD_SIZE, f"{common} --save {folder} --save-interval 3", text_data)
    assert_clean(runs)
    (folder / "latest_checkpointed_iteration.txt").write_text("3")
    resumed = train_virtually(WORLD_SIZE, f"{common} --load {folder}", text_data)
    assert_clean(resumed)
    assert resumed[-1].training.losses == runs[-1].training.losses[3:]
    on_cpu = train_on_cpu(WORLD_SIZE, f"{common} --load {folder}", text_data)
    assert on_cpu[-1].losses == resumed[-1].training.losses


class _Unawaited:
    """Handle of a collective that nobody waits for."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle  # keeps the tensors alive

    def wait(self) -> None:
        """Return at once."""


def read_parameters_that_are_being_gathered() -> None:
    """DDP's forward pre-hooks start the gather of the experts' Parameters, and do not wait for it."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

    start = _ParamAndGradBucketGroup.start_param_sync

    def start_param_sync(self: Any, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        if self.param_gather_handle is not None and not getattr(next(iter(self.params)), "allreduce", True):
            self.param_gather_handle = _Unawaited(self.param_gather_handle)

    _ParamAndGradBucketGroup.start_param_sync = start_param_sync


def update_experts_before_their_gradients_are_reduced() -> None:
    """DDP starts the reduction of the experts' gradients, and does not wait for it."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

    start = _ParamAndGradBucketGroup.start_grad_sync

    def start_grad_sync(self: Any, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        if self.grad_reduce_handle is not None and not getattr(next(iter(self.params)), "allreduce", True):
            self.grad_reduce_handle = _Unawaited(self.grad_reduce_handle)

    _ParamAndGradBucketGroup.start_grad_sync = start_grad_sync


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutation",
    [read_parameters_that_are_being_gathered, update_experts_before_their_gradients_are_reduced],
)
def test_a_missing_wait_beside_megatrons_ddp_is_found(mutation: Callable[[], None], text_data: Path) -> None:
    runs = train_virtually(WORLD_SIZE, f"{EP2} {OVERLAP} --moe-strategy prophet", text_data, before=mutation)
    races = [finding for run in runs for finding in run.findings if str(FindingKind.RACE) in finding]
    assert any("NCCL" in race for race in races), [run.findings for run in runs]
