"""Trainings whose hot experts change have stock Megatron's losses, whatever was planned for earlier loads."""

from pathlib import Path

import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.training import get_args

from megatron_fssdp.reporting.records.run_records import read_metrics

from ...training_run import relative_difference, train
from .test_parity_matrix import INTERLEAVED, NO_BIAS, OVERLAPS, PP2, RECOMPUTE

PERIOD = 2
"""Iterations after which other experts become hot."""
FSSDP = "fssdp slots=2 overlap_degree=3 check_plans=true"
EXACT = f"{FSSDP} dispatch_policy=exact"
CASES = {
    "one_node": (4, 4, OVERLAPS, EXACT),
    "nodes_micro_batches": (4, 4, "--global-batch-size 16", f"{EXACT} nodes=2 reshard_interval=2"),
    "pipeline_recomputed": (4, 2, f"{PP2} {RECOMPUTE} --global-batch-size 16", EXACT),
    "interleaved_rematerialized": (
        4,
        2,
        f"{INTERLEAVED} --swiglu {NO_BIAS} --global-batch-size 16",
        f"{EXACT} rematerialize=true",
    ),
    "calibrated": (
        4,
        4,
        "--global-batch-size 16",
        "fssdp slots=2 check_plans=true nodes=2 calibrate=true profile_iterations=1",
    ),
    "in_steps": (4, 4, "", f"{FSSDP} nodes=2 smart_schedule=true"),
    "deduplicated": (4, 4, "", f"{FSSDP} nodes=2 exchange=deduplicated"),
    "quota": (4, 4, "--global-batch-size 16", "quota slots=2 profile_iterations=1 check_plans=true"),
}


def skew_gates() -> None:
    """Run on every rank before the launch: two experts are hot, and others after some iterations."""
    gating = TopKRouter.gating

    def skewed(router: TopKRouter, hidden: torch.Tensor) -> torch.Tensor:
        logits = gating(router, hidden)
        first = 2 * (get_args().curr_iteration // PERIOD) % logits.shape[-1]
        bias = torch.zeros_like(logits)
        bias[..., first : first + 2] = 4.0
        return logits + bias

    TopKRouter.gating = skewed


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_losses_equal_stock_megatron(name: str, text_data: Path, tmp_path: Path) -> None:
    num_ranks, expert_parallel, arguments, strategy = CASES[name]
    arguments = f"--expert-model-parallel-size {expert_parallel} {arguments} --train-iters 8"
    stock = train(num_ranks, f"{arguments} --moe-strategy none", text_data, before=skew_gates)
    strategy, *settings = strategy.split()
    keys = " ".join(f"--moe-strategy-set {key}" for key in [*settings, f"record_dir={tmp_path}"])
    run = train(num_ranks, f"{arguments} --moe-strategy {strategy} {keys}", text_data, before=skew_gates)
    assert relative_difference(run.losses, stock.losses) <= 1e-5
    assert relative_difference(run.grad_norms, stock.grad_norms) <= 1e-4
    assert any(layer.num_replicas for entry in read_metrics(tmp_path) for layer in entry.layers)
