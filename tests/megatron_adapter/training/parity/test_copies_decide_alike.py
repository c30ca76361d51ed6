"""Expert-parallel groups with copies of the same experts see other tokens, and must move the same experts."""

from pathlib import Path
from typing import Any

import pytest

from megatron_fssdp.strategies.fssdp import fssdp_strategy
from megatron_fssdp.strategies.fssdp.fssdp_strategy import FssdpStrategy

from ...training_run import train, train_on_all_ranks

ARGUMENTS = "--expert-model-parallel-size 2 --train-iters 8 --global-batch-size 16"
SETTINGS = "window=3 profile_iterations=1 slots=0 reshard_interval=3 check_plans=true"
JUMP_AT = 1


def one_copy_jumps() -> None:
    """Let the loads of the second copy jump, and set prices at which the first copy alone would move experts.

    New owners save a second in an iteration and layer. The move takes five, and three iterations and two
    layers save six; soon after a jump, they are expected to save less than five.
    """
    import torch
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.training import get_args

    gating = TopKRouter.gating

    def hot_gating(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        logits = gating(self, hidden)
        jumps = parallel_state.get_expert_data_parallel_rank() == 1 and get_args().curr_iteration >= JUMP_AT
        hot = torch.zeros(logits.shape[-1])
        hot[[1, 2] if jumps else [0, 1]] = 20.0
        return logits + hot

    def seconds(self: FssdpStrategy, context: Any, owner_E: Any, load_E: Any) -> float:
        return float(len(set(owner_E[:2])) == 1)

    def moving(old_E: Any, new_E: Any, *others: Any) -> float:
        return 5.0 * bool((old_E != new_E).any())

    TopKRouter.gating = hot_gating
    FssdpStrategy._seconds = seconds  # type: ignore[method-assign]
    FssdpStrategy.overlap_degree = lambda self, context: 0  # type: ignore[method-assign]
    fssdp_strategy.exchange_s = moving  # type: ignore[assignment]


def test_a_jump_in_one_copy_counts_for_all(text_data: Path) -> None:
    settings = "".join(f" --moe-strategy-set {one}" for one in SETTINGS.split())
    runs = train_on_all_ranks(
        4, f"{ARGUMENTS} --moe-strategy fssdp{settings}", text_data, before=one_copy_jumps, timeout_s=120
    )
    stock = train(4, f"{ARGUMENTS} --moe-strategy none", text_data, before=one_copy_jumps)
    assert [run.exit_code for run in runs] == [0, 0, 0, 0]
    assert runs[-1].losses == pytest.approx(stock.losses, rel=1e-5)
    # Later decisions, when the loads have settled again, move experts.
    assert any("re-sharded" in message for run in runs for message in run.messages)
