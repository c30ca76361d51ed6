"""The process groups of a session, and the form of planning kernels on all ranks of a pipeline stage."""

import logging
from pathlib import Path

import torch

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
