"""Megatron's own training loop on four virtual CUDA devices: no findings, and the numbers of CPU ranks."""

import json
import os
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.megatron_adapter.training_run import EP2, INTERLEAVED, PP2, command_line, flags, rows, wrap
from tests.megatron_adapter.virtual_training import (
    VIRTUAL_GPT,
    assert_clean,
    assert_same_without_findings,
    train_on_cpu,
    train_virtually,
)
from tests.support.virtual_cuda import FindingKind

OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 8000"
TP_PARTS = "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 2"
SEQUENCE_PARTS = f"{TP_PARTS} --sequence-parallel"
BESIDE = f"{EP2} {OVERLAP} --moe-shared-expert-gate --moe-shared-expert-intermediate-size 32 "
BESIDE += "--moe-shared-expert-overlap --disable-bias-linear"
COMBINED = f"{EP2} {OVERLAP} --bf16 --global-batch-size 16 --overlap-moe-expert-parallel-comm"
# Measured costs would select other replicas in every run.
FIXED = "fssdp slots=2 overlap_degree=4 reshard_interval=2"
ROUNDING = 1e-5

# name | arguments | strategy and its settings
TABLE = rows(
    """
    none | {EP2} {OVERLAP} | none
    fssdp without overlap | {EP2} | fssdp
    fssdp rematerialized | {EP2} {OVERLAP} | fssdp rematerialize=true
    fssdp calibrated | {EP2} {OVERLAP} | fssdp planner=hecate
    fssdp in bf16 | {EP2} {OVERLAP} --bf16 | fssdp
    fssdp, everything recomputed | {EP2} --recompute-granularity full --recompute-method uniform
        --recompute-num-layers 1 | fssdp
    fssdp, MoE layers recomputed | {EP2} {RECOMPUTE_MOE} | fssdp
    prophet, split transfers | {EP2} {OVERLAP} | prophet
    fastermoe, smart schedule | {EP2} {OVERLAP} | fastermoe smart_schedule=true
    quota, each micro-batch | {EP2} {OVERLAP} | quota
    pipeline | {EP2} {PP2} --num-layers 4 | fssdp
    pipeline with overlap | {EP2} {PP2} --num-layers 4 {OVERLAP} | fssdp
    interleaved pipeline | {EP2} {INTERLEAVED} {OVERLAP} | fssdp
    interleaved pipeline, split transfers | {EP2} {INTERLEAVED} {OVERLAP} | prophet
    tensor and sequence parallel | {EP2} {TP2} | fssdp
    experts' tensor parallel | {EP2} {SEQUENCE_PARTS} {OVERLAP} | fssdp
    parm, baseline | {EP2} {SEQUENCE_PARTS} | parm schedule=baseline
    parm, megatron | {EP2} {SEQUENCE_PARTS} | parm schedule=megatron
    parm, s1 | {EP2} {SEQUENCE_PARTS} | parm schedule=s1
    parm, s2 | {EP2} {SEQUENCE_PARTS} | parm schedule=s2
    parm, auto | {EP2} {SEQUENCE_PARTS} | parm schedule=auto
    shared experts beside the exchange | {BESIDE} | fssdp
    shared experts beside the exchange, sequence parallel | {BESIDE} {TP2} | fssdp
    shared experts beside the deduplicated exchange | {BESIDE} | fssdp exchange=deduplicated nodes=2
    shared experts beside parm's s1, recomputed | {BESIDE} {SEQUENCE_PARTS} {RECOMPUTE_MOE} | parm schedule=s1
    shared experts beside parm's s2 | {BESIDE} {TP_PARTS} | parm schedule=s2
    shared experts beside the smart schedule | {BESIDE} | fastermoe smart_schedule=true
    combined 1F1B schedule, re-shards | {COMBINED} --global-batch-size 32 --train-iters 5 | {FIXED}
    combined 1F1B schedule, rematerialized | {COMBINED} | fssdp rematerialize=true
    combined 1F1B schedule, transfers in turn | {COMBINED} | fssdp overlap=false
    combined 1F1B schedule, split transfers | {COMBINED} | prophet
    combined 1F1B schedule, each micro-batch | {COMBINED} | quota
    combined 1F1B schedule, deduplicated exchange | {COMBINED} | fssdp exchange=deduplicated nodes=2
    combined 1F1B schedule, smart schedule | {COMBINED} | fastermoe smart_schedule=true
    combined 1F1B schedule, parm's s1 | {COMBINED} {SEQUENCE_PARTS} | parm schedule=s1
    combined 1F1B schedule, parm's s2 | {COMBINED} {TP_PARTS} | parm schedule=s2
    deduplicated exchange, MoE layers recomputed | {EP2} {OVERLAP} {RECOMPUTE_MOE}
        | fssdp exchange=deduplicated
    deduplicated exchange, each micro-batch, pipeline | {EP2} {PP2} --num-layers 4
        | quota exchange=deduplicated
    re-shards | {EP2} --train-iters 5 | {FIXED}
    re-shards with overlap | {EP2} {OVERLAP} --train-iters 5 | {FIXED}
    re-shards in an interleaved pipeline | {EP2} {INTERLEAVED} {OVERLAP} --train-iters 5 | {FIXED}
    evaluation | {EP2} {OVERLAP} --log-interval 1 --split 90,10,0 --eval-iters 1 --eval-interval 2 | fssdp
    tokens divided over tensor-parallel ranks | {EP2} --tensor-model-parallel-size 2 {OVERLAP} | fssdp
    topology-aware gate | {EP2} {OVERLAP} | fastermoe router=topology_aware leaving_share=0.3 nodes=4
    a loader's own processes and thread | {EP2} --num-workers 1 | fssdp
    """,
    **{"OVERLAP": OVERLAP, "TP_PARTS": TP_PARTS, "SEQUENCE_PARTS": SEQUENCE_PARTS, "BESIDE": BESIDE},
    **{"COMBINED": COMBINED, "FIXED": FIXED},
)
CASES = {name: f"{arguments} {flags(strategy)}" for name, (arguments, strategy) in TABLE.items()}
# Costs are measured in the first two iterations, and then select placements; the sums of other placements
# round differently.
MEASURED = dict.fromkeys(("fssdp", "prophet", "fastermoe", "flexmoe", "smartmoe", "quota", "auto"), EP2)
MEASURED["flexmoe under pipeline stages"] = f"{EP2} {PP2} --num-layers 4"


