"""The process groups of a session, and the form of planning kernels on all ranks of a pipeline stage."""

import logging
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES
from megatron_fssdp.megatron_adapter.layer.strategy_session import StrategySession
from megatron_fssdp.planning.native import kernel
from megatron_fssdp.planning.native.kernel import KernelForm, kernel_form
from megatron_fssdp.testing import run_ranks

from ..training_run import train_on_all_ranks


def tell_timeouts() -> None:
    """Log the time-outs of the two groups of the same ranks, before each iteration."""
    from megatron_fssdp.runtime.layers.moe_runtime import MoERuntime

    begin = MoERuntime.begin_iteration

    def begin_iteration(self: MoERuntime, *args: object) -> None:
        groups = self.layers[0].groups
        assert groups.transfers is not None
        seconds = [
            int(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())
            for group in (groups.expert_parallel, groups.transfers)
        ]
        logging.getLogger("megatron_fssdp.testing").warning(f"time-outs {seconds} s")
        begin(self, *args)  # type: ignore[arg-type]

    MoERuntime.begin_iteration = begin_iteration  # type: ignore[method-assign, assignment]


def test_process_groups_of_transfers_have_megatrons_timeout(text_data: Path) -> None:
    arguments = (
        "--expert-model-parallel-size 2 --train-iters 2 --moe-strategy fssdp --distributed-timeout-minutes 7"
    )
    for run in train_on_all_ranks(2, arguments, text_data, before=tell_timeouts):
        assert [text for text in run.messages if "time-outs" in text] == ["time-outs [420, 420] s"] * 2


def forms_after_agreement(rank, world_size, plain_rank):
    kernel.set_form(KernelForm(False, "not compiled") if rank == plain_rank else KernelForm(True))
    session = StrategySession("fssdp", STRATEGIES["fssdp"].settings())
    session.agree_on_kernels([dist.group.WORLD])
    session.agree_on_kernels([dist.group.WORLD])  # later layers do nothing
    return str(kernel_form())


@pytest.mark.slow
def test_one_rank_without_compiled_kernels_makes_all_ranks_plain():
    assert run_ranks(forms_after_agreement, 2, None) == ["compiled"] * 2
    assert run_ranks(forms_after_agreement, 2, 1) == [
        "plain Python (another rank has no compiled kernels)",
        "plain Python (not compiled)",
    ]
