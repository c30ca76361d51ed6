"""Trainings whose hot experts change have stock Megatron's losses, with corrections by quotas."""

import logging
from pathlib import Path

import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.training import get_args

from megatron_fssdp.strategies.fssdp.corrected_plan import Correction, ExactCounts, ExpectedSeconds
from megatron_fssdp.strategies.layer_plan import LayerPlan

from ...training_run import relative_difference, train
from .test_parity_matrix import INTERLEAVED, NO_BIAS, OVERLAPS, PP2, RECOMPUTE

PERIOD = 2
"""Iterations after which other experts become hot."""
SETTINGS = "slots=2 profile_iterations=1 check_plans=true"
CASES = {
    "one_node": (4, 4, OVERLAPS, SETTINGS),
    "nodes_micro_batches": (4, 4, "--global-batch-size 16", f"{SETTINGS} nodes=2 reshard_interval=2"),
    "pipeline_recomputed": (4, 2, f"{PP2} {RECOMPUTE} --global-batch-size 16", SETTINGS),
    "interleaved_rematerialized": (
        4,
        2,
        f"{INTERLEAVED} --swiglu {NO_BIAS} --global-batch-size 16",
        f"{SETTINGS} rematerialize=true",
    ),
    "in_steps": (4, 4, "", f"{SETTINGS} nodes=2 smart_schedule=true"),
    "deduplicated": (4, 4, "", f"{SETTINGS} nodes=2 exchange=deduplicated"),
}


def skew_gates() -> None:
    """Run on every rank before the launch: two experts are hot, and others after some passes."""
    gating, corrected = TopKRouter.gating, ExactCounts.corrected

    def skewed(router: TopKRouter, hidden: torch.Tensor) -> torch.Tensor:
        logits = gating(router, hidden)
        first = 2 * (get_args().curr_iteration // PERIOD) % logits.shape[-1]
        bias = torch.zeros_like(logits)
        bias[..., first : first + 2] = 4.0
        return logits + bias

    def noted(exact: ExactCounts, planned: LayerPlan, expected: ExpectedSeconds | None) -> Correction:
        found = corrected(exact, planned, expected)
        if found.plan is not planned:
            logging.getLogger("megatron_fssdp").warning("corrected: %s", found.plan.dispatch_policy)
        return found

    TopKRouter.gating, ExactCounts.corrected = skewed, noted
    # The assignment always pays, and a search never does.
    ExactCounts.quota_s, ExactCounts.search_s = 0.0, 1e9


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_losses_equal_stock_megatron(name: str, text_data: Path) -> None:
    num_ranks, expert_parallel, arguments, settings = CASES[name]
    arguments = f"--expert-model-parallel-size {expert_parallel} {arguments} --train-iters 8"
    stock = train(num_ranks, f"{arguments} --moe-strategy none", text_data, before=skew_gates)
    keys = " ".join(f"--moe-strategy-set {key}" for key in settings.split())
    run = train(num_ranks, f"{arguments} --moe-strategy fssdp {keys}", text_data, before=skew_gates)
    assert relative_difference(run.losses, stock.losses) <= 1e-5
    corrections = {message for message in run.messages if message.startswith("corrected: ")}
    wanted = "even" if "deduplicated" in name else "unbound"
    assert any(wanted in message for message in corrections), corrections