def test_megatron_trains_on_virtual_devices_like_on_cpu_ranks(text_data: Path) -> None:
    """One training with pipeline stages, the distributed optimizer and both overlap flags."""
    arguments = f"{EP2} {OVERLAP} --num-layers 2 --train-iters 2 --moe-strategy prophet"
    runs = assert_same_without_findings(arguments, text_data)
    for run in runs:
        assert run.counts["P2P batch"] > 0
        assert run.counts["stream made"] > 1
        # Where Megatron itself does not wait, the plugin's loop waits once in each of 2 iterations: for the
        # counts, when the optimizer has stepped.
        ours = {place for place in run.host_syncs if "runtime/" in place and "[megatron/" not in place}
        waits = Counter({place: run.host_syncs[place] for place in ours})
        assert waits.total() == 2, waits
        assert all("moe_runtime.py" in place for place in waits), waits
        # Megatron's dispatcher waits once for each of 2 layers in each of 2 iterations.
        waits = Counter({place: n for place, n in run.host_syncs.items() if "token_dispatcher.py" in place})
        assert waits.total() == 2 * 2, waits


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_training_has_no_findings_and_the_numbers_of_cpu_ranks(case: str, text_data: Path) -> None:
    assert_same_without_findings(CASES[case], text_data)


@pytest.mark.slow
def test_combined_schedule_of_interleaved_stages_has_the_findings_of_stock_megatron(text_data: Path) -> None:
    """Megatron's messages between stages use memory of other streams. The strategy must not add findings."""
    arguments = f"{COMBINED} {INTERLEAVED}"
    stock, ours = (
        train_virtually(f"{arguments} --moe-strategy {strategy}", text_data) for strategy in ("none", "fssdp")
    )
    for run, other in zip(ours, stock, strict=True):
        assert not run.training.exit_code, run.training.errors[-3000:]
        assert set(run.findings) <= set(other.findings)
    on_cpu = train_on_cpu(f"{arguments} --moe-strategy fssdp", text_data)
    assert ours[-1].training.losses == on_cpu[-1].losses


