"""Ranks of a pipeline stage run planning kernels in the same form."""

import pytest
import torch.distributed as dist

from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES
from megatron_fssdp.megatron_adapter.layer.strategy_session import StrategySession
from megatron_fssdp.planning.native import kernel
from megatron_fssdp.planning.native.kernel import KernelForm, kernel_form
from megatron_fssdp.testing import run_ranks


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
