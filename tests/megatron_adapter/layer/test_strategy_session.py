"""The process groups of a session, and the form of planning kernels on all ranks of a pipeline stage."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES
from megatron_fssdp.megatron_adapter.layer.strategy_session import StrategySession
from megatron_fssdp.planning.native import kernel
from megatron_fssdp.planning.native.kernel import KernelForm, kernel_form
from megatron_fssdp.testing import run_ranks

from ..training_run import note, train_on_all_ranks, wrap


def note_timeouts() -> None:
    """Note the time-outs of the two groups of the same ranks, before each iteration."""
    from megatron_fssdp.runtime.layers.moe_runtime import MoERuntime

    def begin_iteration(begin: Any, self: MoERuntime, *args: object) -> None:
        groups = self.layers[0].groups
        assert groups.transfers is not None
        for group in (groups.expert_parallel, groups.transfers):
            note(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())
        begin(self, *args)

    wrap(MoERuntime, "begin_iteration", begin_iteration)


def test_process_groups_of_transfers_have_megatrons_timeout(text_data: Path) -> None:
    arguments = "{EP2} --train-iters 2 --distributed-timeout-minutes 7"
    for run in train_on_all_ranks(2, arguments, text_data, strategy="fssdp", before=note_timeouts):
        assert run.notes == (420, 420, 420, 420)


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
