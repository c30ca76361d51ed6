"""Trainings with grouped experts, whose linear layers have the interface of Transformer Engine's."""

from functools import partial
from pathlib import Path

import pytest
import torch

from ...grouped_linear import grouped_experts
from ...training_run import relative_difference, train

GROUPED = "--expert-model-parallel-size 2 --train-iters 6 --global-batch-size 16"
FSSDP = "--moe-strategy fssdp --moe-strategy-set slots=2 --moe-strategy-set overlap_degree=4"
DISTRIBUTED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"

# name: (arguments of both trainings, arguments of the strategy)
CASES = {
    "several micro-batches": ("", FSSDP),
    "distributed optimizer, re-sharded": (DISTRIBUTED, f"{FSSDP} --moe-strategy-set reshard_interval=2"),
    "re-materialized": ("", f"{FSSDP} --moe-strategy-set rematerialize=true"),
    "recomputed": ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", FSSDP),
    "smart schedule": ("", f"{FSSDP} --moe-strategy-set smart_schedule=true"),
    "resident replicas": ("", "--moe-strategy flexmoe"),
    "pipeline": ("--pipeline-model-parallel-size 2", FSSDP),
    "bf16": ("--bf16", "--moe-strategy fastermoe"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fuses", [False, True], ids=["separate gradients", "fused gradients"])
@pytest.mark.parametrize("case", CASES)
def test_losses_equal_stock(case: str, fuses: bool, text_data: Path) -> None:
    arguments, strategy = CASES[case]
    before = partial(build_grouped_experts, fuses=fuses)
    stock = train(4, f"{GROUPED} {arguments}", text_data, before=before)
    ours = train(4, f"{GROUPED} {arguments} {strategy}", text_data, before=before)
    assert len(ours.losses) == 6
    bound = 2e-3 if "bf16" in arguments else 1e-5
    assert relative_difference(ours.losses, stock.losses) <= bound


def build_grouped_experts(*, fuses: bool) -> None:
    from megatron.core.models.backends import LocalSpecProvider

    # With --moe-grouped-gemm, Megatron asks whether the GPU can run Transformer Engine's kernels.
    torch.cuda.get_device_capability = lambda device=None: (8, 0)
    LocalSpecProvider.grouped_mlp_modules = lambda self, moe_use_grouped_gemm: grouped_experts(fuses=fuses)
