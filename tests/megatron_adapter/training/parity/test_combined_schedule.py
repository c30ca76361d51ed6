"""Megatron's combined 1F1B schedule (``--overlap-moe-expert-parallel-comm``) drives the layer's sub-steps.

It runs parts of one micro-batch's forward pass between parts of another one's backward pass. Stock Megatron
runs the same schedule on CPU ranks, and the losses must be its own.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_fssdp.reporting.records.run_records import read_metrics
from tests.megatron_adapter.training_run import TrainingRun, relative_difference, train_on_all_ranks

Record = Callable[[str, object], None]

FLAG = "--overlap-moe-expert-parallel-comm --expert-model-parallel-size 2 --train-iters 6"
FOUR_MICRO_BATCHES = "--global-batch-size 16"
OVERLAPS = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-num-buckets 4"
NO_BIAS = "--disable-bias-linear"
TP2 = f"--tensor-model-parallel-size 2 --sequence-parallel {NO_BIAS}"
INTERLEAVED = (
    "--pipeline-model-parallel-size 2 --num-layers 4 --num-layers-per-virtual-pipeline-stage 1 "
    "--global-batch-size 16"
)
FSSDP = "fssdp slots=2 overlap_degree=3 reshard_interval=2"

# name: (ranks, Megatron's arguments, strategy and its settings)
CASES: dict[str, tuple[int, str, str]] = {
    "ep, one micro-batch": (2, "--global-batch-size 4", "ep"),
    "copies, overlaps, bf16": (4, f"{OVERLAPS} --bf16 --global-batch-size 32", FSSDP),
    "shared expert, swiglu": (
        2,
        f"{FOUR_MICRO_BATCHES} --moe-shared-expert-intermediate-size 32 --swiglu {NO_BIAS}",
        FSSDP,
    ),
    "evaluation between iterations": (
        4,
        f"{OVERLAPS} --global-batch-size 32 --split 90,10,0 --eval-iters 1 --eval-interval 2",
        FSSDP,
    ),
    "transfers in turn with the exchange": (2, FOUR_MICRO_BATCHES, f"{FSSDP} overlap=false"),
    "re-materialized": (2, f"{FOUR_MICRO_BATCHES} --num-layers 3", f"{FSSDP} rematerialize=true"),
    "re-materialized, three layers, overlaps": (
        4,
        f"{OVERLAPS} --global-batch-size 32 --num-layers 3",
        f"{FSSDP} rematerialize=true",
    ),
    "calibrated": (2, FOUR_MICRO_BATCHES, f"{FSSDP} calibrate=true profile_iterations=1"),
    "experts in tensor-parallel parts": (4, f"{TP2} {OVERLAPS} {FOUR_MICRO_BATCHES}", FSSDP),
    "whole experts under tensor parallelism": (
        4,
        f"{TP2} --expert-tensor-parallel-size 1 {FOUR_MICRO_BATCHES}",
        FSSDP,
    ),
    "interleaved pipeline": (4, f"{INTERLEAVED} {OVERLAPS}", FSSDP),
    "interleaved pipeline, re-materialized": (4, f"{INTERLEAVED} {OVERLAPS}", f"{FSSDP} rematerialize=true"),
    "dense layers between": (2, f"{FOUR_MICRO_BATCHES} --num-layers 4 --moe-layer-freq ([0,1]*2)", FSSDP),
    "multi-token prediction": (
        2,
        f"{FOUR_MICRO_BATCHES} --mtp-num-layers 1 --position-embedding-type rope",
        FSSDP,
    ),
    "attention recomputed": (
        2,
        f"{FOUR_MICRO_BATCHES} --recompute-granularity selective --recompute-modules core_attn",
        FSSDP,
    ),
    "one expert on a device": (
        4,
        "--expert-model-parallel-size 4 --num-experts 4 --global-batch-size 32",
        "fssdp slots=1 overlap_degree=2",
    ),
    "prophet, split transfers": (2, f"{FOUR_MICRO_BATCHES} --num-layers 3", "prophet"),
    "fastermoe": (2, FOUR_MICRO_BATCHES, "fastermoe"),
    "fastermoe, smart schedule": (2, FOUR_MICRO_BATCHES, "fastermoe smart_schedule=true"),
    "deduplicated exchange": (
        4,
        f"{OVERLAPS} --bf16 --global-batch-size 32",
        f"{FSSDP} exchange=deduplicated",
    ),
    "deduplicated exchange, re-materialized": (
        4,
        "--expert-model-parallel-size 4 --global-batch-size 32 --moe-router-topk 4",
        f"{FSSDP} rematerialize=true nodes=2 exchange=deduplicated",
    ),
    "quota": (2, FOUR_MICRO_BATCHES, "quota"),
    "smartmoe": (2, FOUR_MICRO_BATCHES, "smartmoe"),
    "flexmoe": (2, FOUR_MICRO_BATCHES, "flexmoe"),
    "auto": (2, FOUR_MICRO_BATCHES, "auto"),
    **{
        f"parm, {schedule}": (4, f"{TP2} {FOUR_MICRO_BATCHES}", f"parm schedule={schedule}")
        for schedule in ("baseline", "megatron", "s1", "s2")
    },
}


def test_losses_equal_stock_megatrons(text_data: Path, tmp_path: Path) -> None:
    _, replicas, messages = _compare(2, FOUR_MICRO_BATCHES, FSSDP, text_data, tmp_path)
    assert any(replicas)
    assert any("re-sharded" in message for message in messages)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_losses_equal_stock_megatrons_in_more_cases(
    case: str, text_data: Path, tmp_path: Path, record_property: Record
) -> None:
    difference, replicas, _ = _compare(*CASES[case], text_data, tmp_path)
    record_property("loss_difference", f"{difference:.1e}")
    assert any(replicas) or "fssdp" not in CASES[case][2]


def _compare(
    num_ranks: int, arguments: str, strategy: str, data: Path, folder: Path
) -> tuple[float, list[int], list[str]]:
    """Train under ``none`` and a strategy.

    Returns:
        Relative difference of the losses, the number of replicas in each iteration, and all messages.
    """
    name, *settings = strategy.split()
    flags = " ".join(f"--moe-strategy-set {setting}" for setting in (*settings, f"record_dir={folder}"))
    (stock, _), (run, messages) = (
        _train(num_ranks, f"{arguments} --moe-strategy {chosen}", data)
        for chosen in ("none", f"{name} {flags}")
    )
    difference = relative_difference(run.losses + run.other_losses, stock.losses + stock.other_losses)
    assert difference <= (2e-3 if "--bf16" in arguments else 3e-5)
    assert relative_difference(run.grad_norms, stock.grad_norms) <= (2e-2 if "--bf16" in arguments else 1e-4)
    return difference, [sum(x.num_replicas for x in entry.layers) for entry in read_metrics(folder)], messages


def _train(num_ranks: int, arguments: str, data: Path) -> tuple[TrainingRun, list[str]]:
    """The last rank's view, and the messages of all ranks."""
    before = None if "--bf16" in arguments else allow_fp32
    runs = train_on_all_ranks(num_ranks, f"{FLAG} {arguments}", data, before=before)
    failed = next((run for run in runs if run.exit_code), None)
    assert failed is None, failed.errors[-3000:]
    return runs[-1], [message for run in runs for message in run.messages]


def allow_fp32() -> None:
    """Let Megatron's check accept fp32, in which the losses of two runs can be compared exactly."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    check = TransformerConfig.__post_init__

    def as_if_in_half_precision(self: Any) -> None:
        is_fp32 = self.overlap_moe_expert_parallel_comm and not (self.bf16 or self.fp16)
        self.bf16 = self.bf16 or is_fp32
        check(self)
        self.bf16 = self.bf16 and not is_fp32

    TransformerConfig.__post_init__ = as_if_in_half_precision