@pytest.mark.slow
@pytest.mark.parametrize("case", MEASURED)
def test_training_by_measured_costs_has_no_findings(case: str, text_data: Path) -> None:
    chosen = flags(f"{case.split()[0]} FSSDP_PROFILE_ITERATIONS=2")
    arguments = f"{MEASURED[case]} {OVERLAP} --train-iters 5 {chosen}"
    assert_same_without_findings(arguments, text_data, tolerance=ROUNDING)


@pytest.mark.slow
def test_a_run_is_recorded_with_the_memory_of_the_device(text_data: Path, tmp_path: Path) -> None:
    """The recorder's branches for CUDA: synchronized times and the peak of the device's memory."""
    record = tmp_path / "record"
    arguments = f"{EP2} {OVERLAP} --train-iters 5 {flags(FIXED, record_dir=record)}"
    runs = train_virtually(arguments, text_data)
    assert_clean(runs)
    (path,) = record.glob("metrics.jsonl")
    first = json.loads(path.read_text().splitlines()[0])
    assert first["rank_memory"] == "allocated"
    assert any("training_hooks.py" in place and "device.synchronize" in place for place in runs[0].host_syncs)


@pytest.mark.slow
def test_torchrun_trains_through_both_launchers(text_data: Path, tmp_path: Path) -> None:
    """Megatron makes its NCCL groups itself, in real processes."""
    argv = command_line(VIRTUAL_GPT, f"{EP2} {OVERLAP} --moe-strategy fssdp", text_data)
    launchers = "-m torch.distributed.run --standalone --nproc-per-node 2 -m tests.support.virtual_cuda "
    words = [*launchers.split(), "--report", str(tmp_path / "report"), "-m", "megatron_fssdp", *argv]
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    options: Any = {
        "capture_output": True,
        "text": True,
        "timeout": 400,
        "env": {**os.environ, **environment},
    }
    done = subprocess.run([sys.executable, *words], **options)
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
    common = f"{EP2} {OVERLAP} --train-iters 5 {flags(FIXED)} --ckpt-format torch_dist"
    folder = tmp_path / "checkpoint"
    runs = train_virtually(f"{common} --save {folder} --save-interval 3", text_data)
    assert_clean(runs)
    (folder / "latest_checkpointed_iteration.txt").write_text("3")
    resumed = train_virtually(f"{common} --load {folder}", text_data)
    assert_clean(resumed)
    assert resumed[-1].training.losses == runs[-1].training.losses[3:]
    on_cpu = train_on_cpu(f"{common} --load {folder}", text_data)
    assert on_cpu[-1].losses == resumed[-1].training.losses


class _Unawaited:
    """Handle of a collective that nobody waits for."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle  # keeps the tensors alive

    def wait(self) -> None:
        """Return at once."""


def wait_for_no(start_name: str, handle_name: str) -> None:
    """DDP starts a collective for the experts' Parameters or gradients, and does not wait for it."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

    def start_only(start: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        handle = getattr(self, handle_name)
        if handle is not None and not getattr(next(iter(self.params)), "allreduce", True):
            setattr(self, handle_name, _Unawaited(handle))

    wrap(_ParamAndGradBucketGroup, start_name, start_only)


@pytest.mark.slow
@pytest.mark.parametrize(
    "what",
    [("start_param_sync", "param_gather_handle"), ("start_grad_sync", "grad_reduce_handle")],
    ids=["read Parameters that are being gathered", "update experts before the reduction"],
)
def test_a_missing_wait_beside_megatrons_ddp_is_found(what: tuple[str, str], text_data: Path) -> None:
    arguments = f"{EP2} {OVERLAP} --moe-strategy prophet"
    runs = train_virtually(arguments, text_data, before=partial(wait_for_no, *what))
    races = [finding for run in runs for finding in run.findings if str(FindingKind.RACE) in finding]
    assert any("NCCL" in race for race in races), [run.findings for run in runs]
